"""Runs a function in a copy of this process, within a limit of CPU time: what keeps Python's lock
while it works, such as a regular expression, would stop all rollouts of the process.

    await in_copy(function, *arguments) -> what it returns
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MOST_S = 2.0
"""CPU seconds of a call."""
FORK = multiprocessing.get_context("fork")
_threads = ThreadPoolExecutor(2)
"""They wait for copies; no more run at the same time."""


async def in_copy(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns, of `MOST_S` seconds of CPU time at most; raises what it raises, or
    `TimeoutError`. It runs in a process of its own, which has the memory of this one, so what it
    changes is lost.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, _run, function, arguments)


def _run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    reader, writer = FORK.Pipe(duplex=False)
    copy = FORK.Process(target=_work, args=(writer, function, arguments), daemon=True)
    copy.start()
    writer.close()
    try:
        if not reader.poll(30.0):  # it waits instead of working
            raise EOFError
        result, error = reader.recv()
    except EOFError:
        raise TimeoutError(f"it took longer than {MOST_S:g} s") from None
    finally:
        copy.kill()
        copy.join()
        reader.close()
    if error is not None:
        raise error
    return result


def _work(writer: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    try:
        writer.send((function(*arguments), None))
    except Exception as error:
        writer.send((None, error))
    os._exit(0)
