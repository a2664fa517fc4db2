"""Runs a function in a copy of this process, within a limit of CPU time: what keeps Python's lock
while it works, such as a regular expression, would stop all rollouts of the process.

    await in_copy(function, *arguments) -> what it returns
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle

MOST_S = 2.0
"""CPU seconds of a call."""
LATEST_S = 30.0
"""Seconds after which a copy is ended that waits instead of working."""
WHOLE = b"whole"
"""End of a reply that was written to its end."""
_threads = ThreadPoolExecutor(2)
"""They wait for copies; no more run at the same time."""


class TookTooLong(Exception):
    """Raised if the function has not returned within its limit, or its process has died."""


async def in_copy(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns, of `MOST_S` seconds of CPU time at most; raises what it raises, or
    `TookTooLong`. It runs in a process of its own, which has the memory of this one, so what it
    changes is lost.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, _run, function, arguments)


def _run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
            signal.setitimer(signal.ITIMER_PROF, MOST_S)
            try:
                made = (function(*arguments), None)
            except Exception as error:
                made = (None, error)
            with open(writer, "wb") as file:
                file.write(cloudpickle.dumps(made) + WHOLE)
        finally:
            os._exit(0)
    os.close(writer)
    try:
        reply = _all_of(reader)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not reply.endswith(WHOLE):
        raise TookTooLong(f"it took longer than {MOST_S:g} s")
    found, error = cloudpickle.loads(reply)
    if error is not None:
        raise error
    return found


def _all_of(reader: int) -> bytes:
    """What is written to a pipe up to its end, or within `LATEST_S`."""
    found, end = bytearray(), time.monotonic() + LATEST_S
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (chunk := os.read(reader, 2**20)):
            break
        found += chunk
    return bytes(found)
