"""Checks a bundle of tools/pack_gpu.py and makes a Python environment of it. Needs no package.

    python unpack_gpu.py TARGET [--any-gpu]                      then TARGET/bin/python runs megarl

The version of Python, the GPU, its driver and the digest of every part are checked first; --any-gpu
asks for no GPU, for login nodes and for CUDA's compatibility package.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
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


def refuse(problem: str) -> None:
    sys.exit(f"unpack_gpu.py: {problem}")


def check_gpu(needed: str, oldest_driver: int) -> None:
    """Refuse a first GPU of another compute capability, and an old driver."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
        name, capability, driver = answer.split("\n")[0].split(", ")
    except (OSError, subprocess.TimeoutExpired, ValueError):
        sys.exit("unpack_gpu.py: nvidia-smi finds no GPU; --any-gpu unpacks without one")
    if capability != needed:
        refuse(f"{name} has compute capability {capability}; the bundle is for {needed}: make one")
    if int(driver.split(".")[0]) < oldest_driver:
        refuse(f"the driver is {driver}, and the bundle needs {oldest_driver} or newer; update it")


def part_fault(part: dict[str, Any]) -> str:
    """What is wrong with a part's file; "" if nothing is."""
    path = BUNDLE / part["name"]
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == part["sha256"]:
        return ""
    return f"{path.name} is {'damaged' if path.is_file() else 'missing'}"


def write(target: Path, files: list[Any], part: dict[str, Any]) -> None:
    """Write the bytes that a part holds to their files, which exist in full size."""
    position, end = 0, part["start"] + part["size"]
    with gzip.open(BUNDLE / part["name"]) as stream:
        for path, _, _, pieces in files:
            for offset, length in pieces:
                first, last = max(position, part["start"]), min(position + length, end)
                if first < last:
                    with (target / path).open("r+b") as file:
                        file.seek(offset + first - position)
                        while first < last:
                            first += file.write(stream.read(min(last - first, 1 << 24)))
                position += length


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("--any-gpu", action="store_true")
    options = parser.parse_args()
    begun, target = time.monotonic(), options.target
    bundle = json.loads((BUNDLE / "bundle.json").read_text())
    if target.exists():
        refuse(f"{target} exists; remove it, or name another folder")
    if (here := sysconfig.get_python_version()) != bundle["python"]:
        refuse(f"this is Python {here}; call it with Python {bundle['python']}, as in the bundle")
    if not options.any_gpu:
        check_gpu(bundle["capability"], bundle["driver"])
    with ThreadPoolExecutor() as pool:
        if faults := ", ".join(filter(None, pool.map(part_fault, bundle["parts"]))):
            refuse(f"{faults}; copy again")
        venv.create(target, symlinks=True)
        for path, size, mode, _ in bundle["files"]:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).touch(mode)
            os.truncate(target / path, size)
        list(pool.map(lambda part: write(target, bundle["files"], part), bundle["parts"]))
    print(f"{len(bundle['files'])} files in {time.monotonic() - begun:.0f} s: {target}/bin/python")


if __name__ == "__main__":
    main()
