"""Makes a bundle of the packages for CUDA, for one type of GPU and machines without a network.

    python tools/pack_gpu.py --gpu h200 [--python 3.12] [--wheels FOLDER] [--out FOLDER] [--part 60]

The wheels of the lock are downloaded, unless --wheels names a folder that has them. Machine code
for other GPUs is left out, and so is what megarl never imports (`LEFT_OUT`). FOLDER gets parts of
at most --part MB, bundle.json with their digests, left_out.txt, and unpack_gpu.py, which checks the
parts and makes a Python environment of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import mmap
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
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
LEFT_OUT = {
    "*.a": "static libraries",
}
"""{pattern of a path in site-packages: why it is left out}; the first that fits counts."""

Piece = tuple[int, int]
"""Offset and length in a file."""


def refuse(problem: str) -> None:
    sys.exit(f"tools/pack_gpu.py: {problem}")


def download(lock: Path, version: str, wheels: Path) -> None:
    """Fetch the wheels of the lock for a version of Python; DeepSpeed, which has none, is built."""
    pinned = [line for line in lock.read_text().splitlines() if "==" in line]
    built = [line for line in pinned if line.startswith("deepspeed==")]
    needed = wheels / "needed.txt"
    wheels.mkdir(parents=True, exist_ok=True)
    needed.write_text("\n".join(line for line in pinned if line not in built))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    tags = ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    platforms = ["manylinux2014_x86_64", *(f"manylinux_2_{n}_x86_64" for n in range(5, 40))]
    tags += [f"--platform={platform}" for platform in (*platforms, "manylinux1_x86_64")]
    options = ["--no-deps", f"--find-links={wheels}"]
    for command in (
        [*pip, "download", *options, *tags, "-d", str(wheels), "-r", str(needed)],
        [*pip, "wheel", *options, "--no-build-isolation", "-w", str(wheels), *built],
    ):
        if subprocess.run(command).returncode:
            refuse(f"pip {command[4]} failed; its lines above say which package")


def unpack_wheel(wheel: Path, site: Path, programs: Path) -> None:
    """Put a wheel's packages in `site` and its programs in `programs`, but no scripts."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            folder, _, name = entry.filename.partition(".data/")
            kind, _, rest = name.partition("/")
            path = site / (rest if name and "/" not in folder else entry.filename)
            if name and "/" not in folder and kind not in ("purelib", "platlib"):
                if kind != "scripts" or archive.open(entry).read(4) != b"\x7fELF":
                    continue
                path = programs / rest
            if not entry.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target, BLOCK)
                path.chmod(0o755 if entry.external_attr >> 16 & 0o111 else 0o644)


def containers(data: mmap.mmap) -> Iterator[list[tuple[int, int, Piece]]]:
    """For each container in a file, its entries: kind, compute capability, where the code is."""
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
        start = data.find(FATBIN, max(position, start + 16))


def needless(entries: Iterable[tuple[int, int, Piece]], gpu: int) -> list[Piece]:
    """Where in a container there is code that this GPU does not load: it takes the cubin for the
    highest minor version up to its own, and else the newest PTX up to its own.
    """
    entries = list(entries)
    cubins = {c for kind, c, _ in entries if kind == CUBIN and c // 10 == gpu // 10 and c <= gpu}
    texts = {c for kind, c, _ in entries if kind == PTX and c <= gpu}
    loaded = (CUBIN, max(cubins)) if cubins else (PTX, max(texts, default=0))
    return [piece for kind, c, piece in entries if kind in (PTX, CUBIN) and (kind, c) != loaded]


def pieces(path: Path, gpu: int) -> tuple[list[Piece], int]:
    """What of a file is packed, and how many of its containers have code for the GPU. The headers
    of other code stay, since loaders choose by them.
    """
    size = path.stat().st_size
    if not size or ".so" not in path.name:
        return [(0, size)] if size else [], 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        usable, kept, position = 0, [], 0
        for entries in containers(data):
            gone = needless(entries, gpu)
            usable += len(gone) < len(entries)
            for offset, length in gone:
                kept.append((position, offset - position))
                position = offset + length
        return [*kept, (position, size - position)], usable


class Parts:
    """Parts of at most `limit` bytes, of blocks that are compressed by themselves."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit = folder, limit
        self.parts: list[dict[str, Any]] = []
        self.block, self.part, self.start, self.size = bytearray(), bytearray(), 0, 0

    def add(self, data: bytes) -> None:
        self.block += data
        while len(self.block) >= BLOCK:
            self.compress(bytes(self.block[:BLOCK]))
            del self.block[:BLOCK]

    def compress(self, block: bytes) -> None:
        packed = lzma.compress(block)
        if self.part and len(self.part) + len(packed) > self.limit:
            self.close()
        self.part += packed
        self.size += len(block)

    def close(self) -> None:
        """Write what there is as a part."""
        name = f"part-{len(self.parts):03}.xz"
        (self.folder / name).write_bytes(self.part)
        digest = hashlib.sha256(self.part).hexdigest()
        part = {"name": name, "sha256": digest, "start": self.start, "size": self.size}
        self.parts.append(part)
        self.part, self.start, self.size = bytearray(), self.start + self.size, 0

    def finish(self) -> list[dict[str, Any]]:
        """Write the rest; returns all parts."""
        if self.block:
            self.compress(bytes(self.block))
        self.close()
        return self.parts


def pack(root: Path, out: Path, gpu: int, limit: float) -> dict[str, Any]:
    """Write left_out.txt and the parts of the environment in `root`. Returns their contents."""
    left: Counter[str] = Counter()
    files, usable, parts = [], 0, Parts(out, limit)
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name, size = str(path.relative_to(root)), path.stat().st_size
        inside = name.partition("/site-packages/")[2]
        reason = next((LEFT_OUT[p] for p in LEFT_OUT if fnmatch(inside, p)), "")
        if reason:
            left[f"{inside.split('/')[0]}: {reason}"] += size
            continue
        kept, codes = pieces(path, gpu)
        usable += codes
        if others := size - sum(length for _, length in kept):
            left[f"{inside}: machine code for other GPUs"] += others
        files.append((name, size, path.stat().st_mode & 0o777, kept))
        with path.open("rb") as file:
            for offset, length in kept:
                file.seek(offset)
                while length > 0:
                    data = file.read(min(length, BLOCK))
                    parts.add(data)
                    length -= len(data)
    if not usable:
        refuse(
            f"no wheel has machine code for compute capability {gpu / 10}; where pip finds"
            " torch for CPUs only, name an index with torch for CUDA (PIP_INDEX_URL)"
        )
    lines = [f"{count:>14,}  {what}" for what, count in left.most_common()]
    (out / "left_out.txt").write_text("\n".join([f"{left.total():>14,}  in all", *lines, ""]))
    return {"files": files, "parts": parts.finish()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", required=True, metavar="NAME", help=", ".join(GPUS))
    parser.add_argument("--python", default=sysconfig.get_python_version(), metavar="VERSION")
    parser.add_argument("--wheels", type=Path, help="folder of wheels; nothing is downloaded")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_bundle")
    parser.add_argument("--part", type=float, default=60, help="MB of a part at most")
    options = parser.parse_args(arguments)
    lock = ROOT / "launch" / f"requirements-cuda-py{options.python}.txt"
    if options.gpu not in GPUS:
        refuse(f"--gpu is {options.gpu}; it is one of {', '.join(GPUS)}")
    if not lock.exists():
        refuse(f"there is no launch/{lock.name}; make it: launch/lock_cuda.sh {options.python}")
    if options.out.exists():
        refuse(f"{options.out} exists; remove it, or set --out")
    wheels = options.wheels or options.out.with_name(f"{options.out.name}_wheels")
    if not options.wheels:
        download(lock, options.python, wheels)
    options.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        root = Path(folder)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack_wheel(wheel, root / f"lib/python{options.python}/site-packages", root / "bin")
        bundle = pack(root, options.out, GPUS[options.gpu], options.part * 1e6)
    needs = (ROOT / "launch" / "requirements-cuda.txt").read_text()
    bundle |= {
        "capability": str(GPUS[options.gpu] / 10),
        "driver": int(re.findall(r"^# driver: (\d+)", needs, re.M)[0]),
        "python": options.python,
    }
    (options.out / "bundle.json").write_text(json.dumps(bundle))
    shutil.copy(ROOT / "tools" / "unpack_gpu.py", options.out)
    size = sum(path.stat().st_size for path in options.out.iterdir()) / 1e6
    print(f"{options.out}: {len(bundle['parts'])} parts, {size:,.0f} MB in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
