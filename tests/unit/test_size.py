"""The code does not grow unnoticed; `python tools/count_lines.py` prints it by package."""

from __future__ import annotations

import count_lines
import pytest

LIMITS = {"core": 33_608, "apps": 9_987}
"""{what: lines of code at most}. Lower a limit when code goes; who raises one says why in the commit."""


@pytest.mark.parametrize("name", LIMITS)
def test_sum_of_lines_stays(name: str) -> None:
    found = count_lines.by_package()
    lines = count_lines.sums(found)[name]
    assert lines <= LIMITS[name], f"{name}: {lines}\n{count_lines.table(found)}"


def test_what_is_counted() -> None:
    text = '''"""Docstring
of two lines."""

import os  # a comment

# another
def f(a: int) -> str:
    """One."""
    text = """two
lines"""
    return (
        text
    )
'''
    assert count_lines.code_lines(text) == 1 + 1 + 2 + 3
