#!/usr/bin/env bash
# Environment, then style, then the tests, of which one is that of types:
#   bash tests/run.sh                         everything
#   bash tests/run.sh fast                    style, types, and the tests that start no engine (no vLLM, no Ray)
#   bash tests/run.sh tests/unit -k window    these arguments go to pytest; no style
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash launch/env.sh
bin=$root/.venv/bin
export PATH=$bin:$PATH TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
style() {
  ruff check .
  ruff format --check --quiet .
}
# Two at a time, a file's tests in one process because of their fixtures: ranks and engines often wait for each other.
# In the order given: files of long tests first, or one process would be left with them at the end.
two_at_a_time="-n 2 --dist loadfile --no-loadscope-reorder"
case ${1:-} in
  '')
    style
    # shellcheck disable=SC2086
    exec python -m pytest $two_at_a_time --durations=25 tests/system tests/distributed tests/unit
    ;;
  fast)
    shift
    style
    # Of the tests on ranks those that send messages; those that train models under many layouts take minutes.
    # shellcheck disable=SC2086
    exec python -m pytest $two_at_a_time --durations=15 -m "not engine and not slow" "$@" \
      tests/unit tests/distributed/test_exchange.py
    ;;
  *) exec python -m pytest "$@" ;;
esac
