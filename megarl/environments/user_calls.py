"""Functions of a user, called from an event loop under a time limit.

await UserCalls(threads).run(function, arguments, limit_s, late) -> what a function returns
await within(limit_s, awaitable, late) -> what an awaitable gives
with ending_forks(): function() -> what it returns, in this process alone
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class CallStopped(BaseException):
    """Raised inside a function that exceeded its time limit, so that its thread ends."""


class LimitExceeded(Exception):
    """Raised if a user's function has not returned within its time limit."""


@contextlib.contextmanager
def ending_forks() -> Iterator[None]:
    """A context for calls of a user's code: a child process that the code forks ends here, with
    the exit code of an ordinary Python process, and does not go on as a second worker.
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
    """What the user's `awaitable` gives. Raises what it raises, and `LimitExceeded(late)` if it has
    not ended after `limit_s` seconds; it is then cancelled, and not waited for, since it may catch
    the cancellation and go on for ever.
    """
    running = asyncio.ensure_future(_ended(awaitable))
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


async def _ended(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """(what `awaitable` gives, None) or (None, what it raised): SystemExit, raised in a task, would
    end the event loop.
    """
    try:
        with ending_forks():
            return await awaitable, None
    except BaseException as error:
        return None, error


class UserCalls:
    """Calls functions, plain ones on a number of threads. A call's time limit begins with the call,
    not while it waits for a thread.
    """

    def __init__(self, threads: int) -> None:
        self._free: asyncio.Queue[ThreadPoolExecutor] = asyncio.Queue()
        for _ in range(threads):
            self._free.put_nowait(ThreadPoolExecutor(1))

    async def run(
        self, function: Callable[..., Any], arguments: Sequence[Any], limit_s: float, late: str
    ) -> Any:
        """What `function(*arguments)` returns. Raises what it raises, and `LimitExceeded(late)` if
        it has not returned after `limit_s` seconds. A plain function may return an awaitable. It is
        stopped as far as Python can: a loop of Python code ends, a wait in C code goes on until it
        returns, and another thread takes the place of its thread.
        """
        if inspect.iscoroutinefunction(function):
            return await within(limit_s, function(*arguments), late)
        numbers: list[int] = []

        def call() -> tuple[Any, BaseException | None]:
            numbers.append(threading.get_ident())
            try:
                with ending_forks():
                    return function(*arguments), None
            except BaseException as error:  # StopIteration too, which no future takes
                return None, error

        thread = await self._free.get()
        running = thread.submit(call)
        try:
            made, error = await within(limit_s, asyncio.wrap_future(running), late)
        finally:  # the limit may be exceeded, or the caller cancelled
            if not running.done():
                thread.shutdown(wait=False)
                for number in numbers:
                    stopped = ctypes.c_ulong(number), ctypes.py_object(CallStopped)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(*stopped)
                thread = ThreadPoolExecutor(1)
            self._free.put_nowait(thread)
        if error is not None:
            raise error
        return await within(limit_s, made, late) if inspect.isawaitable(made) else made
