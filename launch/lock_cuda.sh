#!/usr/bin/env bash
# Makes the pinned requirements for NVIDIA GPUs again, one file for each Python, from launch/requirements-cuda.txt:
#   bash launch/lock_cuda.sh [VERSION...]        default 3.11 3.12 3.13
# Packages are resolved by name, and nothing is installed. uv is taken from .venv, or from PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
uv=../.venv/bin/uv
[ -x "$uv" ] || uv=uv
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
sed -n 's/^# \(torch\|vllm\): //p; /^[^#]/p' requirements-cuda.txt >"$wanted"
grep -v '^#' requirements-dev.txt >>"$wanted" # one resolution of all that one environment gets
# DeepSpeed is built with this one (launch/env.sh).
echo "setuptools==78.1.1" >>"$wanted"
for version in "${@:-3.11 3.12 3.13}"; do
  for one in $version; do
    lock=requirements-cuda-py$one.txt
    {
      echo "# All packages for NVIDIA GPUs and Python $one, resolved by launch/lock_cuda.sh. Not installed or run on a GPU yet."
      "$uv" pip compile "$wanted" --quiet --python-version "$one" --python-platform x86_64-manylinux_2_28 \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links
    } >"$lock.new"
    mv "$lock.new" "$lock"
    echo "launch/$lock: $(grep -c == "$lock") packages" >&2
  done
done
