"""Checks of `megarl doctor` on what kernels are compiled with at run time: Triton's headers, and a
CUDA toolkit that fits torch.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from pathlib import Path

from megarl.apps.doctor.findings import Finding, ask, ask_python


def check_headers() -> list[Finding]:
    """Whether there is a Python.h, with which Triton builds the launcher of every kernel and torch
    its C++ extensions.
    """
    include = sysconfig.get_paths()["include"]
    if (Path(include) / "Python.h").is_file():
        return [Finding("Python headers", "ok", include)]
    version = sysconfig.get_python_version()
    fix = f"install python{version}-dev (Debian) or python{version}-devel (Fedora)"
    # Without a GPU, Triton compiles nothing.
    status = "FAIL" if shutil.which("nvidia-smi") else "warn"
    found = f"no Python.h in {include}: Triton and torch cannot compile kernels"
    return [Finding("Python headers", status, found, fix)]


def check_toolkit() -> list[Finding]:
    """Whether the CUDA toolkit, if there is one, is of torch's CUDA. None is needed: torch, Triton
    and vLLM bring their own compiled kernels and assembler.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    beside = Path(home, "bin", "nvcc")
    nvcc = str(beside) if beside.is_file() else shutil.which("nvcc")
    if nvcc is None:
        return [Finding("CUDA toolkit", "ok", "none, and none is needed")]
    told = ask([nvcc, "-V"], within_s=20)
    found = re.search(r"release (\d+\.\d+)", told.output)
    built = ask_python("import torch; print(torch.version.cuda or '')").output
    if found is None or not built:
        what = f"{nvcc}: {told.last_error}" if found is None else f"{found[1]}; torch is for CPUs"
        return [Finding("CUDA toolkit", "ok", f"{what}; it is not used")]
    return [toolkit_finding(found[1], built, nvcc)]


def toolkit_finding(toolkit: str, cuda: str, nvcc: str) -> Finding:
    """The finding on a toolkit of version `toolkit` beside torch built for version `cuda`."""
    shown = f"{toolkit} at {nvcc}, torch is for CUDA {cuda}"
    if toolkit.split(".")[0] == cuda.split(".")[0]:
        return Finding("CUDA toolkit", "ok", shown)
    fix = (
        f"set CUDA_HOME to a toolkit of CUDA {cuda.split('.')[0]}, or take nvcc off PATH and unset"
        " CUDA_HOME: what vLLM (FlashInfer) compiles at run time would fail or not load"
    )
    return Finding("CUDA toolkit", "warn", shown, fix)
