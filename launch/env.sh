#!/usr/bin/env bash
# Makes the project's own environment in .venv, once; a second call takes a second. Sourced or run:
#   bash launch/env.sh            everything, for people and for tests
# CPU or CUDA is chosen by what the machine has; MEGARL_DEVICE=cpu|cuda overrides it.
# PYTHON names the interpreter to build from (3.11 or newer).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=${PYTHON:-python3}

device=${MEGARL_DEVICE:-}
if [ -z "$device" ]; then
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then device=cuda; else device=cpu; fi
fi
pins=$root/launch/requirements-$device.txt
[ -f "$pins" ] || { echo "launch/env.sh: MEGARL_DEVICE is '$device'; set it to cpu or cuda" >&2; exit 2; }

# What is installed is named by what it was made from.
stamp=$venv/.megarl-$device-$(cat "$pins" "$root/launch/requirements-dev.txt" "$root/setup.py" | sha256sum | cut -c1-16)
if [ -e "$stamp" ]; then
  exit 0
fi
"$python" - <<'E2' || { echo "launch/env.sh: $python is too old; set PYTHON to Python 3.11 or newer" >&2; exit 2; }
import sys
sys.exit(sys.version_info < (3, 11))
E2
command -v c++ >/dev/null 2>&1 || { echo "launch/env.sh: no C++ compiler, which DeepSpeed needs; install g++" >&2; exit 2; }

log=$venv/install.log
begun=$SECONDS
echo "making the environment in .venv ($device); the log is .venv/install.log" >&2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 ||
    { echo "launch/env.sh: pip install $* failed; the end of $log:" >&2; tail -n 15 "$log" >&2; exit 1; }
}
torch=$(sed -n 's/^# torch: //p' "$pins")
vllm=$(sed -n 's/^# vllm: //p' "$pins")
pip wheel "setuptools==78.1.1"
# torch first: a later package that asks for plain torch would otherwise bring another build of it.
if [ "$device" = cpu ]; then
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$torch" >>"$log" 2>&1 ||
    pip "$torch" --extra-index-url https://download.pytorch.org/whl/cpu
  # vLLM's CPU build names vision and audio packages that text models do not need and that have no CPU build.
  pip --no-deps "$vllm"
else
  pip "$torch" "$vllm"
fi
pip --no-build-isolation -r "$pins"
pip -r "$root/launch/requirements-dev.txt"
pip --no-deps --no-build-isolation -e "$root"
# DeepSpeed compiles its shared-memory operator at first use; do it now, so that no run waits for it.
"$venv/bin/python" - >>"$log" 2>&1 <<'E2' || true
from deepspeed.accelerator import get_accelerator
if get_accelerator().device_name() == "cpu":
    get_accelerator().create_op_builder("ShareMemCommBuilder").load()
E2
"$venv/bin/python" -c "import torch, deepspeed, ray, transformers, megarl.parallel.mesh, megarl.kernels.logprobs" >>"$log" 2>&1 ||
  { echo "launch/env.sh: the environment does not import; the end of $log:" >&2; tail -n 15 "$log" >&2; exit 1; }
rm -f "$venv"/.megarl-*
touch "$stamp"
echo "environment ready in $((SECONDS - begun)) s" >&2
