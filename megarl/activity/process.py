"""Processes of this machine, as the kernel tells of them: identity, state and descendants."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

STOPPED = {"T": "stopped by a signal", "t": "stopped by a debugger"}
"""What the kernel's letters for the state of a process mean, of those that do not run."""


def machine() -> str:
    """Id of this boot of the machine and of this process namespace; "" where there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_of(process: int) -> str:
    """When a process of this machine started, in the kernel's clock ticks since boot; "" if there
    is no such process, or only the entry of one that has ended.
    """
    return _stat(process)[1]


def condition(process: int, started: str) -> str:
    """Whether the process of this machine that started at `started` (see `start_of`) lives:
    "alive", "stopped by a signal", "stopped by a debugger" or "gone".
    """
    state, since = _stat(process)
    return STOPPED.get(state, "alive") if since == started != "" else "gone"


def below(process: int, without: frozenset[int]) -> Iterator[psutil.Process]:
    """The processes that the process of this id has started, directly or not, but those of
    `without` and what these have started.
    """
    with suppress(psutil.Error):  # it has ended meanwhile
        for child in psutil.Process(process).children():
            if child.pid not in without:
                yield child
                yield from below(child.pid, without)


def _stat(process: int) -> tuple[str, str]:
    """(letter of the state, start in clock ticks) of a process; empty for one that has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return "", ""
    # The name of the program, in parentheses, may contain spaces and parentheses.
    fields = text[text.rindex(")") + 1 :].split()
    return ("", "") if fields[0] in "ZX" else (fields[0], fields[19])
