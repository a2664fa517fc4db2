"""A process of an environment's pool: what `megarl.environments.pool` starts, spoken to through its
standard input.

Messages both ways are 8 bytes of length and a body. In: pickles from the parent: (configuration,
codec, content of the user's files), then commands. Out: JSON only, because the process runs code
nobody vouches for, and the parent must not unpickle what that sends.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from megarl.environments.memory import MemoryLimit
from megarl.environments.scores import BadScore, read_score

LENGTH = struct.Struct("!Q")
DETAIL_CHARACTERS = 2000
BUILT_IN_MEMORY_MIB = 512
"""Memory limit of a process that runs a built-in verifier, if the recipe sets none."""
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


def _send(channel: socket.socket, reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode()
    channel.sendall(LENGTH.pack(len(body)) + body)


def _die_with_parent(parent: int) -> None:
    """On Linux, have the kernel kill this process when the thread that started it ends for any
    reason.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


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


class Sessions:
    """The open sessions of one worker process. Every method returns a reply that can be written as
    JSON.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        codec: Any,
        limit: MemoryLimit,
        *,
        maps_scores: bool = False,
    ) -> None:
        """`maps_scores`: see `score_reply`."""
        self._make, self._codec, self._limit, self._maps_scores = make, codec, limit, maps_scores
        self._open: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()

    def judge(self, prompt: Any, response: Any) -> dict[str, Any]:
        """Score a response with a new session of a single step: {score, correct, metrics}, or
        {failure, detail}; `retire` is True if this process should not get another request.
        """
        reply = self._guarded(lambda: self._judge(prompt, response))
        return reply | {
            "retire": self._limit.is_tight() or OUT_OF_MEMORY in reply.get("detail", "")
        }

    def begin(self, key: str, prompt: Any) -> dict[str, Any]:
        """Start session `key`: {observation} as token ids, or {failure, detail}."""
        return self._guarded(lambda: self._begin(key, prompt))

    def step(self, key: str, response: Any) -> dict[str, Any]:
        """Pass the model's response to session `key`: {observation} as token ids, {score}, or
        {failure, detail}.
        """
        return self._guarded(lambda: self._step(key, response))

    def end(self, key: str) -> dict[str, Any]:
        """Discard session `key`."""
        self._open.pop(key, None)
        return {}

    def decode(self, token_ids: Any) -> dict[str, Any]:
        """Decode token ids: {text}."""
        return {"text": self._codec.decode(token_ids)}

    def _judge(self, prompt: Any, response: Any) -> dict[str, Any]:
        session = self._make()
        self._wait(session.start(prompt))
        answer = self._wait(session.step(*self._read(response)))
        return score_reply(answer, maps_scores=self._maps_scores)

    def _begin(self, key: str, prompt: Any) -> dict[str, Any]:
        session = self._make()
        observation = self._wait(session.start(prompt))
        self._open[key] = session
        return {"observation": self._codec.encode(self._text(observation))}

    def _step(self, key: str, response: Any) -> dict[str, Any]:
        session = self._open.pop(key, None)
        if session is None:
            detail = "the session ended with the process it ran in, which another session broke"
            return {"failure": "error", "detail": detail}
        answer = self._wait(session.step(*self._read(response)))
        if hasattr(answer, "text"):
            token_ids = self._codec.encode(self._text(answer))
            if not token_ids:
                raise ValueError("the session's step returned an empty observation")
            self._open[key] = session
            return {"observation": token_ids}
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

    def _wait(self, made: Any) -> Any:
        return self._loop.run_until_complete(made) if inspect.isawaitable(made) else made

    def _read(self, response: Any) -> tuple[str, Any]:
        """Text and token ids of a response, which a request holds as only one of the two."""
        if isinstance(response, str):
            return response, self._codec.encode(response) if self._codec is not None else []
        return self._codec.decode(response), response

    def _text(self, observation: Any) -> str:
        text = getattr(observation, "text", None)
        if not isinstance(text, str):
            raise TypeError(f"the session returned {observation!r:.200}, not an Observation")
        return text


def main(parent: int) -> None:
    """Entry point of a worker process: load the verifier or session class and answer requests on
    the socket at standard input until the parent process (pid `parent`) closes its end.
    """
    _die_with_parent(parent)
    # The channel moves away from standard input, so that a verifier may read without breaking it;
    # what one prints goes to standard error, because the parent's standard output may be read by
    # a program.
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)

    first = receive(channel)
    if first is None:
        return
    config, codec, sources = pickle.loads(first)  # noqa: S301 - from the parent
    from megarl.environments import user_code
    from megarl.environments.session import VerifierSession
    from megarl.environments.verifiers import load_session, load_verifier, own_files

    try:
        own = own_files(config)
        user_code.prepare_imports(own, sources)
        if config.session:
            make = load_session(config, sources)
        else:
            verifier = load_verifier(config, sources)
            make = lambda: VerifierSession(verifier)  # noqa: E731
        limit_mib = config.memory_limit_mib or (None if own else BUILT_IN_MEMORY_MIB)
        limit = MemoryLimit(limit_mib)
    except BaseException as error:
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        _send(channel, {"refused": said})
        return
    _send(channel, {"ready": True, "imported": user_code.neighbours(own)})
    sessions = Sessions(make, codec, limit, maps_scores=not config.maps_no_scores)
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "judge": sessions.judge,
        "begin": sessions.begin,
        "step": sessions.step,
        "end": sessions.end,
        "decode": sessions.decode,
    }
    while (message := receive(channel)) is not None:
        command, *arguments = pickle.loads(message)  # noqa: S301 - from the parent
        _send(channel, commands[command](*arguments))
