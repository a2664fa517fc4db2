"""A process of an environment's pool: what `megarl.environments.pool` starts, spoken to through its
standard input.

Messages both ways are 8 bytes of length and a body. In: pickles from the parent: (configuration,
codec), then commands. Out: JSON only, because the process runs code nobody vouches for, and the
parent must not unpickle what that sends.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import math
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("!Q")
DETAIL_CHARACTERS = 2000


def receive(channel: socket.socket) -> bytes | None:
    """Receive the next message from the socket; None if the other end has closed it."""
    head = _exactly(channel, LENGTH.size)
    return None if head is None else _exactly(channel, LENGTH.unpack(head)[0])


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
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


def score_reply(score: Any) -> dict[str, Any]:
    """The reply for a score: {score}, or {failure, detail} if the score is not a number from 0 to
    1.
    """
    try:
        number = math.nan if isinstance(score, str | bytes) else float(score)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        return {
            "failure": "nan",
            "detail": f"the verifier returned {score!r:.200}, not a finite number",
        }
    if not 0.0 <= number <= 1.0:
        return {
            "failure": "error",
            "detail": (
                f"the verifier returned {number:g}; a score lies between 0 (wrong) and 1 (right)"
            ),
        }
    return {"score": number}


class Sessions:
    """The open sessions of one worker process. Every method returns a reply that can be written as
    JSON.
    """

    def __init__(self, make: Callable[[], Any], codec: Any) -> None:
        self._make, self._codec = make, codec
        self._open: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()

    def judge(self, prompt: Any, response: Any) -> dict[str, Any]:
        """Score a response with a new session of a single step: {score}, or {failure, detail}."""
        return self._guarded(lambda: self._judge(prompt, response))

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
        return score_reply(self._wait(session.step(*self._read(response))))

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
        return score_reply(answer)

    def _guarded(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return call()
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"[:DETAIL_CHARACTERS]
            return {"failure": "error", "detail": detail}

    def _wait(self, made: Any) -> Any:
        return self._loop.run_until_complete(made) if inspect.isawaitable(made) else made

    def _read(self, response: Any) -> tuple[str, Any]:
        """(text, token ids) of a response given as token ids or as text."""
        if isinstance(response, str):
            return response, self._codec.encode(response) if self._codec is not None else []
        return self._codec.decode(response), response

    def _text(self, observation: Any) -> str:
        text = getattr(observation, "text", None)
        if not isinstance(text, str):
            raise TypeError(f"the session returned {observation!r:.200}, not an Observation")
        return text


def main(parent: int) -> None:
    """Serve requests until the parent process closes its end of the socket."""
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
    config, codec = pickle.loads(first)  # noqa: S301 - from the parent
    from megarl.environments.session import VerifierSession
    from megarl.environments.verifiers import load_session, load_verifier, own_file

    try:
        own = own_file(config)
        if own is not None:  # so that it may import its neighbours, as a script may
            sys.path.insert(0, str(Path(own).resolve().parent))
        if config.session:
            make = load_session(config)
        else:
            verifier = load_verifier(config)
            make = lambda: VerifierSession(verifier)  # noqa: E731
    except Exception as error:
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        _send(channel, {"refused": said})
        return
    _send(channel, {"ready": True})
    sessions = Sessions(make, codec)
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
