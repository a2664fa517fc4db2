"""Identity and state of this machine's processes, as the Linux kernel tells them."""

from __future__ import annotations

import os
from pathlib import Path

STOPPED = {"T": "stopped by a signal", "t": "stopped by a debugger"}
"""{letter of a process's state in /proc/PID/stat: what it means}, of stopped processes."""


def machine() -> str:
    """Text that identifies this boot of the machine and this process namespace, within which a
    process id means one process; "" where the kernel tells none.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_of(process: int) -> str:
    """When the process with the id `process` started, in the kernel's clock ticks since boot, as
    text; with the id it identifies the process. "" if there is no such process, or only a zombie.
    """
    return _stat(process)[1]


def condition(process: int, started: str) -> str:
    """Whether the process with the id `process`, started at `started` (as `start_of` returned it),
    lives: "alive", "stopped by a signal", "stopped by a debugger" or "gone".
    """
    state, since = _stat(process)
    return STOPPED.get(state, "alive") if since == started != "" else "gone"


def _stat(process: int) -> tuple[str, str]:
    """(letter of the state, start in clock ticks) of a process; empty for one that has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return "", ""
    # The name of the program, in parentheses, may contain spaces and parentheses.
    fields = text[text.rindex(")") + 1 :].split()
    return ("", "") if fields[0] in "ZX" else (fields[0], fields[19])
