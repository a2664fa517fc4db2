"""Calls of a user's functions under a time limit.

    await UserCalls(threads).run(function, arguments, limit_s, late) -> what the function returns
    await within(limit_s, awaitable, late) -> what the awaitable gives
    with ending_forks(): function() -> what it returns, in this process alone

The first two are for tasks of an event loop.
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


class CallStopped(BaseException):
    """Raised by another thread inside a user's function that exceeded its time limit, so that the
    function's thread ends.
    """


class LimitExceeded(Exception):
    """Raised to the caller if a user's function has not returned within its time limit. `computed`:
    whether it has used the time to compute (`COMPUTES`), and not to wait for something.
    """

    def __init__(self, message: str, *, computed: bool = False) -> None:
        super().__init__(message)
        self.computed = computed


COMPUTES = 0.25
"""Fraction of a time limit from which its CPU time says of a call that it computed: one that waits
uses none, and one that computes may share its core with three others."""


@contextlib.contextmanager
def ending_forks() -> Iterator[None]:
    """A context manager for a call of a user's code. If the code forks (`os.fork`), the child
    process ends at the end of the block, with the exit code of an ordinary Python process, and does
    not go on as a second worker. Errors in this process pass through.
    """
    own, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == own:
            raise
        code = 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            traceback.print_exc()
    if os.getpid() != own:
        os._exit(code & 0xFF)


async def within(limit_s: float, awaitable: Awaitable[Any], late: str) -> Any:
    """Await the user's `awaitable` for at most `limit_s` seconds and return what it gives. Raises
    what it raises; after the limit `LimitExceeded(late)`, with the message `late`. The awaitable is
    then cancelled, and not waited for, since it may catch the cancellation and go on for ever.
    """
    running = asyncio.ensure_future(outcome_of(awaitable))
    try:
        await asyncio.wait({running}, timeout=limit_s)
        if not running.done():
            raise LimitExceeded(late)
        value, error = running.result()
    finally:
        running.cancel()
    if error is not None:
        raise error
    return value


async def outcome_of(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Await the user's `awaitable`: returns (what it gives, None) or (None, what it raised). So
    SystemExit, which would end the event loop if a task raised it, is a result. A fork made
    meanwhile ends.
    """
    try:
        with ending_forks():
            return await awaitable, None
    except BaseException as error:
        return None, error


def _children_s(thread: int) -> float:
    """Seconds of CPU time that the running processes have used which a thread of this process has
    started, with all below them. `thread`: its native id.
    """
    used = 0.0
    with contextlib.suppress(OSError, psutil.Error):
        for child in Path(f"/proc/self/task/{thread}/children").read_text().split():
            process = psutil.Process(int(child))
            for one in (process, *process.children(recursive=True)):
                used += sum(one.cpu_times()[:4])
    return used


class UserCalls:
    """Calls functions under time limits: `async` ones in the event loop, plain ones on a pool of
    `threads` threads, each of which runs one call at a time. The time limit of a call does not
    include the wait for a free thread. Made and used in one event loop.
    """

    def __init__(self, threads: int) -> None:
        self._free: asyncio.Queue[ThreadPoolExecutor] = asyncio.Queue()
        for _ in range(threads):
            self._free.put_nowait(ThreadPoolExecutor(1))

    async def run(
        self, function: Callable[..., Any], arguments: Sequence[Any], limit_s: float, late: str
    ) -> Any:
        """Call `function(*arguments)` and return its result: an `async` function in the event loop,
        a plain one on a thread, for which the call may have to wait first. If a plain function
        returns an awaitable, that is awaited. Raises what the function raises, and
        `LimitExceeded` with the message `late` if the function takes longer than `limit_s` seconds.
        A plain function that is late is stopped as far as Python can: a loop of Python code ends; C
        code goes on until it returns, while a new thread replaces the one that it occupies.
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
            made, error = await within(limit_s, asyncio.wrap_future(running), late)
        except LimitExceeded as exceeded:
            if not running.done():
                clock = time.pthread_getcpuclockid(numbers[0])
                used_s = time.clock_gettime(clock) - before_s[0] + _children_s(numbers[1])
                exceeded.computed = used_s > COMPUTES * limit_s
            raise
        finally:  # the limit may be exceeded, or the caller cancelled
            if not running.done():
                thread.shutdown(wait=False)
                for number in numbers[:1]:
                    stopped = ctypes.c_ulong(number), ctypes.py_object(CallStopped)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(*stopped)
                thread = ThreadPoolExecutor(1)
            self._free.put_nowait(thread)
        if error is not None:
            raise error
        return await within(limit_s, made, late) if inspect.isawaitable(made) else made
