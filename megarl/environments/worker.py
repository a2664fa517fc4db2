"""Inside a worker process: requests are answered by number, verifiers are called, and memory is
limited.

    (number, command, arguments) --Host--> {score, correct, metrics} | {failure, detail} | ...

A plain function is called outside of the event loop, in the main thread. `async` ones wait beside
one another. Sessions: `megarl.environments.session_worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from megarl.environments.channel import WorkerChannel
from megarl.environments.config import EnvironmentConfig
from megarl.environments.plain_calls import LimitExceeded, ending_forks, within
from megarl.environments.response_text import Counted
from megarl.environments.scores import BadScore, read_score

ROOM_LEFT = 0.25
"""A worker process is replaced before its next request once less than this fraction is left of
the memory that it could still allocate when its limit was set."""


class MemoryLimit:
    """Limits what this process may allocate from now on, so that it does not hold more than
    `limit_mib` MiB in memory. An allocation beyond raises `MemoryError`.
    """

    def __init__(self, limit_mib: int | None) -> None:
        """`limit_mib` None is no limit; elsewhere than on Linux there is none either."""
        self.limit_mib = limit_mib if sys.platform == "linux" else None
        self._room = 0
        if self.limit_mib is None:
            return
        resident, data = _used()
        self._room = self.limit_mib * 2**20 - resident
        if self._room <= 0:
            raise ValueError(
                f"environment.memory_limit_mib is {self.limit_mib}, but the verifier's process"
                f" holds {resident / 2**20:.0f} MiB once it has loaded; raise it"
            )
        # Not the address space: libraries reserve much more of that than they use. What is
        # reserved already is not used again, so the limit counts from here.
        self._most = data + self._room
        resource.setrlimit(resource.RLIMIT_DATA, (self._most, self._most))

    def is_tight(self) -> bool:
        """Whether most of the room is used, by what earlier requests left behind."""
        return self.limit_mib is not None and self._most - _used()[1] < ROOM_LEFT * self._room


def _used() -> tuple[int, int]:
    """Bytes of this process (in memory, private and writable: used or reserved)."""
    pages = Path("/proc/self/statm").read_text().split()
    size = os.sysconf("SC_PAGE_SIZE")
    return int(pages[1]) * size, int(pages[5]) * size


BEAT_S = 0.5
DETAIL_CHARACTERS = 2000
OUT_OF_MEMORY = "the verifier's process ran out of memory"
MOST_STOPPED = 64
"""Calls that exceeded their limit before the process is replaced: each may go on, or have left a
thread behind."""
Reply = dict[str, Any]


def score_reply(answer: Any, *, maps_scores: bool = False) -> Reply:
    """The reply for what a verifier or session returned: {score, correct, metrics}, or {failure,
    detail} if it is no score. `maps_scores`: only scores from 0 to 1 are allowed, because
    `environment.correct` and `environment.wrong` map them to rewards.
    """
    try:
        score = read_score(answer)
        if maps_scores and not 0.0 <= score.reward <= 1.0:
            raise BadScore(
                "error",
                f"the verifier returned {score.reward:g}, but environment.correct and"
                " environment.wrong map scores from 0 (wrong) to 1 (right); leave both out to use"
                " rewards as they are",
            )
    except BadScore as error:
        return {"failure": error.failure, "detail": str(error)[:DETAIL_CHARACTERS]}
    return {"score": score.reward, "correct": score.correct, "metrics": score.metrics}


def late_verdict(limit_s: float) -> str:
    """What is said of a verifier that exceeded its time limit."""
    return f"no verdict within environment.time_limit_s = {limit_s:g} s"


def said(error: BaseException) -> str:
    """An error of the user's code in one line; its own text may fail to be made."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException:
        return name


class Host:
    """Answers the requests to a worker process, each with one reply of the same number."""

    def __init__(self, codec: Any, limit: MemoryLimit, config: EnvironmentConfig) -> None:
        """`codec` decodes responses and encodes observations."""
        self._codec, self._limit, self._config = codec, limit, config
        self._calls: set[asyncio.Task[None]] = set()
        self.num_late = 0
        """Number of calls that exceeded their time limit."""

    def serve(
        self, channel: WorkerChannel, loop: asyncio.AbstractEventLoop, *, beats: bool
    ) -> None:
        """Answer requests until the pool closes its end. `beats`: send a sign of life, the number
        0, every `BEAT_S` seconds. Without it the pool knows that a call keeps the whole process.
        """
        self._channel, self._loop, self._overlaps = channel, loop, beats
        beating = loop.create_task(self._beat()) if beats else None
        # The loop stops with each request, so that a plain function can be called outside of it:
        # such a function may run a loop of its own, and a thread can have only one.
        while (request := loop.run_until_complete(channel.receive())) is not None:
            number, (command, *arguments) = request
            self._take(number, command, arguments)
        if beating is not None:
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            self._channel.send(0, {})
            await asyncio.sleep(BEAT_S)

    def _take(self, number: int, command: str, arguments: list[Any]) -> None:
        """Begin to answer a request."""
        made: Awaitable[Reply] = getattr(self, f"_{command}")(*arguments)
        self._answer_later(number, made)

    def _answer_later(self, number: int, reply: Awaitable[Reply]) -> None:
        task = self._loop.create_task(self._answer(number, reply))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, number: int, awaited: Awaitable[Reply]) -> None:
        reply: Reply = {}
        with self._failing(reply):
            reply |= await awaited
        self._send(number, reply)

    def _send(self, number: int, reply: Reply) -> None:
        if self._retires(reply):
            reply["retire"] = True
        self._channel.send(number, reply)

    def _retires(self, reply: Reply) -> bool:
        """Whether the process should begin nothing further after `reply`."""
        return self.num_late >= MOST_STOPPED

    @contextlib.contextmanager
    def _failing(self, reply: Reply) -> Iterator[None]:
        """A context whose error becomes the failure in `reply`."""
        try:
            yield
        except BadScore as error:
            reply |= {"failure": error.failure, "detail": str(error)[:DETAIL_CHARACTERS]}
        except LimitExceeded as error:
            self.num_late += 1
            reply |= {"failure": "timeout", "detail": str(error)}
        except MemoryError:
            limit = self._limit.limit_mib
            advice = f"; raise environment.memory_limit_mib = {limit}" if limit else ""
            reply |= {"failure": "error", "detail": f"{OUT_OF_MEMORY}{advice}"}
        except BaseException as error:  # SystemExit and such must not end the process either
            reply |= {"failure": "error", "detail": said(error)[:DETAIL_CHARACTERS]}

    async def _decode(self, token_ids: Any) -> Reply:
        return {"text": self._codec.decode(token_ids)}


class VerifierHost(Host):
    """Calls the verifier."""

    def __init__(
        self,
        verifier: Callable[[Any, str], Any],
        codec: Any,
        limit: MemoryLimit,
        config: EnvironmentConfig,
    ) -> None:
        super().__init__(codec, limit, config)
        self._verifier = verifier

    def _take(self, number: int, command: str, arguments: list[Any]) -> None:
        if command != "judge":
            return super()._take(number, command, arguments)
        reply: Reply = {}
        with self._failing(reply):
            made = self._call(*arguments)
            if inspect.isawaitable(made):
                return self._answer_later(number, self._score(made))
            reply |= self._reply(made)
        self._send(number, reply)

    def _call(self, prompt: Any, response: Any, num_tokens: int | None) -> Any:
        """What the verifier returns for a response, given as text or token ids. `num_tokens`: see
        `megarl.environments.judging.Judge.judge`.
        """
        text = response
        if not isinstance(response, str):
            text = self._codec.decode(response)
            num_tokens = len(response) if num_tokens is None else num_tokens
        elif num_tokens is None and self._codec is not None:
            num_tokens = len(self._codec.encode(response))
        if num_tokens is not None:
            text = Counted.of(text, num_tokens)
        with ending_forks():
            return self._verifier(prompt, text)

    @contextlib.contextmanager
    def _failing(self, reply: Reply) -> Iterator[None]:
        with super()._failing(reply):
            try:
                yield
            except BaseException as error:
                # A thread that an earlier call has left behind may have interrupted this one.
                if KeyboardInterrupt in (type(error), type(error.__cause__)):
                    reply["again"] = True
                raise

    def _send(self, number: int, reply: Reply) -> None:
        if not self._overlaps:
            # A timer that the call has set would go off in the next call.
            for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0)  # the first is that of `signal.alarm` too
        super()._send(number, reply)

    def _retires(self, reply: Reply) -> bool:
        """See `Host`. A call that is to be made again needs another process."""
        full = self._limit.is_tight() or OUT_OF_MEMORY in reply.get("detail", "")
        return full or "again" in reply or super()._retires(reply)

    async def _score(self, made: Awaitable[Any]) -> Reply:
        limit_s = self._config.time_limit_s
        try:
            return self._reply(await within(limit_s, made))
        except LimitExceeded:
            raise LimitExceeded(late_verdict(limit_s)) from None

    def _reply(self, answer: Any) -> Reply:
        return score_reply(answer, maps_scores=not self._config.maps_no_scores)
