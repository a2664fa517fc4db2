"""tools/pack_gpu.py: a bundle of tiny wheels, and what it and its unpack script refuse."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pack_gpu
import pytest

SM_80, SM_90, PTX_90 = (name * 50 for name in (b"cubin of 8.0", b"cubin of 9.0", b"ptx of 9.0"))
HOST = random.Random(0).randbytes(300_000)
NEEDED = {"thing/__init__.py": b"number = 42", "thing/data.bin": HOST, "thing/empty": b""}
SITE = f"lib/python{sysconfig.get_python_version()}/site-packages"


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """A container of (kind, compute capability, code)."""
    body = b"".join(
        struct.pack("<HHIQQII", kind, 0x101, 64, len(code), 0, 0, gpu).ljust(64, b"\0") + code
        for kind, gpu, code in entries
    )
    return pack_gpu.FATBIN + struct.pack("<Q", len(body)) + body


LIBRARY = b"\x7fELF host code" + b"".join(
    (
        fatbin((2, 80, SM_80), (2, 90, SM_90), (1, 90, PTX_90)),
        b"more host code",
        fatbin((2, 80, SM_80)),
    )
)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    files = NEEDED | {
        "thing/libthing.so.1": LIBRARY,
        "thing/libthing.a": b"static",
        "thing-1.data/scripts/program": b"\x7fELF program",
        "thing-1.data/scripts/script": b"#!python\n",
        "thing-1.data/purelib/more.py": b"number = 43",
        "thing-1.dist-info/METADATA": b"Name: thing",
    }
    with zipfile.ZipFile(folder / "thing-1-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return folder


@pytest.fixture(scope="module")
def packed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "bundle"
    command = ["--gpu", "h200", "--wheels", str(wheels), "--out", str(out), "--part", "0.2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_gpu, "BLOCK", 100_000)
        pack_gpu.main(command)
    return out


@pytest.fixture
def bundle(packed: Path, tmp_path: Path) -> Path:
    """A bundle to spoil."""
    return shutil.copytree(packed, tmp_path / "bundle")


def unpack(bundle: Path, gpu: str = "", *options: str) -> tuple[int, str, str]:
    """What unpack_gpu.py answers on a machine with this GPU: its code and what it prints."""
    (bundle / "bin").mkdir(exist_ok=True)
    tool = bundle / "bin" / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{gpu}'\n")
    tool.chmod(0o755)
    command = [sys.executable, str(bundle / "unpack_gpu.py"), str(bundle / "env"), *options]
    path = f"{tool.parent}:{os.environ['PATH']}"
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path})
    return done.returncode, done.stdout, done.stderr


def test_what_is_packed_comes_back(bundle: Path) -> None:
    listed = json.loads((bundle / "bundle.json").read_text())
    assert len(listed["parts"]) == 3 and listed["capability"] == "9.0"
    for part in listed["parts"]:
        data = (bundle / part["name"]).read_bytes()
        assert len(data) <= 200_000 and hashlib.sha256(data).hexdigest() == part["sha256"]
    assert unpack(bundle, "NVIDIA H200, 9.0, 580.82.07")[::2] == (0, "")
    site = bundle / "env" / SITE
    assert {name: (site / name).read_bytes() for name in NEEDED} == NEEDED
    expected = LIBRARY.replace(SM_80, bytes(len(SM_80))).replace(PTX_90, bytes(len(PTX_90)))
    assert (site / "thing/libthing.so.1").read_bytes() == expected
    assert (
        os.access(bundle / "env/bin/program", os.X_OK) and not (bundle / "env/bin/script").exists()
    )
    code = "import thing, more; print(thing.number, more.number)"
    python = subprocess.run([bundle / "env/bin/python", "-c", code], capture_output=True, text=True)
    assert python.stdout == "42 43\n"


def test_what_was_left_out_is_listed(packed: Path) -> None:
    code = 2 * len(SM_80) + len(PTX_90)
    assert [
        line.split(maxsplit=1) for line in (packed / "left_out.txt").read_text().splitlines()
    ] == [
        [f"{code + 6:,}", "in all"],
        [f"{code:,}", "thing/libthing.so.1: code for other GPUs"],
        ["6", "thing: static libraries"],
    ]


def spoil(bundle: Path, change: str) -> None:
    part = bundle / "part-001.gz"
    match change:
        case "damaged":
            part.write_bytes(part.read_bytes()[:-1] + b"?")
        case "missing":
            part.unlink()
        case "python":
            text = (bundle / "bundle.json").read_text()
            (bundle / "bundle.json").write_text(text.replace('"python": "3', '"python": "2'))
        case "there":
            (bundle / "env").mkdir()


@pytest.mark.parametrize(("change", "gpu", "message"), [
    ("damaged", "NVIDIA H200, 9.0, 580.82.07", "part-001.gz is damaged; copy again"),
    ("missing", "NVIDIA H200, 9.0, 580.82.07", "part-001.gz is missing; copy again"),
    ("", "NVIDIA A100, 8.0, 580.82.07",
     "NVIDIA A100 has compute capability 8.0; the bundle is for 9.0: make one"),
    ("", "NVIDIA H200, 9.0, 535.1.2", "the driver is 535.1.2, and the bundle needs 580 or newer;"),
    ("", "No devices were found", "nvidia-smi finds no GPU; --any-gpu unpacks without one"),
    ("python", "NVIDIA H200, 9.0, 580.82.07", "; call it with Python 2."),
    ("there", "NVIDIA H200, 9.0, 580.82.07", "exists; remove it, or name another folder"),
])  # fmt: skip
def test_what_is_not_unpacked(bundle: Path, change: str, gpu: str, message: str) -> None:
    """One line says why, and nothing is written."""
    spoil(bundle, change)
    code, output, line = unpack(bundle, gpu)
    assert (code, output, line.count("\n")) == (1, "", 1) and message in line
    assert not (bundle / "env" / "bin").exists()


def test_the_gpu_may_be_left_unchecked(bundle: Path) -> None:
    assert unpack(bundle, "", "--any-gpu")[0] == 0


def test_only_the_locked_version_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch==2.13.0` would also take another index's 2.13.0+cpu."""
    (tmp_path / "lock.txt").write_text("# torch==1\ndeepspeed==0.19.8\ntorch==2.13.0\n")
    commands: list[list[str]] = []
    done = subprocess.CompletedProcess[str]([], 0)
    monkeypatch.setattr(subprocess, "run", lambda command: commands.append(command) or done)
    pack_gpu.download(tmp_path / "lock.txt", "3.12", tmp_path)
    assert [command[-1] for command in commands] == ["torch===2.13.0", "deepspeed==0.19.8"]


@pytest.mark.parametrize(
    ("options", "wheels", "message"),
    [
        (("--gpu", "h200"), (), "no wheel has code for compute capability 9.0"),
        (("--gpu", "h200"), ("torch-2.13.0+cpu-cp312-cp312-linux_x86_64",), "is not for CUDA"),
        (("--gpu", "h200"), ("torch-2.12.0-py3", "Torch-2.13.0-py3"), "several versions of torch"),
        (("--gpu", "h200", "--python", "3.5"), (), "no launch/requirements-cuda-py3.5.txt"),
    ],
)
def test_what_is_not_packed(
    tmp_path: Path, options: tuple[str, ...], wheels: tuple[str, ...], message: str
) -> None:
    for name in wheels:
        (tmp_path / f"{name}.whl").touch()
    with pytest.raises(SystemExit, match=message):
        pack_gpu.main([*options, "--wheels", str(tmp_path), "--out", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("gpu", "entries", "kept"),
    [
        (90, {(2, 80), (2, 90), (1, 90)}, {(2, 90)}),
        (89, {(2, 80), (2, 86), (2, 90), (1, 80)}, {(2, 86)}),
        (90, {(2, 80), (1, 70), (1, 80), (1, 100)}, {(1, 80)}),
        (90, {(2, 100), (1, 100)}, set()),
        (90, {(2, 100), (64, 0)}, {(64, 0)}),
    ],
)
def test_which_code_a_gpu_loads(
    gpu: int, entries: set[tuple[int, int]], kept: set[tuple[int, int]]
) -> None:
    """Kinds are 1 for PTX and 2 for machine code; what is unknown stays."""
    listed = [(kind, capability, (kind, capability)) for kind, capability in entries]
    assert entries - set(pack_gpu.needless(listed, gpu)) == kept
