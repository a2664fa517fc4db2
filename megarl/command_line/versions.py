"""`megarl --version`: what is installed, without importing it."""

from __future__ import annotations

import platform

import megarl
from megarl.observe.provenance import checkout, packages


def versions() -> str:
    """A line for megarl with its commit, for Python, and for each main library."""
    commit = checkout()
    lines = [f"megarl {megarl.__version__}{commit and f', commit {commit}'}"]
    lines.append(f"Python {platform.python_version()}")
    return "\n".join([*lines, *(f"{name} {version}" for name, version in packages().items())])
