"""The actor's side of `megarl.cluster.mailbox`: requests are served as they come, and answers are
kept until their `Mailbox` collects them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.activity.busy import Busy
from megarl.activity.spans import Kind
from megarl.cluster.mailbox import (
    INLINE_BYTES,
    LINGER_SHARE,
    MAX_BATCH,
    MAX_BATCH_BYTES,
    MAX_LINGER_S,
    MIN_STORED_BYTES,
    Failure,
)
from megarl.types import Segment, TokenArrays


@dataclass
class _Box:
    """Requests and answers of one `Mailbox`."""

    serving: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """{request number: task that computes its answer}."""
    answers: list[tuple[int, Any, float]] = field(default_factory=list)
    """Finished answers not yet collected: (request number, answer, time the request arrived)."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there are finished answers to collect."""
    full: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when finished answers must no longer be held back."""
    collection: int = 0
    """Number of the newest call of `Inbox.collect`."""

    @property
    def is_urgent(self) -> bool:
        """Whether the answers are a full batch, or one of them is a failure."""
        return len(self.answers) >= MAX_BATCH or any(
            isinstance(answer, Failure | Exception) for _, answer, _ in self.answers
        )


class Inbox:
    """Base class of a Ray actor that `Mailbox`es send requests to; a subclass defines `serve`. Each
    mailbox gets the answers to its own requests, whatever numbers the requests of others have.
    """

    ABOUT: tuple[str, Kind] = ("responses", "generate")
    """(what the actor makes, kind of that activity)."""

    async def serve(self, request: Any, arrays: list[TokenArrays]) -> Any:
        """Compute the answer to one request. `arrays`: the token arrays that the caller passed with
        it.
        """
        raise NotImplementedError

    async def submit(
        self,
        mailbox: str,
        requests: list[tuple[int, Any, list[tuple[int, int]]]],
        *stored: list[TokenArrays],
    ) -> None:
        """Start to serve a batch of requests of `mailbox`, and return before they are answered.

        Each request is (request number, request, places). A place (i, j) means entry j of the list
        `stored[i]` of token arrays.
        """
        box = self._box(mailbox)
        for number, request, places in requests:
            arrays = [TokenArrays(*stored[which][position]) for which, position in places]
            served = self._serve(box, number, request, arrays)
            box.serving[number] = asyncio.create_task(served)

    async def drop(self, mailbox: str, numbers: list[int]) -> None:
        """Stop to serve these requests of `mailbox`, whose answers nobody waits for. Those that are
        answered already are passed over.
        """
        box = self._box(mailbox)
        for number in numbers:
            if (task := box.serving.pop(number, None)) is not None:
                task.cancel()
        if box.answers and not box.serving:
            box.full.set()

    async def leave(self, mailbox: str) -> None:
        """Stop to serve all requests of `mailbox`, and drop its answers: its process is dead."""
        box = self._box(mailbox)
        await self.drop(mailbox, list(box.serving))
        box.answers.clear()
        box.ready.clear()

    async def collect(
        self, mailbox: str, linger_s: float, collection: int = 0
    ) -> tuple[list[tuple[int, Any, int]], Any]:
        """Wait for the first finished answer to a request of `mailbox`; while requests are still
        being served, hold it back for `linger_s` seconds, or longer (see `LINGER_SHARE`), so that
        others can join it; 0: not at all. A failure is not held back.

        Returns (answers, arrays). An answer is (request number, answer, index of its token arrays
        in `arrays`, or -1 where it has none). A call with a smaller `collection` than another's
        returns nothing: its caller does not wait for it any more.
        """
        box = self._box(mailbox)
        box.collection = max(box.collection, collection)
        await box.ready.wait()
        if collection < box.collection:
            return [], []
        box.full.clear()
        if linger_s > 0 and box.serving and not box.is_urgent:
            age_s = time.monotonic() - box.answers[0][2]
            linger_s = max(linger_s, min(LINGER_SHARE * age_s, MAX_LINGER_S))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(box.full.wait(), linger_s)
            if collection < box.collection:
                return [], []
        answers: list[tuple[int, Any, int]] = []
        stored: list[TokenArrays] = []
        size = 0
        while box.answers and len(answers) < MAX_BATCH and size < MAX_BATCH_BYTES:
            number, answer, _ = box.answers.pop(0)
            position = -1
            if isinstance(answer, Segment):
                position = len(stored)
                stored.append(answer.arrays)
                size += sum(column.nbytes for column in answer.arrays)
                answer = replace(answer, arrays=None)
            answers.append((number, answer, position))
        if not box.answers:
            box.ready.clear()
        columns: list[Any] = [tuple(arrays) for arrays in stored]
        if MIN_STORED_BYTES <= size < INLINE_BYTES:
            columns.append(np.empty(INLINE_BYTES, dtype=np.uint8))
        return answers, columns

    def _box(self, mailbox: str) -> _Box:
        """The box of `mailbox`. The table is made at the first call: only then does the actor's
        event loop run.
        """
        if not hasattr(self, "_boxes"):
            self._boxes: dict[str, _Box] = {}
            self._busy = Busy(self.ABOUT[0], kind=self.ABOUT[1])
        return self._boxes.setdefault(mailbox, _Box())

    async def _serve(self, box: _Box, number: int, request: Any, arrays: list[TokenArrays]) -> None:
        came_at = time.monotonic()
        try:
            with self._busy.request():
                answer = await self.serve(request, arrays)
        except Exception as error:
            answer = Failure(type(error).__name__, str(error))
        box.answers.append((number, answer, came_at))
        del box.serving[number]
        box.ready.set()
        if not box.serving or box.is_urgent:
            box.full.set()
