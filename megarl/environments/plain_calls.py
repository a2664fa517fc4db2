"""Functions of a user, called from an event loop under a time limit.

await PlainCalls(threads).run(function, arguments, limit_s) -> what a plain function returns
await within(limit_s, awaitable) -> what an `async` function returns
with ending_forks(): function() -> what it returns, in this process alone
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
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


async def within(limit_s: float, awaitable: Awaitable[Any]) -> Any:
    """What the user's `awaitable` gives. Raises what it raises, and `LimitExceeded` if it has not
    ended after `limit_s` seconds; it is then cancelled, and not waited for, since it may catch the
    cancellation and go on for ever.
    """
    running = asyncio.ensure_future(_ended(awaitable))
    try:
        await asyncio.wait({running}, timeout=limit_s)
        if not running.done():
            raise LimitExceeded(f"no reply within {limit_s:g} s")
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


class _Thread:
    """A thread that calls one function after another."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="plain-call")
        self._thread.start()

    def call(
        self, function: Callable[..., Any], arguments: Sequence[Any]
    ) -> asyncio.Future[tuple[Any, BaseException | None]]:
        """(what `function` returns, None) or (None, what it raised), once it has ended."""
        loop = asyncio.get_running_loop()
        made: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        self._calls.put((function, arguments, made, loop))
        return made

    def _run(self) -> None:
        # `CallStopped` may come late, after the call has ended.
        with contextlib.suppress(CallStopped):
            self._make_calls()

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            function, arguments, made, loop = call
            found: tuple[Any, BaseException | None]
            try:
                with ending_forks():
                    found = function(*arguments), None
            except CallStopped:
                raise
            except BaseException as error:  # SystemExit too, which would end the thread
                found = None, error
            try:
                loop.call_soon_threadsafe(_resolve, made, found)
            except RuntimeError:  # the loop is closed
                return

    def end(self) -> None:
        """End the thread once it has no call."""
        self._calls.put(None)

    def stop(self) -> None:
        """Stop the running call as far as Python can: a loop of Python code ends, a wait in C code
        goes on until it returns, and its thread ends then.
        """
        self.end()
        number = self._thread.ident
        if number is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(number), ctypes.py_object(CallStopped)
            )


def _resolve(made: asyncio.Future[Any], found: Any) -> None:
    if not made.done():
        made.set_result(found)


class PlainCalls:
    """Runs plain functions on a number of threads. A call's time limit begins with the call, not
    while it waits for a thread.
    """

    def __init__(self, threads: int) -> None:
        self._free: asyncio.Queue[_Thread] = asyncio.Queue()
        for _ in range(threads):
            self._free.put_nowait(_Thread())

    async def run(
        self, function: Callable[..., Any], arguments: Sequence[Any], limit_s: float
    ) -> Any:
        """What `function(*arguments)` returns. Raises what it raises, and `LimitExceeded` if it
        has not returned after `limit_s` seconds; another thread then takes its thread's place.
        """
        thread = await self._free.get()
        call = thread.call(function, arguments)
        try:
            await asyncio.wait({call}, timeout=limit_s)
        finally:  # the limit is exceeded, or the caller was cancelled
            if not call.done():
                thread.stop()
                thread = _Thread()
            self._free.put_nowait(thread)
        if not call.done():
            raise LimitExceeded(f"no reply within {limit_s:g} s")
        value, error = call.result()
        if error is not None:
            raise error
        return value
