#!/usr/bin/env bash
# Environment, then style and types, then the tests. Arguments go to pytest: bash tests/run.sh tests/unit -k window
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash launch/env.sh
bin=$root/.venv/bin
if [ $# -eq 0 ]; then
  "$bin/ruff" check .
  "$bin/ruff" format --check --quiet .
  "$bin/python" -m pyright --pythonpath "$bin/python"
fi
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
exec "$bin/python" -m pytest "$@"
