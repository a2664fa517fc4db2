"""A queue whose items are taken in batches, all in one event loop.

put(item) -> Waiting, whose `result` is awaited
take(most, linger_s) -> [Waiting, ...]
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Waiting(Generic[T, R]):
    """An item of a `BatchQueue`. Who puts it awaits `result`; who takes it calls `answer` or
    `fail`. `since`: when it was put, by `time.monotonic`.
    """

    def __init__(self, item: T) -> None:
        self.item, self.since = item, time.monotonic()
        self.result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.note = ""
        """A remark of who took the item, for its own use."""

    def answer(self, result: R) -> None:
        """Set `result`; does nothing if it is done, as after a cancellation."""
        if not self.result.done():
            self.result.set_result(result)

    def fail(self, error: Exception) -> None:
        """Let awaiting `result` raise `error`; does nothing if it is done."""
        if not self.result.done():
            self.result.set_exception(error)


class BatchQueue(Generic[T, R]):
    """A first-in, first-out queue. Items whose `result` is done are skipped."""

    def __init__(self) -> None:
        self._items: deque[Waiting[T, R]] = deque()
        self._grown = asyncio.Event()
        self._taking = asyncio.Lock()

    def put(self, item: T) -> Waiting[T, R]:
        waiting: Waiting[T, R] = Waiting(item)
        self._items.append(waiting)
        self._grown.set()
        return waiting

    async def take(self, most: int, linger_s: float) -> list[Waiting[T, R]]:
        """Wait for the next batch, at least one and at most `most` items: as soon as `most` are
        there, or the first has waited `linger_s` seconds. Concurrent callers are served in turn.
        """
        async with self._taking:
            while True:
                while self._items and self._items[0].result.done():
                    self._items.popleft()
                left = self._items[0].since + linger_s - time.monotonic() if self._items else None
                if left is not None and (left <= 0 or len(self._items) >= most):
                    break
                self._grown.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._grown.wait(), left)
            batch: list[Waiting[T, R]] = []
            while self._items and len(batch) < most:
                waiting = self._items.popleft()
                if not waiting.result.done():
                    batch.append(waiting)
            return batch

    def cancel(self) -> None:
        """Remove all items; awaiting their `result` raises `CancelledError`."""
        while self._items:
            self._items.popleft().result.cancel()
