"""Type annotations, of the whole project and of its tests."""

from __future__ import annotations

import sys

from support.commands import python


def test_pyright_finds_no_error() -> None:
    """In the environment that runs the tests."""
    done = python("-m", "pyright", "--pythonpath", sys.executable, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
