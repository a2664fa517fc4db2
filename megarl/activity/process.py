"""Processes of this machine, as /proc tells of them: identity, state and descendants."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
}
"""What the kernel's letters for the state of a process mean."""


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
    fields = _stat(f"/proc/{process}")
    return "" if fields is None or fields[0] in "ZX" else fields[19]


def state_of(process: int) -> str:
    """What the kernel says of a process of this machine, such as "running" or "stopped by a
    signal"; "" if there is no such process.
    """
    fields = _stat(f"/proc/{process}")
    return "" if fields is None else STATES.get(fields[0], f"in state {fields[0]}")


@dataclass(frozen=True)
class Descendant:
    """A process that another one has started, directly or not."""

    process: int
    name: str
    """Command line, at most 80 characters."""
    state: str
    cpu_s: float
    """Seconds of CPU time it has used."""


def descendants(process: int, *, without: frozenset[int] = frozenset()) -> list[Descendant]:
    """The processes below `process` on this machine, but those of `without` and below them."""
    children: dict[int, list[int]] = defaultdict(list)
    found: dict[int, list[str]] = {}
    for entry in os.listdir("/proc"):
        fields = _stat(f"/proc/{entry}") if entry.isdecimal() else None
        if fields is not None:
            found[int(entry)] = fields
            children[int(fields[1])].append(int(entry))
    below, queue = [], list(children[process])
    while queue:
        one = queue.pop(0)
        if one in without:
            continue
        queue.extend(children[one])
        fields = found[one]
        ticks = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        state = STATES.get(fields[0], f"in state {fields[0]}")
        below.append(Descendant(one, _name(one), state, ticks))
    return below


def _name(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words if word)[:80]


def _stat(folder: str) -> list[str] | None:
    """Fields of /proc/N/stat from the state on; None without such a process."""
    try:
        text = Path(folder, "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name of the program, in parentheses, may contain spaces and parentheses.
    return text[text.rindex(")") + 1 :].split()
