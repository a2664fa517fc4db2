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
    """Answer of the rollout service to a trainer rank that waits for rollouts or an evaluation:
    send the present weights to the engines, together with the other ranks, since a new engine has
    none, then go on waiting.
    """


@dataclass
class Rejoins:
    """Decides how often trainer ranks that wait send the present weights to the engines once more
    (a publication), because a new engine has none.

    A *wait* is what all ranks wait for in the same place of the training loop, such as the batch of
    a step; a text names it. Publishing is collective, so all ranks must be asked for the same
    number of publications in the same wait, though they ask at different times. Example, for two
    ranks and a new engine:

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
        """Whether a rank must send its weights once more before it gets the result of `wait`, the
        name of what all ranks wait for. `publications`: how often the rank has sent its weights in
        this wait. Changes nothing.
        """
        if publications < self._asked.get(wait, 0):
            return True
        return bool(self.engines) and wait not in self._closed

    def next(self, wait: str, publications: int) -> bool:
        """Decide what a rank is told that waits for `wait`, the name of what all ranks wait for,
        and has sent its weights `publications` times meanwhile. True: the caller tells the rank to
        send its weights once more. False: the caller gives the rank its result, and other ranks
        are not asked for more publications in this wait than so far.
        """
        if not self.is_due(wait, publications):
            self._closed.add(wait)
            return False
        if publications == self._asked.get(wait, 0):
            self._asked[wait] = publications + 1
            self.engines.clear()
        return True

    def close(self, wait: str) -> None:
        """Note that the result of `wait`, the name of what all ranks wait for, is there: ranks that
        wait are not asked to send their weights more often than so far.
        """
        self._closed.add(wait)


class WaitProgress:
    """Tells for how many seconds a run's rollouts have made no progress (`silent_s`), from the
    counts of engine steps and of answers that `add` gets.
    """

    def __init__(self) -> None:
        self._engine_steps = self._found = 0
        self._at = time.monotonic()

    def add(self, engine_steps: int, answers: int) -> int:
        """Note progress; returns the number of engine steps and answers so far. `engine_steps`:
        steps that all engines have made since the last call. `answers`: number of answers of
        engines and environment since the start.
        """
        self._engine_steps += engine_steps
        if (found := self._engine_steps + answers) != self._found:
            self._found, self._at = found, time.monotonic()
        return self._found

    @property
    def silent_s(self) -> float:
        """Seconds since the last call of `add` that told of progress, or since the start."""
        return time.monotonic() - self._at


class Waits:
    """Makes calls to the rollout service wait, as asyncio coroutines, for the trainer ranks that
    made them: until a result is there, the run fails or is to end, or a new engine needs weights.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """The error that has ended generation; None if there is none."""
        self.is_interrupted = False
        """Whether the run is to end after the present step."""
        self.rejoins = Rejoins()
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
        """If an error has ended generation, raise it: a `UserError` as it is, any other as a
        `RuntimeError`. Otherwise do nothing.
        """
        if isinstance(self.failure, UserError):
            raise self.failure
        if self.failure is not None:
            raise RuntimeError(f"rollouts stopped: {self.failure}") from self.failure

    async def until(
        self, name: str, publications: int, is_ready: Callable[[], bool]
    ) -> PublishAgain | None:
        """Wait until `is_ready()` is true, the run is interrupted, or generation has failed;
        returns None, and raises nothing. Returns `PublishAgain` instead if the trainer rank that
        waits is to send its weights to the engines first. `name`: what all ranks wait for, such as
        "step 7". `publications`: how often this rank has sent its weights in this wait.
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
