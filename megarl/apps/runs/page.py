"""The templates of report pages, and how a page is written."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import jinja2

from megarl.files import UNFINISHED


@functools.cache
def pages() -> jinja2.Environment:
    """The templates of report pages, loaded once in a process. Every value that a template is given
    is escaped as HTML, with control characters, which HTML forbids, as visible symbols.
    """
    controls = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}

    def visible(value: Any) -> Any:
        if type(value) is not str:  # HTML of the template is a class of its own
            return value
        return value.replace("\r\n", "\n").translate(controls | {127: 0x2421})

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["count"] = "{:,}".format
    found.filters["sha256"] = lambda text: base64.b64encode(
        hashlib.sha256(text.encode()).digest()
    ).decode()
    return found


def write_page(target: Path, text: str) -> Path:
    """Write the page `text` to the file `target`, in one atomic rename; returns `target`."""
    # Not synced: a run writes it again and again, and waits for no disk.
    being_written = target.with_name(f".report.{os.getpid()}{UNFINISHED}")
    # A lone surrogate in a transcript has no UTF-8; it is shown as a question mark.
    being_written.write_text(text, encoding="utf-8", errors="replace")
    being_written.replace(target)
    return target
