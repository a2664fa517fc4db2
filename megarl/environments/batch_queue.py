"""A queue that hands out its items in batches, within one event loop.

put(item) -> Waiting, whose `result` is awaited        take(most, linger_s) -> [Waiting, ...]
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Generic, TypeVar

from megarl.environments.scores import Outcome

T = TypeVar("T")


class Waiting(Generic[T]):
    """An item that waits for its outcome."""

    def __init__(self, item: T, size: int) -> None:
        """`size`: bytes of the item."""
        self.item, self.size, self.since = item, size, time.monotonic()
        self.result: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def answer(self, outcome: Outcome) -> None:
        """Set the outcome, unless there is one or nobody waits for it any more."""
        if not self.result.done():
            self.result.set_result(outcome)


class BatchQueue(Generic[T]):
    """First in, first out. Items whose `result` is done, as after a cancellation, are not handed
    out.
    """

    def __init__(self) -> None:
        self._items: deque[Waiting[T]] = deque()
        self._grown = asyncio.Event()
        self._taking = asyncio.Lock()

    def __len__(self) -> int:
        """Number of items that wait to be taken and whose result is still wanted."""
        self._drop_done()
        return len(self._items)

    def put(self, item: T, size: int = 0) -> Waiting[T]:
        """Append an item; `size`: its bytes."""
        made = Waiting(item, size)
        self._items.append(made)
        self._grown.set()
        return made

    async def take(self, most: int, linger_s: float, most_bytes: int) -> list[Waiting[T]]:
        """Wait for the next batch: up to `most` items of together `most_bytes`, at least one. A
        batch is full, or its first item has waited `linger_s` seconds. Takers are served in turn.
        """
        async with self._taking:
            while True:
                self._grown.clear()
                self._drop_done()
                if not self._items:
                    await self._grown.wait()
                    continue
                left = self._items[0].since + linger_s - time.monotonic()
                if len(self._items) >= most or left <= 0:
                    return self._pop(most, most_bytes)
                try:
                    await asyncio.wait_for(self._grown.wait(), left)
                except TimeoutError:
                    continue

    def _pop(self, most: int, most_bytes: int) -> list[Waiting[T]]:
        batch = [self._items.popleft()]
        room = most_bytes - batch[0].size
        while self._items and len(batch) < most:
            if self._items[0].result.done():
                self._items.popleft()
                continue
            room -= self._items[0].size
            if room < 0:
                break
            batch.append(self._items.popleft())
        return batch

    def _drop_done(self) -> None:
        """Remove the items at the front whose result is done."""
        while self._items and self._items[0].result.done():
            self._items.popleft()

    def cancel(self) -> None:
        """Cancel all items that wait."""
        while self._items:
            self._items.popleft().result.cancel()
