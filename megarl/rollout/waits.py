"""What ends the waits of the training ranks at the rollout service: a result, the end or failure of
the run, or a new engine, which gets its weights when the waiting ranks publish theirs again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from megarl.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PublishAgain:
    """Answer to a training rank that waits for rollouts or an evaluation: publish the present
    weights together with the other ranks, then go on waiting.
    """


@dataclass
class Rejoins:
    """The publications that waiting training ranks are asked for.

    A *wait* is what all ranks wait for in the same place of the loop, such as the batch of a step.
    Publishing is collective, so all ranks must be asked for the same number of publications in the
    same wait, though they ask at different times. Example, for two ranks and a new engine:

        rank 0: next("step 7", 0) -> True, publishes
        rank 1: next("step 7", 0) -> True, publishes
        rank 0: next("step 7", 1) -> False, gets the batch, the wait is closed
        a further engine is ready: it is left to the publication after the step
        rank 1: next("step 7", 1) -> False, gets the batch too
    """

    engines: set[int] = field(default_factory=set)
    """Numbers of the engines that are ready, but have no weights."""
    _asked: dict[str, int] = field(default_factory=dict)
    """{wait: publications that its ranks were asked for}."""
    _closed: set[str] = field(default_factory=set)
    """Waits of which some rank has the result."""

    def is_due(self, wait: str, publications: int) -> bool:
        """Whether a rank that has published `publications` times in this wait is to publish
        again.
        """
        if publications < self._asked.get(wait, 0):
            return True
        return bool(self.engines) and wait not in self._closed

    def next(self, wait: str, publications: int) -> bool:
        """As `is_due`. If True, the caller tells the rank to publish; if False, the caller gives
        the rank its result, and no rank publishes in this wait beyond what was asked so far.
        """
        if not self.is_due(wait, publications):
            self._closed.add(wait)
            return False
        if publications == self._asked.get(wait, 0):
            self._asked[wait] = publications + 1
            self.engines.clear()
        return True

    def close(self, wait: str) -> None:
        """Ask for no further publication in this wait: its result is there."""
        self._closed.add(wait)


class WaitProgress:
    """Whether rollouts make progress, and since when they make none, as far as calls of `add`
    tell.
    """

    def __init__(self) -> None:
        self._engine_steps = self._found = 0
        self._at = time.monotonic()

    def add(self, engine_steps: int, answers: int) -> int:
        """A number that grows with progress. `engine_steps`: steps that engines have made since the
        last call. `answers`: of engines and environment, in all.
        """
        self._engine_steps += engine_steps
        if (found := self._engine_steps + answers) != self._found:
            self._found, self._at = found, time.monotonic()
        return self._found

    @property
    def silent_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._at


class Waits:
    """Wakes up whoever waits at the rollout service."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """What has ended generation, if anything has."""
        self.is_interrupted = False
        """Whether the run is to end after the present step."""
        self.rejoins = Rejoins()
        self._changed = asyncio.Condition()

    async def notify(self) -> None:
        """Have every wait look again whether it has ended."""
        async with self._changed:
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """End all waits by `error`, unless another error was first."""
        self.failure = self.failure or error
        await self.notify()

    def raise_failure(self) -> None:
        """Raise the error that has ended generation, if there is one."""
        if isinstance(self.failure, UserError):
            raise self.failure
        if self.failure is not None:
            raise RuntimeError(f"rollouts stopped: {self.failure}") from self.failure

    async def until(
        self, name: str, publications: int, is_ready: Callable[[], bool]
    ) -> PublishAgain | None:
        """Wait until something is ready, the run is interrupted or has failed: None. Or until the
        training rank that waits is to publish its weights again. `name` and `publications`: see
        `Rejoins`.
        """

        def has_ended() -> bool:
            return self.failure is not None or self.is_interrupted or is_ready()

        async with self._changed:
            await self._changed.wait_for(
                lambda: has_ended() or self.rejoins.is_due(name, publications)
            )
        if has_ended():
            self.rejoins.close(name)
        return PublishAgain() if self.rejoins.next(name, publications) else None

    async def result(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work()`, which is cancelled if the run fails meanwhile."""
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
        """The result of `work()`; when it ends, every wait looks again."""
        try:
            return await work()
        finally:
            await self.notify()
