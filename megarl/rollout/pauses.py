"""Pauses of an engine's generation, which the deadlines of its requests do not count."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable
from typing import Protocol, TypeVar

T = TypeVar("T")

MOST_PAUSES = 4096
"""Number of ended pauses that an engine remembers."""

LOOKS = 20
"""After the deadline of a request whose engine was paused, the engine is asked again at the
earliest after this fraction of the deadline."""


class Pauses:
    """When an engine's generation was paused on purpose: the intervals of pauses so far. Times are
    those of the calls, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float]] = deque(maxlen=MOST_PAUSES)
        """(begin, end) of each pause, by `time.monotonic`."""
        self._began: float | None = None
        """Begin of the present pause; None if there is none."""

    @property
    def is_paused(self) -> bool:
        """Whether the engine's generation is paused now."""
        return self._began is not None

    def begin(self) -> None:
        """Note that the engine's generation pauses now; in a pause the call changes nothing."""
        if self._began is None:
            self._began = time.monotonic()

    def end(self) -> None:
        """Note that the engine's generation goes on now; outside of a pause the call changes
        nothing.
        """
        if self._began is not None:
            self._ended.append((self._began, time.monotonic()))
            self._began = None

    def within(self, last_s: float) -> float:
        """For how many of the last `last_s` seconds the engine's generation was paused."""
        now = time.monotonic()
        since = now - last_s
        found = now - max(self._began, since) if self._began is not None else 0.0
        for began, ended in reversed(self._ended):
            if ended <= since:
                break
            found += ended - max(began, since)
        return found


class Pausable(Protocol):
    """Interface of an engine, in this process or another, that says when it was paused."""

    async def paused_s(self, last_s: float) -> float:
        """For how many of the last `last_s` seconds generation was paused on purpose."""
        ...


async def before_deadline(answer: Awaitable[T], deadline_s: float, engine: Pausable) -> T:
    """Wait for `answer`, the result of a request to `engine`, and return it. Raises `TimeoutError`,
    and cancels `answer`, once the engine has had `deadline_s` seconds in which its generation was
    not paused. The engine is asked for its pauses only once `deadline_s` have passed; errors of
    that question are raised too.
    """
    began, left_s = time.monotonic(), deadline_s
    task = asyncio.ensure_future(answer)
    try:
        while True:
            if (await asyncio.wait([task], timeout=left_s))[0]:
                return task.result()
            passed_s = time.monotonic() - began
            left_s = deadline_s - (passed_s - await engine.paused_s(passed_s))
            if task.done():
                return task.result()
            if left_s <= 0:
                raise TimeoutError
            left_s = max(left_s, deadline_s / LOOKS)
    finally:
        task.cancel()
