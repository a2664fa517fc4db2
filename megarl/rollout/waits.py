"""What ends the waits of the training ranks at the rollout service: a result, or the end or failure
of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from megarl.errors import ProcessLost, UserError

T = TypeVar("T")


class Waits:
    """Makes calls of trainer ranks to the rollout service wait, as asyncio coroutines, until a
    result is there, or the run fails or is to end.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """The error that has ended generation; None if there is none."""
        self.is_interrupted = False
        """Whether the run is to end after the present step."""
        self._changed = asyncio.Condition()

    async def notify(self) -> None:
        """Have every coroutine that waits in this object check its condition again. Call it after
        any change that may end a wait.
        """
        async with self._changed:
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Have all waits end because generation has failed by `error`, which `raise_failure` then
        raises; only the first call sets the error.
        """
        self.failure = self.failure or error
        await self.notify()

    def raise_failure(self) -> None:
        """If an error has ended generation, raise it: a `UserError` or `ProcessLost` as it is, any
        other as a `RuntimeError`. Otherwise do nothing.
        """
        if isinstance(self.failure, UserError | ProcessLost):
            raise self.failure
        if self.failure is not None:
            raise RuntimeError(f"rollouts stopped: {self.failure}") from self.failure

    async def until(self, is_ready: Callable[[], bool]) -> None:
        """Wait until `is_ready()` is true, the run is interrupted, or generation has failed."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.failure is not None or self.is_interrupted or is_ready()
            )

    async def result(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result, or error, of `work()`. If generation fails meanwhile, `work()` is cancelled,
        and the failure is raised.
        """
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
        """The result, or error, of `work()`; when it ends, all waits check their conditions."""
        try:
            return await work()
        finally:
            await self.notify()
