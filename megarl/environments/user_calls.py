"""Calls of a user's functions under a time limit.

await UserCalls(threads).run(function, arguments, limit_s, late) -> what the function returns
await within(limit_s, awaitable, late) -> what the awaitable gives
with ending_forks(): function() -> what it returns, in this process alone
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from megarl.environments.scores import BadScore

COMPUTES = 0.25
"""Fraction of the limit from which CPU time says that a call computed: one that waits uses none,
one that computes may share its core with three others."""


@contextlib.contextmanager
def ending_forks() -> Iterator[None]:
    """A context manager for a user's code: a process that it forks (`os.fork`) ends with the block,
    instead of going on as a second worker.
    """
    pid, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == pid:
            raise
        code = 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            traceback.print_exc()
    if os.getpid() != pid:
        os._exit(code & 0xFF)


async def within(limit_s: float, awaitable: Awaitable[Any], late: str) -> Any:
    """Await the user's `awaitable`. Raises what it raises, or after `limit_s` seconds
    `BadScore` with `late`; it is then cancelled and not waited for, since it may go on for ever.
    """
    running = asyncio.ensure_future(outcome_of(awaitable))
    try:
        await asyncio.wait({running}, timeout=limit_s)
        if not running.done():
            raise BadScore("timeout", late)
        value, error = running.result()
    finally:
        running.cancel()
    if error is not None:
        raise error
    return value


async def outcome_of(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """(result, None) or (None, exception) of `awaitable`; SystemExit too, which would end the event
    loop. A process it forks exits here.
    """
    try:
        with ending_forks():
            return await awaitable, None
    except BaseException as error:
        return None, error


def computed_s(process_id: int) -> float:
    """CPU seconds of a process with its descendants, as far as they still run."""
    used = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(process_id)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                used += sum(member.cpu_times()[:4])
    return used


def _children_s(thread: int) -> float:
    """The same of all processes that a thread (its native id) has started."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/self/task/{thread}/children").read_text().split()
        return sum(map(computed_s, map(int, children)))
    return 0.0


class UserCalls:
    """Calls functions under time limits, without the wait for a thread: `async` ones in the event
    loop, plain ones on `threads` threads. For one event loop.
    """

    def __init__(self, threads: int) -> None:
        self._free: asyncio.Queue[ThreadPoolExecutor] = asyncio.Queue()
        for _ in range(threads):
            self._free.put_nowait(ThreadPoolExecutor(1))

    async def run(
        self, function: Callable[..., Any], arguments: Sequence[Any], limit_s: float, late: str
    ) -> Any:
        """Call `function(*arguments)`; an awaitable result is awaited. Raises what it raises, and
        `BadScore` with `late` after `limit_s` seconds. A late plain function is stopped if it is
        Python code; C code goes on, while a new thread replaces its own.
        """
        if inspect.iscoroutinefunction(function):
            return await within(limit_s, function(*arguments), late)
        numbers: list[int] = []
        before_s: list[float] = []

        def call() -> tuple[Any, BaseException | None]:
            numbers.extend((threading.get_ident(), threading.get_native_id()))
            before_s.append(time.thread_time())
            try:
                with ending_forks():
                    return function(*arguments), None
            except BaseException as error:  # StopIteration too, which no future takes
                return None, error

        thread = await self._free.get()
        running = thread.submit(call)
        try:
            answer, error = await within(limit_s, asyncio.wrap_future(running), late)
        except BadScore as exceeded:
            if not running.done():
                clock = time.pthread_getcpuclockid(numbers[0])
                used_s = time.clock_gettime(clock) - before_s[0] + _children_s(numbers[1])
                if used_s > COMPUTES * limit_s:
                    exceeded.failure = "response_limit"
            raise
        finally:  # the limit may be exceeded, or the caller cancelled
            if not running.done():
                thread.shutdown(wait=False)
                for number in numbers[:1]:
                    stopped = ctypes.c_ulong(number), ctypes.py_object(SystemExit)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(*stopped)
                thread = ThreadPoolExecutor(1)
            self._free.put_nowait(thread)
        if error is not None:
            raise error
        return await within(limit_s, answer, late) if inspect.isawaitable(answer) else answer
