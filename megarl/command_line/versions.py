"""`megarl --version`: what is installed, without importing it."""

from __future__ import annotations

import platform

import megarl
from megarl.observe.provenance import checkout, packages


def versions() -> str:
    """The text of `megarl --version`: a line for megarl, with the commit if it runs from a git
    checkout, one for Python, and one for each of torch, vllm, ray, deepspeed and transformers that
    is installed.
    """
    commit = checkout()
    lines = [f"megarl {megarl.__version__}{commit and f', commit {commit}'}"]
    lines.append(f"Python {platform.python_version()}")
    return "\n".join([*lines, *(f"{name} {version}" for name, version in packages().items())])
