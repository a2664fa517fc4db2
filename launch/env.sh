#!/usr/bin/env bash
# Makes the project's own environment in .venv, once; a second call takes a second:
#   bash launch/env.sh            everything, for people and for tests
# CPU or CUDA is chosen by what the machine has; MEGARL_DEVICE=cpu|cuda overrides it.
# PYTHON names the interpreter to build from (3.11 or newer).
# MEGARL_FLASH_ATTN=4 also installs FlashAttention-4, and 2 builds FlashAttention-2 with nvcc, which takes an hour or more.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=${PYTHON:-python3}

device=${MEGARL_DEVICE:-}
if [ -z "$device" ]; then
  # Not through grep -q, which ends at the first of many GPUs: pipefail would take nvidia-smi's SIGPIPE for no GPU.
  listed=$(nvidia-smi -L 2>&1) && works=yes || works=no
  case $'\n'$listed in *$'\nGPU '*) device=cuda ;; *) device=cpu ;; esac
  # The kernel module's file of a GPU; without one, as on a login node, nvidia-smi may fail. Tests set MEGARL_GPU_FILES.
  files=$(compgen -G "${MEGARL_GPU_FILES:-/dev/nvidia[0-9]*}" || true)
  if [ "$device$works" = cpuno ] && [ -n "$files" ] && command -v nvidia-smi >/dev/null; then
    echo "launch/env.sh: there is an NVIDIA GPU (${files%%$'\n'*}), but nvidia-smi fails (${listed%%$'\n'*});" \
      "reboot, which loads the driver that is installed, or set MEGARL_DEVICE=cpu" >&2
    exit 2
  fi
fi
wanted=$root/launch/requirements-$device.txt
dev=$root/launch/requirements-dev.txt
refuse() { echo "launch/env.sh: $*" >&2; exit 2; }
[ -f "$wanted" ] || refuse "MEGARL_DEVICE is '$device'; set it to cpu or cuda"
pins=$wanted
if [ "$device" = cuda ]; then
  version=$("$python" -c 'import sysconfig; print(sysconfig.get_python_version())')
  pins=$root/launch/requirements-cuda-py$version.txt
  [ -f "$pins" ] || refuse "there is no launch/requirements-cuda-py$version.txt, the pinned packages for Python $version;" \
    "set PYTHON to one of $(cd "$root/launch" && ls requirements-cuda-py*.txt | sed 's/.*-py/Python /; s/.txt//' | paste -sd, -), or make it: bash launch/lock_cuda.sh $version"
fi

flash=${MEGARL_FLASH_ATTN:-}
case $flash in
  '') ;;
  2 | 4) [ "$device" = cuda ] || refuse "MEGARL_FLASH_ATTN is '$flash', which needs MEGARL_DEVICE=cuda; unset it" ;;
  *) refuse "MEGARL_FLASH_ATTN is '$flash'; set it to 4 or 2, or unset it" ;;
esac

# What is installed is named by what it was made from.
stamp=$venv/.megarl-$device-$(cat "$pins" "$dev" "$root/setup.py" | sha256sum | cut -c1-16)
if [ -e "$stamp" ] && { [ -z "$flash" ] || [ -e "$venv/.flash-attn-$flash" ]; }; then
  exit 0
fi
"$python" - <<'E2' || { echo "launch/env.sh: $python is too old; set PYTHON to Python 3.11 or newer" >&2; exit 2; }
import sys
sys.exit(sys.version_info < (3, 11))
E2
command -v c++ >/dev/null 2>&1 || { echo "launch/env.sh: no C++ compiler, which DeepSpeed needs; install g++" >&2; exit 2; }
[ "$device" = cuda ] || "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
  refuse "no libnuma.so.1, which vLLM's CPU build needs; install libnuma1 (Debian) or numactl-libs (Fedora)"
has_cuda_13() { # whether the driver's library is newer than the driver: that of CUDA's compatibility package
  "$python" - 2>/dev/null <<'E2'
import ctypes, sys
version = ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
sys.exit(version.value < 13000)
E2
}
if [ "$device" = cuda ]; then
  # Said before gigabytes are installed. A node without GPUs may make the environment for others: MEGARL_DEVICE=cuda.
  oldest=$(sed -n 's/^# driver: //p' "$wanted")
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
  case ${driver%%.*} in
    '' | *[!0-9]*) ;;
    *) [ "${driver%%.*}" -ge "$oldest" ] || has_cuda_13 || refuse "the driver is $driver, and the pinned torch is built for CUDA 13," \
      "which needs driver $oldest or newer; update the driver, or set MEGARL_DEVICE=cpu; on GPUs of data centres CUDA's" \
      "compatibility package (cuda-compat-13-0) will do, with its folder on LD_LIBRARY_PATH" ;;
  esac
  "$python" - <<'E2' || refuse "$python has no Python.h, with which Triton builds the launcher of every kernel; install python3-dev of its version"
import os, sys, sysconfig
sys.exit(not os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h")))
E2
fi

log=$venv/install.log
begun=$SECONDS
echo "making the environment in .venv ($device); the log is .venv/install.log" >&2
# A venv that was made without the package python3-venv has no pip.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv"
# As in a run (megarl/system/process_env.py): another ninja, or another folder, would build the operators again.
export PATH=$venv/bin:$PATH TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$venv/torch_extensions}
unset PYTHONDONTWRITEBYTECODE
python=$venv/bin/python
: >"$log"
phase() { echo "== $((SECONDS - begun)) s: $*" | tee -a "$log" >&2; }
failed() { # WHAT, LOG
  echo "launch/env.sh: $1; the end of $2:" >&2
  tail -n 15 "$2" >&2
  exit 1
}
run_pip() { "$python" -m pip install --disable-pip-version-check --no-input "$@"; }

# uv installs several times faster than pip. It does not read pip's configuration, which may name the only index or
# folder of wheels within reach: that is handed over.
phase uv
uv=$venv/bin/uv
run_pip --only-binary :all: "$(grep '^uv==' "$dev")" >>"$log" 2>&1 || {
  echo "uv could not be installed; installing with pip, which takes about three times as long" >&2
  uv=''
}
settings=$("$python" -m pip config list | "$python" -c '
import ast, shlex, sys
given = {}
for line in sys.stdin:
    key, _, value = line.strip().partition("=")
    section, _, name = key.rpartition(".")
    if section in ("global", "install", ":env:"):
        given[name.removeprefix("default-")] = ast.literal_eval(value).split()
known = {
    "index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST", "cert": "SSL_CERT_FILE", "timeout": "UV_HTTP_TIMEOUT",
    "no-index": "UV_NO_INDEX",
}
for name, variable in known.items():
    if name in given:
        separator = "," if name == "find-links" else " "
        print(f": ${{{variable}={shlex.quote(separator.join(given[name]))}}}; export {variable}")
') || settings=''
eval "$settings"
export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} # all indexes count alike, as for pip

attempt() { # pip install with uv, or without
  if [ -n "$uv" ]; then "$uv" pip install --python "$python" "$@"; else run_pip "$@"; fi >>"$log" 2>&1
}
install() { attempt "$@" || failed "pip install $* failed" "$log"; }

torch=$(sed -n 's/^# torch: //p' "$wanted")
vllm=$(sed -n 's/^# vllm: //p' "$wanted")
deepspeed=$(grep '^deepspeed==' "$pins")
# torch first: a later package that asks for plain torch would otherwise bring another build of it.
phase torch
if [ "$device" = cpu ]; then
  attempt "$torch+cpu" || install "$torch" --extra-index-url https://download.pytorch.org/whl/cpu
else
  install "$torch" -c "$pins"
  # A version also matches its other builds, such as 2.13.0+cpu, and an index may have no build that fits.
  needed=$(sed -n 's/^nvidia-cuda-runtime==\([0-9]*\.[0-9]*\).*/\1/p' "$pins")
  found=$("$python" -c 'import torch; print(torch.version.cuda, torch.__version__)' 2>>"$log") || failed "torch does not import" "$log"
  sources=$(env | grep -E '^UV_(DEFAULT_INDEX|INDEX|FIND_LINKS|NO_INDEX)=' | paste -sd ' ' || true)
  [ "${found% *}" = "$needed" ] || refuse "torch ${found#* } is built for CUDA ${found% *}, not $needed; it came from ${sources:-PyPI};" \
    "name an index or folder with torch for CUDA $needed (PIP_INDEX_URL, PIP_FIND_LINKS), remove .venv, and call this again"
fi

# DeepSpeed has no wheel: it is built beside the installation of all others, and so is its shared-memory operator,
# which it would compile at first use, while a run waits.
phase "what DeepSpeed is built with"
grep -E '^(ninja|numpy|packaging|psutil|py-cpuinfo|pydantic|tqdm|hjson|einops|msgpack)==' "$pins" >"$venv/build.txt" || true
install "setuptools==78.1.1" wheel -r "$venv/build.txt"
deepspeed_log=$venv/install-deepspeed.log
# Its set-up looks for a CUDA toolkit, which only its own CUDA operators need, and ends without one (7 of its 23 operators
# raise MissingCUDAException). None of them is used.
export DS_IGNORE_CUDA_DETECTION=1
set -m # a process group of its own, so that its compilers end with it
(
  run_pip --no-deps --no-build-isolation "$deepspeed"
  # A run would compile it; ranks on GPUs use none.
  [ "$device" = cuda ] || "$python" -c 'from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load()' || true
  phase "DeepSpeed is built"
) >"$deepspeed_log" 2>&1 &
building=$!
set +m
trap 'kill -- "-$building" 2>/dev/null || true' EXIT

phase "all others"
# vLLM's CPU build names vision and audio packages that text models do not need and that have no CPU build.
[ "$device" = cuda ] || install --no-deps "$vllm"
grep -v '^deepspeed==' "$pins" >"$venv/others.txt"
if [ "$device" = cuda ]; then
  install --no-build-isolation --no-deps -r "$venv/others.txt" # a lock is whole
else
  install --no-build-isolation -r "$venv/others.txt" -r "$dev"
fi
install --no-deps --no-build-isolation -e "$root"

# Imports leave what a run imports compiled, also where PYTHONDONTWRITEBYTECODE would have every run compile it again.
check() { VLLM_LOGGING_LEVEL=ERROR "$python" -c "import $1" >>"$log" 2>&1 || failed "the environment does not import" "$log"; }
phase "imports of an engine"
check "torch, ray, transformers, vllm.v1.engine.async_llm, vllm.entrypoints.openai.api_server, megarl.engines.vllm_engine"
[ "$device" = cuda ] || check vllm.v1.worker.cpu_worker
phase "waiting for DeepSpeed"
wait "$building" || failed "pip install $deepspeed failed" "$deepspeed_log"
trap - EXIT
if [ -n "$flash" ]; then
  phase "FlashAttention-$flash"
  case $flash in
    4) install -c "$pins" "$(sed -n 's/.*\["\(flash-attn-4>=[0-9a-z.]*\)"\].*/\1/p' "$root/setup.py")" ;;
    2) run_pip --no-build-isolation flash-attn==2.8.3.post2 >>"$log" 2>&1 || failed "flash-attn did not build" "$log" ;;
  esac
  touch "$venv/.flash-attn-$flash"
fi
phase "imports of a trainer"
check "deepspeed, torch.utils.tensorboard, megarl.run.loop, megarl.parallel.mesh, megarl.kernels.logprobs"
check "pytest, hypothesis"
if [ "$device" = cuda ] && [ -n "$driver" ]; then
  check "torch; torch.cuda.init()" # says why where it sees no GPU
fi
rm -f "$venv"/.megarl-*
touch "$stamp"
phase "ready"
echo "environment ready in $((SECONDS - begun)) s" >&2
