"""Identity and state of this machine's processes, by the Linux kernel."""

from __future__ import annotations

import os
from pathlib import Path

STOPPED = {"T": "stopped by a signal", "t": "stopped by a debugger"}
"""Letters of states in /proc/PID/stat."""


def machine() -> str:
    """Identifies this boot and process namespace, where a process id means one process; "" if
    unknown.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_of(process: int) -> str:
    """Start in clock ticks since boot; "" for no process, or a zombie."""
    return _stat(process)[1]


def condition(process: int, started: str) -> str:
    """ "alive", "stopped by a signal", "stopped by a debugger" or "gone"."""
    state, since = _stat(process)
    return STOPPED.get(state, "alive") if since == started != "" else "gone"


def _stat(process: int) -> tuple[str, str]:
    """(letter of the state, start); empty for one that has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return "", ""
    # The name of the program, in parentheses, may contain spaces and parentheses.
    fields = text[text.rindex(")") + 1 :].split()
    return ("", "") if fields[0] in "ZX" else (fields[0], fields[19])
