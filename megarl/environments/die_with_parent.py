"""A process that ends with its parent, even one that is killed."""

from __future__ import annotations

import os
import signal

from megarl.signals import die_with_parent

__all__ = ["die_with_parent", "run"]


def run(parent: int, command: list[str], number: int = signal.SIGKILL) -> None:
    """Become `command`, which gets the signal `number` when the process `parent` ends."""
    die_with_parent(parent, number)
    os.execvp(command[0], command)  # noqa: S606 - the command is the caller's
