"""Makes a bundle of the packages for CUDA, for one type of GPU and machines without a network.

    python tools/pack_gpu.py --gpu h200 [--python 3.12] [--wheels FOLDER] [--out FOLDER] [--part 60]
                             [--level 6]

The wheels of the lock are downloaded, unless --wheels names a folder that has them. Machine code
for other GPUs is left out, and so is what megarl never imports (tools/pack_gpu.toml). FOLDER gets
parts of at most --part MB, bundle.json with their digests, left_out.txt, and unpack_gpu.py, which
checks the parts and makes a Python environment of them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import mmap
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GPUS = {"a100": 80, "l40s": 89, "h100": 90, "h200": 90, "b200": 100, "b300": 103, "rtx5090": 120}
"""{name: compute capability, times ten}"""
BLOCK = 1 << 24
"""Bytes that are compressed at once."""
FATBIN = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""How a container of machine code for several GPUs begins; its size follows."""
PTX, CUBIN = 1, 2
Code = tuple[int, int, tuple[int, int]]
"""Kind and compute capability of an entry in a container, and offset and length of its code."""


def refuse(problem: str) -> None:
    sys.exit(f"tools/pack_gpu.py: {problem}")


def download(lock: Path, version: str, wheels: Path) -> None:
    """Fetch the lock's wheels for a version of Python; DeepSpeed has none, and is built."""
    text = lock.read_text()
    # `===`: another index's 2.13.0+cpu also is torch==2.13.0.
    pinned = [
        line.replace("==", "===", 1) for line in re.findall(r"^(?!deepspeed).*==.*", text, re.M)
    ]
    built = re.findall(r"^deepspeed==.*", text, re.M)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platforms = ["manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 40))]
    tags = [f"--platform={platform}_x86_64" for platform in platforms]
    tags += ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    for command in (
        [*pip, "download", "--no-deps", "-d", wheels, *tags, *pinned],
        [*pip, "wheel", "--no-deps", "-w", wheels, "--no-build-isolation", *built],
    ):
        if subprocess.run(command).returncode:
            refuse(f"pip {command[4]} failed; the lines above name the package")


def unpack_wheel(wheel: Path, site: Path, programs: Path) -> None:
    """Put a wheel's packages in `site` and its programs in `programs`, but no scripts."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            path = site / re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", entry.filename)
            if program := re.fullmatch(r"[^/]+\.data/scripts/(.+)", entry.filename):
                path = programs / program[1]
            if not entry.is_dir() and (not program or archive.open(entry).read(4) == b"\x7fELF"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target, BLOCK)
                path.chmod(0o755 if program or entry.external_attr >> 16 & 0o111 else 0o644)


def containers(data: mmap.mmap) -> Iterator[list[Code]]:
    """Find each container of GPU code in a file; yields its entries."""
    start = data.find(FATBIN)
    while start >= 0:
        position = start + 16
        (size,) = struct.unpack_from("<Q", data, start + 8)
        end, entries = position + size, []
        while position < end <= len(data):
            kind, _, header, length = struct.unpack_from("<HHIQ", data, position)
            (capability,) = struct.unpack_from("<I", data, position + 28)
            entries.append((kind, capability, (position + header, length)))
            position += header + length
        yield entries
        start = data.find(FATBIN, position)


def needless(entries: list[Code], gpu: int) -> list[tuple[int, int]]:
    """(offset, length) of each entry that a GPU of compute capability `gpu`, such as 90, does not
    load. It loads the machine code of its own major version with the highest minor version that it
    can run or, if there is none, the newest PTX.
    """
    cubins = {c for kind, c, _ in entries if kind == CUBIN and c // 10 == gpu // 10 and c <= gpu}
    texts = {c for kind, c, _ in entries if kind == PTX and c <= gpu}
    loaded = (CUBIN, max(cubins)) if cubins else (PTX, max(texts, default=0))
    return [code for kind, c, code in entries if kind in (PTX, CUBIN) and (kind, c) != loaded]


def pieces(path: Path, gpu: int) -> tuple[list[tuple[int, int]], int]:
    """([(offset, length) of each part of a file that is packed], number of its containers with code
    for the GPU). Headers of other GPUs' code are packed too, since loaders read them to choose.
    """
    size, position, usable = path.stat().st_size, 0, 0
    packed: list[tuple[int, int]] = []
    if size and ".so" in path.name:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            for entries in containers(data):
                others = needless(entries, gpu)
                usable += len(others) < len(entries)
                for offset, length in others:
                    packed.append((position, offset - position))
                    position = offset + length
    return [*packed, (position, size - position)], usable


def select(root: Path, gpu: int) -> tuple[list[Any], Counter[str], int]:
    """Files of the environment in `root` as [name, size, mode, pieces]; {what is left out: bytes};
    how many containers have code for the GPU.
    """
    tables = tomllib.loads((ROOT / "tools" / "pack_gpu.toml").read_text())
    reasons = tables["left_out"] | (tables["left_out_before_10"] if gpu < 100 else {})
    files, left, usable = [], Counter[str](), 0
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name, size = str(path.relative_to(root)), path.stat().st_size
        inside = name.partition("/site-packages/")[2] or name
        for reason, patterns in reasons.items():
            if any(fnmatch(inside, pattern) for pattern in patterns):
                left[f"{inside.split('/')[0]}: {reason}"] += size
                break
        else:
            packed, codes = pieces(path, gpu)
            usable += codes
            files.append((name, size, path.stat().st_mode & 0o777, packed))
            if others := size - sum(length for _, length in packed):
                left[f"{inside}: code for other GPUs"] += others
    return files, left, usable


def blocks(root: Path, files: Iterable[Any]) -> Iterator[bytes]:
    """The pieces of all files, one after another."""
    block = bytearray()
    for name, _, _, packed in files:
        with (root / name).open("rb") as file:
            for offset, length in packed:
                file.seek(offset)
                while length:
                    data = file.read(min(length, BLOCK - len(block)))
                    length -= len(data)
                    block += data
                    if len(block) == BLOCK:
                        yield bytes(block)
                        block.clear()
    yield bytes(block)


def write_parts(
    out: Path, packed: Iterable[bytes], limit: float, level: int
) -> list[dict[str, Any]]:
    """Write blocks, compressed one by one, to parts of at most `limit` bytes. Machine code of GPUs
    is compressed already, and is stored as it is.
    """
    parts: list[dict[str, Any]] = []
    start, room = 0, 0.0
    for block in packed:
        sample = block[:65536]
        data = gzip.compress(block, level if len(gzip.compress(sample, 1)) < 62000 else 0)
        if len(data) > room:
            parts.append({"name": f"part-{len(parts):03}.gz", "start": start, "size": 0})
            room = limit
        with (out / parts[-1]["name"]).open("ab") as file:
            file.write(data)
        parts[-1]["size"] += len(block)
        start, room = start + len(block), room - len(data)
    for part in parts:
        part["sha256"] = hashlib.sha256((out / part["name"]).read_bytes()).hexdigest()
    return parts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", required=True, choices=GPUS)
    parser.add_argument("--python", default=sysconfig.get_python_version(), metavar="VERSION")
    parser.add_argument("--wheels", type=Path, help="folder of wheels; nothing is downloaded")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_bundle")
    parser.add_argument("--level", type=int, default=6, help="of gzip, 1 (fast) to 9")
    parser.add_argument("--part", type=float, default=60, help="MB of a part at most")
    options = parser.parse_args(arguments)
    gpu, out, version = GPUS[options.gpu], options.out, options.python
    lock = ROOT / "launch" / f"requirements-cuda-py{version}.txt"
    if not lock.exists():
        refuse(f"there is no launch/{lock.name}; make it: bash launch/lock_cuda.sh {version}")
    if out.exists():
        refuse(f"{out} exists; remove it, or set --out")
    wheels = options.wheels or out.with_name(f"{out.name}_wheels")
    if not options.wheels:
        download(lock, version, wheels)
    found = sorted(wheels.glob("*.whl"))
    if cpu := [wheel.name for wheel in found if "+cpu" in wheel.name]:
        refuse(f"{wheels} has {cpu[0]}, which is not for CUDA; replace it")
    counts = Counter(wheel.name.partition("-")[0].lower() for wheel in found)
    if several := [name for name, count in counts.items() if count > 1]:
        refuse(f"{wheels} has several versions of {several[0]}; keep the lock's")
    with tempfile.TemporaryDirectory(dir=wheels) as folder:
        root = Path(folder)
        for wheel in found:
            unpack_wheel(wheel, root / f"lib/python{version}/site-packages", root / "bin")
        files, left, usable = select(root, gpu)
        if not usable:
            refuse(f"no wheel has code for compute capability {gpu / 10}; is torch one for CUDA?")
        out.mkdir(parents=True)
        parts = write_parts(out, blocks(root, files), options.part * 1e6, options.level)
    lines = (f"{size:>14,}  {what}\n" for what, size in left.most_common())
    (out / "left_out.txt").write_text(f"{left.total():>14,}  in all\n{''.join(lines)}")
    needs = (ROOT / "launch" / "requirements-cuda.txt").read_text()
    bundle = {"capability": str(gpu / 10), "python": version, "files": files, "parts": parts}
    bundle["driver"] = int(re.findall(r"^# driver: (\d+)", needs, re.M)[0])
    (out / "bundle.json").write_text(json.dumps(bundle))
    shutil.copy(ROOT / "tools" / "unpack_gpu.py", out)
    size = sum(path.stat().st_size for path in out.iterdir()) / 1e6
    print(f"{out}: {len(parts)} parts, {size:,.0f} MB; left out: {left.total() / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
