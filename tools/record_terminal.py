"""A recording of a command as an SVG that plays in a browser: each line appears when the command
printed it, in a tenth of the time.

    python tools/record_terminal.py docs/pictures/terminal.svg "Title" "Description" COMMAND ...

Standard output and standard error are recorded; the last lines that fit stay.
"""

from __future__ import annotations

import subprocess
import sys
import time
from html import escape
from pathlib import Path

FASTER, LINES, COLUMNS, LINE_PX, WIDTH_PX = 10, 26, 118, 19, 960

Printed = list[tuple[float, str]]
"""[(seconds since the start, line)]"""


def record(command: list[str]) -> Printed:
    """Run `command`, passing its lines on. Raises `CalledProcessError` if it fails."""
    began, printed = time.monotonic(), [(0.0, "$ " + " ".join(command))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            printed.append((time.monotonic() - began, line.rstrip()))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return printed


def picture(title: str, description: str, printed: Printed) -> str:
    """SVG of the last `LINES` lines; the time of the lines before them is left out."""
    shown = [(at, line[:COLUMNS]) for at, line in printed[-LINES:]]
    height = LINE_PX * (len(shown) + 2)
    texts: list[str] = []
    for index, (at, line) in enumerate(shown):
        seconds = max((at - shown[0][0]) / FASTER, 0.01)
        texts.append(
            f'<text x="20" y="{LINE_PX * (index + 2) - 4}" xml:space="preserve">{escape(line)}'
            f'<set attributeName="opacity" to="0" begin="0s" dur="{seconds:.2f}s"/></text>'
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
    path, title, description, *command = sys.argv[1:]
    Path(path).write_text(picture(title, description, record(command)))
