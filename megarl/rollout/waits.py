"""What ends the waits of the trainer ranks at the rollout service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from megarl.errors import ProcessLost, UserError

T = TypeVar("T")


class Waits:
    """Makes calls wait for a result, or for the end or failure of the run."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """The error that has ended generation."""
        self.is_interrupted = False
        """Whether the run is to end after the present step."""
        self._changed = asyncio.Condition()

    async def notify(self) -> None:
        """Have every wait check its condition; call it after any change."""
        async with self._changed:
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """End all waits by `error`; only the first one counts."""
        self.failure = self.failure or error
        await self.notify()

    def raise_failure(self) -> None:
        """A `UserError` or `ProcessLost` as it is, another error as `RuntimeError`."""
        if isinstance(self.failure, UserError | ProcessLost):
            raise self.failure
        if self.failure is not None:
            raise RuntimeError(f"rollouts stopped: {self.failure}") from self.failure

    async def until(self, is_ready: Callable[[], bool]) -> None:
        """Wait for `is_ready()`, an interruption or a failure."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.failure is not None or self.is_interrupted or is_ready()
            )

    async def result(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work()`, which a failure of generation cancels."""
        task = asyncio.create_task(self.noticed(work))
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: task.done() or self.failure is not None)
            if not task.done():
                self.raise_failure()
            return task.result()
        finally:
            task.cancel()

    async def noticed(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work()`, at whose end all waits check."""
        try:
            return await work()
        finally:
            await self.notify()
