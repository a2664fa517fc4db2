"""Records commands as an SVG that plays in a browser: each line appears when it was printed, in a
tenth of the time.

    python tools/record_terminal.py docs/pictures/terminal.svg TITLE DESCRIPTION COMMAND ...

Standard output and standard error are recorded. Lines are cut at 118 characters.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from html import escape
from pathlib import Path

FASTER, COLUMNS, LINE_PX, WIDTH_PX = 10, 118, 19, 960

CONTROL = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x1f]")
"""Colours and control characters, which SVG cannot have."""

Printed = list[tuple[float, str]]
"""[(seconds since the start, line)]"""


def record(commands: list[str]) -> Printed:
    """Run `commands` in turn and record their output, which is also printed. Raises
    `CalledProcessError` if one fails.
    """
    began, printed = time.monotonic(), Printed()
    for command in commands:
        printed.append((time.monotonic() - began, f"$ {command}"))
        words = shlex.split(command)
        with subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stderr.write(line)
                printed.append((time.monotonic() - began, CONTROL.sub("", line).rstrip()))
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
    return printed


def picture(title: str, description: str, printed: Printed) -> str:
    """The recording as SVG, with a title and a description for who cannot see it."""
    height = LINE_PX * (len(printed) + 2)
    texts: list[str] = []
    for row, (at, line) in enumerate(printed, 2):
        shown = line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"
        texts.append(
            f'<text x="20" y="{LINE_PX * row - 4}" xml:space="preserve">{escape(shown)}'
            f'<set attributeName="opacity" to="0" begin="0s" dur="{max(at / FASTER, 0.01):.2f}s"/>'
            "</text>"
        )
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height}"'
        f' width="{WIDTH_PX}" height="{height}" role="img" aria-labelledby="title desc"'
        ' font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13" fill="#e6edf3">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(description)}</desc>',
        f'<rect width="{WIDTH_PX}" height="{height}" rx="8" fill="#1b2027"/>',
        *texts,
        "</svg>\n",
    ))  # fmt: skip


if __name__ == "__main__":
    path, title, description, *commands = sys.argv[1:]
    Path(path).write_text(picture(title, description, record(commands)), encoding="utf-8")
