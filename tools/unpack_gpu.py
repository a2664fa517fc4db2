"""Checks a bundle of tools/pack_gpu.py and makes a Python environment of it. Needs no package.

    python unpack_gpu.py TARGET [--any-gpu]        TARGET/bin/python runs megarl

The GPU, its driver, the version of Python and the digest of every part are checked first; --any-gpu
leaves out the first two, for login nodes and for CUDA's compatibility package.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import subprocess
import sys
import sysconfig
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BUNDLE = Path(__file__).resolve().parent


def gpu_fault(bundle: dict[str, Any]) -> str:
    """Why this machine's first GPU cannot run the bundle; "" if it can."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        name, capability, driver = answer.stdout.splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return "nvidia-smi finds no GPU here; --any-gpu unpacks without one"
    if capability != bundle["capability"]:
        return (
            f"the bundle is for compute capability {bundle['capability']}, and {name} has"
            f" {capability}; make one for it with tools/pack_gpu.py"
        )
    if int(driver.split(".")[0]) < bundle["driver"]:
        return (
            f"the driver is {driver}, and the bundle needs {bundle['driver']} or newer; update it,"
            " or put CUDA's compatibility package on LD_LIBRARY_PATH and use --any-gpu"
        )
    return ""


def part_fault(part: dict[str, Any]) -> str:
    """What is wrong with a part's file; "" if nothing is."""
    path = BUNDLE / part["name"]
    if not path.is_file():
        return f"{path.name} is missing"
    right = hashlib.sha256(path.read_bytes()).hexdigest() == part["sha256"]
    return "" if right else f"{path.name} is damaged"


def write(target: Path, files: list[Any], part: dict[str, Any]) -> None:
    """Write the bytes that a part holds to their files, which exist in full size."""
    position, end = 0, part["start"] + part["size"]
    with lzma.open(BUNDLE / part["name"]) as stream:
        for path, _, _, pieces in files:
            for offset, length in pieces:
                first, last = max(position, part["start"]), min(position + length, end)
                if first < last:
                    with (target / path).open("r+b") as file:
                        file.seek(offset + first - position)
                        while first < last:
                            first += file.write(stream.read(min(last - first, 1 << 24)))
                position += length


def fault(bundle: dict[str, Any], target: Path, *, any_gpu: bool) -> str:
    """Why the bundle cannot be unpacked here; "" if it can."""
    if target.exists():
        return f"{target} exists; remove it, or name another folder"
    if sysconfig.get_python_version() != bundle["python"]:
        return (
            f"the bundle is for Python {bundle['python']}, and this is Python"
            f" {sysconfig.get_python_version()}; use the other, or make one with --python"
        )
    if not any_gpu and (problem := gpu_fault(bundle)):
        return problem
    with ThreadPoolExecutor() as pool:
        problems = list(filter(None, pool.map(part_fault, bundle["parts"])))
    return f"{', '.join(problems)}; copy again" if problems else ""


def main(arguments: list[str]) -> int:
    """Exit code 2, after one line, for whatever is wrong."""
    any_gpu = "--any-gpu" in arguments
    names = [argument for argument in arguments if argument != "--any-gpu"]
    if len(names) != 1:
        print("unpack_gpu.py: name one folder: python unpack_gpu.py TARGET", file=sys.stderr)
        return 2
    begun, target = time.monotonic(), Path(names[0])
    bundle = json.loads((BUNDLE / "bundle.json").read_text())
    if problem := fault(bundle, target, any_gpu=any_gpu):
        print(f"unpack_gpu.py: {problem}", file=sys.stderr)
        return 2
    venv.create(target, symlinks=True)
    for path, size, mode, _ in bundle["files"]:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).touch(mode)
        os.truncate(target / path, size)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda part: write(target, bundle["files"], part), bundle["parts"]))
    print(f"{len(bundle['files'])} files in {time.monotonic() - begun:.0f} s: {target}/bin/python")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
