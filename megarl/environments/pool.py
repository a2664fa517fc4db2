"""A pool of processes in which verifiers run, each call under a hard time limit.

    WorkerPool.judge(prompt, response) -> Outcome

A process calls one plain function at a time. One that hangs, even in C code, costs its process and
its own sample. Where the process ends during a call, the call is made again, once, in a new
process: an earlier call may have left behind what ended it. Of `async` functions a process has
`environment.concurrency` calls under way; where one of them ends the process, all are made again,
one by one in a process of their own, so that the one at fault fails alone. For sessions see
`megarl.environments.session_pool`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.environments.scores import Outcome
from megarl.environments.user_code import Sources
from megarl.environments.worker import late_verdict
from megarl.environments.workers import Worker, WorkerLost, Workers
from megarl.types import Prompt

DECODE_WITHIN_S = 60.0
DECODE_TRIES = 3
"""Processes that are asked to decode a response, each if the one before ended or did not answer."""


class WorkerPool:
    """Scores responses in `config.num_workers` worker processes, and one for calls that are made
    again. Belongs to one event loop.
    """

    def __init__(
        self, config: EnvironmentConfig, codec: Codec | None, known: Sources | None = None
    ) -> None:
        """`codec` is required for responses given as token ids. `known`: see `UserFiles`."""
        self._config = config
        self._workers = Workers(config, codec, known, config.num_workers + 1)
        self._busy = [0] * config.num_workers
        """Requests under way in each place; the last place, for calls made again, has no number."""
        self.forms: dict[str, str] = {}
        """See `Worker.forms`; known once the pool has started."""
        self._room = asyncio.Semaphore(config.num_workers)
        self._is_wide = False
        self._alone = asyncio.Lock()
        self._asked: set[asyncio.Task[dict[str, Any]]] = set()

    async def start(self, within_s: float | None = None) -> None:
        """Start a first process and load the verifier there; raises `ValueError` if the verifier
        does not load within `within_s` seconds.
        """
        worker = await self._workers.at(0, within_s)
        self.forms = worker.forms
        self._widen(worker)

    @property
    def sources(self) -> Sources:
        """The user's files as the run first read them, by path."""
        return self._workers.files.sources

    async def judge(
        self, prompt: Prompt, response: str | np.ndarray, num_tokens: int | None = None
    ) -> Outcome:
        """Score a response with the verifier. Failures are part of the outcome; `ValueError` is
        raised only if the verifier cannot be loaded, `RuntimeError` if the pool is closed.
        `num_tokens`: see `Judge.judge`.
        """
        limit_s = self._config.time_limit_s
        try:
            reply = await self._ask("judge", prompt, response, num_tokens, limit_s=limit_s)
            outcome = Outcome.of(reply, "score")
        except WorkerLost as lost:
            said = f"the verifier's process {lost}"
            if lost.failure == "timeout":
                said = f"{late_verdict(limit_s)}: {said}"
            outcome = Outcome(failure=lost.failure, detail=said)
        return replace(outcome, warning=self._workers.files.take_warning())

    async def decode(self, token_ids: np.ndarray) -> str:
        """Decode `token_ids` to text in a worker process. Raises `RuntimeError` if that fails, in
        `DECODE_TRIES` processes where they end or do not answer.
        """
        reply: dict[str, Any] = {}
        for _ in range(DECODE_TRIES):
            try:
                reply = await self._ask("decode", token_ids, limit_s=DECODE_WITHIN_S)
                if "text" in reply:
                    return reply["text"]
            except WorkerLost as lost:
                reply = {"detail": f"the verifier's process {lost}"}
                self._workers.files.warn("a worker process was lost while it decoded a response")
        raise RuntimeError(f"decoding a response failed: {reply.get('detail')}")

    async def _ask(self, *message: Any, limit_s: float) -> dict[str, Any]:
        """The reply to a request; see `Worker.ask`."""
        # In a task of its own: if the caller is cancelled, the process is busy all the same.
        task = asyncio.create_task(self._reply(message, limit_s))
        self._asked.add(task)
        task.add_done_callback(self._has_ended)
        return await asyncio.shield(task)

    def _has_ended(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._asked.discard(task)
        if not task.cancelled():
            task.exception()  # or Python complains of one that nobody awaits any more

    async def _reply(self, message: tuple[Any, ...], limit_s: float) -> dict[str, Any]:
        async with self._room:
            place = min(
                range(len(self._busy)),
                key=lambda place: (self._busy[place], not self._workers.has(place)),
            )
            self._busy[place] += 1
            try:
                reply = await self._first_reply_of(place, message, limit_s)
                if reply is None and not self._is_wide:
                    # The next process of the place has made no call before this one.
                    reply = await self._reply_of(place, message, limit_s)
            finally:
                self._busy[place] -= 1
        if reply is None:
            async with self._alone:
                reply = await self._reply_of(len(self._busy), message, limit_s)
        reply.pop("again", None)
        return reply

    async def _first_reply_of(
        self, place: int, message: tuple[Any, ...], limit_s: float
    ) -> dict[str, Any] | None:
        """The reply of a process; None if the call is to be made again, since another call may be
        why it failed.
        """
        try:
            reply = await self._reply_of(place, message, limit_s)
        except WorkerLost as lost:
            if lost.calls == 1 and not lost.by_itself:
                raise
            return None
        return None if reply.get("again") else reply

    async def _reply_of(
        self, place: int, message: tuple[Any, ...], limit_s: float
    ) -> dict[str, Any]:
        worker = await self._workers.at(place)
        self._widen(worker)
        try:
            return await worker.ask(*message, limit_s=limit_s)
        finally:
            self._workers.settle(worker)

    def _widen(self, worker: Worker) -> None:
        """Allow as many calls at the same time as a process takes, once the first has loaded."""
        if worker.beats and not self._is_wide:
            self._is_wide = True
            for _ in range((self._config.concurrency - 1) * len(self._busy)):
                self._room.release()

    async def close(self) -> None:
        """End all processes: requests under way fail, and waiting ones raise `RuntimeError`. May be
        called twice.
        """
        await self._workers.close()
        await asyncio.gather(*self._asked, return_exceptions=True)
