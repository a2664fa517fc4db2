"""Verifiers inside a worker process, and the messages between it and its parent.

Messages both ways are 8 bytes of length and a body. In: pickles from the parent. Out: JSON only,
because the process runs code nobody vouches for, and the parent must not unpickle what that sends.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from megarl.environments.length import Counted
from megarl.environments.memory import MemoryLimit
from megarl.environments.scores import BadScore, read_score

LENGTH = struct.Struct("!Q")
DETAIL_CHARACTERS = 2000
OUT_OF_MEMORY = "the verifier's process ran out of memory"


def receive(channel: socket.socket, deadline: float | None = None) -> bytes | None:
    """Receive the next message from the socket; None if the other end has closed it. Raises
    `TimeoutError` if the message is not complete at `deadline`, a time of `time.monotonic`.
    """
    head = _exactly(channel, LENGTH.size, deadline)
    return None if head is None else _exactly(channel, LENGTH.unpack(head)[0], deadline)


def _exactly(channel: socket.socket, size: int, deadline: float | None) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        if deadline is not None:
            channel.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def score_reply(answer: Any, *, maps_scores: bool = False) -> dict[str, Any]:
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


class VerifierHost:
    """Calls the verifier in a worker process. Every method returns a reply that can be written as
    JSON.
    """

    def __init__(
        self,
        verifier: Callable[[Any, str], Any],
        codec: Any,
        limit: MemoryLimit,
        *,
        maps_scores: bool = False,
    ) -> None:
        """`maps_scores`: see `score_reply`."""
        self._verifier, self._codec, self._limit = verifier, codec, limit
        self._maps_scores = maps_scores
        self._loop = asyncio.new_event_loop()

    def judge(self, prompt: Any, response: Any, num_tokens: int | None = None) -> dict[str, Any]:
        """Score a response: {score, correct, metrics}, or {failure, detail}; `retire` is True if
        this process should not get another request. `num_tokens`: see `Judge.judge`.
        """
        reply = self._guarded(lambda: self._judge(prompt, response, num_tokens))
        return reply | {
            "retire": self._limit.is_tight() or OUT_OF_MEMORY in reply.get("detail", "")
        }

    def decode(self, token_ids: Any) -> dict[str, Any]:
        """Decode token ids: {text}."""
        return {"text": self._codec.decode(token_ids)}

    def _judge(self, prompt: Any, response: Any, num_tokens: int | None) -> dict[str, Any]:
        text = response
        if not isinstance(response, str):
            text = self._codec.decode(response)
            num_tokens = len(response) if num_tokens is None else num_tokens
        elif num_tokens is None and self._codec is not None:
            num_tokens = len(self._codec.encode(response))
        if num_tokens is not None:
            text = Counted.of(text, num_tokens)
        # Not in a coroutine: a plain function may start an event loop of its own, which only one
        # can be in a thread.
        made = self._verifier(prompt, text)
        answer = self._loop.run_until_complete(made) if inspect.isawaitable(made) else made
        return score_reply(answer, maps_scores=self._maps_scores)

    def _guarded(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return call()
        except BadScore as error:
            return {"failure": error.failure, "detail": str(error)[:DETAIL_CHARACTERS]}
        except MemoryError:
            limit = self._limit.limit_mib
            advice = f"; raise environment.memory_limit_mib = {limit}" if limit else ""
            return {"failure": "error", "detail": f"{OUT_OF_MEMORY}{advice}"}
        except BaseException as error:  # SystemExit and such must not end the process either
            detail = f"{type(error).__name__}: {error}"[:DETAIL_CHARACTERS]
            return {"failure": "error", "detail": detail}
