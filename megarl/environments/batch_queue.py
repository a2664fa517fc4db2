"""A queue whose items are taken in batches.

    put(item) -> Waiting, whose `result` is awaited
    take(most, linger_s) -> [Waiting, ...]

All calls are from one event loop.
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
    """An item in a `BatchQueue` whose result is not known yet. The producer that put the item
    awaits the future `result`; the consumer that takes the item calls `answer` or `fail`. `since`:
    time at which the item was put, by `time.monotonic`.
    """

    def __init__(self, item: T) -> None:
        self.item, self.since = item, time.monotonic()
        self.result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.note = ""
        """A remark of the code that took the item, for its own use; empty at first."""

    def answer(self, result: R) -> None:
        """Give this item of the queue its result: who awaits the future `result` gets it. Nothing
        happens if the future is done already, as after a cancellation.
        """
        if not self.result.done():
            self.result.set_result(result)

    def fail(self, error: Exception) -> None:
        """Let this item of the queue fail: who awaits the future `result` gets the exception
        `error`. Nothing happens if the future is done already.
        """
        if not self.result.done():
            self.result.set_exception(error)


class BatchQueue(Generic[T, R]):
    """A first-in, first-out queue whose items are taken in batches of limited size. An item whose
    `result` is done already, as after a cancellation, is skipped. All calls are from one event
    loop.
    """

    def __init__(self) -> None:
        self._items: deque[Waiting[T, R]] = deque()
        self._grown = asyncio.Event()
        self._taking = asyncio.Lock()

    def put(self, item: T) -> Waiting[T, R]:
        """Append an item; returns at once. Await the returned object's `result` for the result."""
        made: Waiting[T, R] = Waiting(item)
        self._items.append(made)
        self._grown.set()
        return made

    async def take(self, most: int, linger_s: float) -> list[Waiting[T, R]]:
        """Wait for the next batch, remove it from the queue and return it: at least one and at most
        `most` items, in order. It comes as soon as `most` items are there, or the first item has
        waited `linger_s` seconds. Several tasks may call it and are served in turn.
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
                one = self._items.popleft()
                if not one.result.done():
                    batch.append(one)
            return batch

    def cancel(self) -> None:
        """Remove all items and cancel their `result` futures, so that awaiting them raises
        `CancelledError`.
        """
        while self._items:
            self._items.popleft().result.cancel()
