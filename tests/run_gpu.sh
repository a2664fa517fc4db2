#!/usr/bin/env bash
# Everything that only a GPU can tell, what tells most for its minutes first; what needs more GPUs than there are is skipped:
#   bash tests/run_gpu.sh [--minutes 40] [--out FOLDER]      results.json, results.md and results.tar.gz; runs/gpu/DATE
#   bash tests/run_gpu.sh --python PYTHON     with this Python as it is, without launch/env.sh; or set MEGARL_PYTHON
#   bash tests/run_gpu.sh --rehearse          the same on the CPU, where a step can be; needs no GPU
# Without a GPU: one line, exit code 2. The steps are in tools/gpu_steps.toml; docs/howto/install.md says what to
# carry to a machine without network.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
refuse() { echo "tests/run_gpu.sh: $*" >&2; exit 2; }
python=${MEGARL_PYTHON:-}
options=()
while [ $# -gt 0 ]; do
  case $1 in
    --python) python=${2:-}; [ -n "$python" ] || refuse "--python needs the path of a Python"; shift ;;
    --python=*) python=${1#*=} ;;
    *) options+=("$1") ;;
  esac
  shift
done
case " ${options[*]-} " in
  *" --rehearse "*) export MEGARL_DEVICE=cpu CUDA_VISIBLE_DEVICES= ;;
  *)
    case $'\n'$(nvidia-smi -L 2>/dev/null || true) in # as in launch/env.sh
      *$'\nGPU '*) ;;
      *) refuse "there is no NVIDIA GPU here; --rehearse walks the steps on the CPU" ;;
    esac
    ;;
esac
if [ -n "$python" ]; then
  found=$(command -v "$python") || refuse "there is no Python $python"
  python=$found
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || refuse "$python is not Python 3.11 or newer"
else
  bash launch/env.sh
  python=$root/.venv/bin/python
fi
# The folder of the Python comes first, and its links are not followed: they lead out of a virtual environment.
export PATH=$(cd "$(dirname "$python")" && pwd):$PATH TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
exec "$python" tools/run_gpu.py ${options[@]+"${options[@]}"}
