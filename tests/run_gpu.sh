#!/usr/bin/env bash
# Everything that only a GPU can tell, on one GPU, what tells most for its minutes first:
#   bash tests/run_gpu.sh [--minutes 25]      results in runs/gpu/DATE/results.json and results.md
#   bash tests/run_gpu.sh --rehearse          the same on the CPU, where a step can be; needs no GPU
#   MEGARL_PYTHON=python3 bash tests/run_gpu.sh     with that interpreter and what it has; installs nothing
# Without a GPU: one line, exit code 2. The steps are in tools/gpu_steps.py; docs/gpu.md says what to carry to a
# machine without network.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
case " $* " in
  *" --rehearse "*) export MEGARL_DEVICE=cpu CUDA_VISIBLE_DEVICES= ;;
  *)
    if ! { command -v nvidia-smi && nvidia-smi -L | grep -q GPU; } >/dev/null 2>&1; then
      echo "tests/run_gpu.sh: there is no NVIDIA GPU here; --rehearse walks the steps on the CPU" >&2
      exit 2
    fi
    ;;
esac
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
if [ -n "${MEGARL_PYTHON:-}" ]; then
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
  exec "$MEGARL_PYTHON" tools/run_gpu.py "$@"
fi
bash launch/env.sh
export PATH=$root/.venv/bin:$PATH
exec python tools/run_gpu.py "$@"
