"""The Python stacks of all threads of every process of a run, asked for through files.

    ask          writes the file `request`
    answer       the watcher thread of each process writes the file `<process>`
    _signalled   a process that does not answer, since C code holds Python's lock, gets a signal, on
                 which faulthandler writes the file `<process>.signal`

The files are in RUN/activity/stacks. A stopped process answers neither.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.activity.files import Life
from megarl.activity.process import start_of

FOLDER = "stacks"
"""Name of the folder in RUN/activity."""
REQUEST = "request"
SIGNAL = getattr(signal, "SIGRTMIN", -8) + 8
"""A real-time signal, which neither Python, torch, Ray nor vLLM uses. It is sent only to processes
that say in their file that they answer it."""
WITHIN_S = 1.5
"""Seconds that processes have to answer."""
SIGNALLED_WITHIN_S = 0.5
"""Seconds that a signalled process has to write its stacks."""
STOPPED = "stopped"


def answer_signal(folder: Path, process: str) -> int:
    """Have this process write its stacks to `folder`/<process>.signal on `SIGNAL`; returns the
    signal, 0 where there is none. `faulthandler` keeps the file open.
    """
    if SIGNAL <= 0:
        return 0
    faulthandler.register(SIGNAL, (folder / f"{process}.signal").open("w"), all_threads=True)
    return SIGNAL


def answer(folder: Path, process: str, asked: str) -> None:
    """Write the stacks of this process for the request `asked`."""
    threads = "\n".join(
        f"thread {one.ident:#018x} is {one.name}" for one in threading.enumerate() if one.ident
    )
    aside = folder / f".{process}.{os.getpid()}"
    with aside.open("w") as file:
        file.write(f"{asked}\n{threads}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    aside.replace(folder / process)


def ask(folder: Path) -> str:
    """Ask every process for its stacks; returns the id of the request."""
    asked = uuid.uuid4().hex
    aside = folder / f".{REQUEST}.{os.getpid()}"
    aside.write_text(asked)
    aside.replace(folder / REQUEST)
    return asked


def asked(folder: Path) -> str:
    """Id of the newest request, "" for none."""
    try:
        return (folder / REQUEST).read_text()
    except OSError:
        return ""


def collect(
    folder: Path, lives: Sequence[Life], own: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """{process: stacks, or why there are none} of `lives`. `folder`: RUN/activity/stacks. `own`:
    answers requests for this process's own stacks; it is called again and again.
    """
    found = {one.process: "the process has ended" for one in lives if one.is_alive is False}
    waiting = {one.process: one for one in lives if one.process not in found}
    for name, one in list(waiting.items()):
        if one.state.startswith(STOPPED):
            found[name] = f"none: the process is {one.state}"
            del waiting[name]
    request, deadline = ask(folder), time.monotonic() + WITHIN_S
    while waiting and time.monotonic() < deadline:
        own()
        for name in list(waiting):
            with contextlib.suppress(OSError):
                first, _, stacks = (folder / name).read_text(errors="replace").partition("\n")
                if first == request:
                    found[name] = stacks
                    del waiting[name]
        time.sleep(0.05)
    return found | _signalled(folder, list(waiting.values()))


def _signalled(folder: Path, lives: Sequence[Life]) -> dict[str, str]:
    """{process: stacks, or why there are none} of processes that do not answer a request."""
    sizes = {}
    for one in lives:
        path = folder / f"{one.process}.signal"
        if one.is_here and one.signal and start_of(one.pid) == one.started and path.exists():
            sizes[one.process] = path.stat().st_size
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, one.signal)
    if sizes:
        time.sleep(SIGNALLED_WITHIN_S)
    found = {one.process: "none: the process did not answer" for one in lives}
    for name, before in sizes.items():
        with (folder / f"{name}.signal").open(errors="replace") as file:
            file.seek(before)
            if stacks := file.read():
                found[name] = f"(the process answered only a signal: C code runs)\n{stacks}"
    return found
