#!/usr/bin/env bash
# Environment, then style, then tests, of which one is that of types:
#   bash tests/run.sh                         what a change can break
#   bash tests/run.sh nightly                 the rest, marked `nightly`: chaos, Slurm, fuzz, browsers, tutorials,
#                                             published agents, whole matrices; no style
#   bash tests/run.sh fast                    as the first, without tests that take seconds
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
# Three at a time on two cores, since ranks and engines often wait for each other; a file's tests in one process
# because of their fixtures, and in the order of tests/conftest.py.
three_at_a_time="-n 3 --dist loadfile --no-loadscope-reorder"
everything="tests/system tests/distributed tests/unit"
case ${1:-} in
  '')
    style
    # shellcheck disable=SC2086
    exec python -m pytest $three_at_a_time --durations=25 -m "not nightly" $everything
    ;;
  nightly)
    shift
    # shellcheck disable=SC2086
    exec python -m pytest $three_at_a_time --durations=25 -m nightly "$@" $everything
    ;;
  fast)
    shift
    style
    # Of the tests on ranks those that send messages; those that train models under many layouts take minutes.
    # tests/not_fast.txt names what else takes seconds, by --durations=0.
    # shellcheck disable=SC2086
    exec python -m pytest $three_at_a_time --durations=15 -m "not engine and not slow and not not_fast and not nightly" "$@" \
      tests/unit tests/distributed/test_exchange.py
    ;;
  *) exec python -m pytest "$@" ;;
esac
