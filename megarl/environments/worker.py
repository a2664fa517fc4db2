"""A process of the verifier's pool: what `megarl.environments.pool` starts, spoken to through its
standard input.

Messages both ways are 8 bytes of length and a body. In: pickles from the parent (a configuration,
then (prompt, response) pairs). Out: JSON only, because a verifier runs code nobody vouches for, and
the parent must not unpickle what that sends.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import os
import pickle
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("!Q")
DETAIL_CHARACTERS = 2000


def receive(channel: socket.socket) -> bytes | None:
    """The next message, or None where the other end is gone."""
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


def _send(channel: socket.socket, **reply: Any) -> None:
    body = json.dumps(reply).encode()
    channel.sendall(LENGTH.pack(len(body)) + body)


def _die_with_parent(parent: int) -> None:
    """Have Linux kill this process when the thread that made it ends, however that comes about."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def judge(
    loop: asyncio.AbstractEventLoop, verifier: Any, prompt: Any, response: str
) -> dict[str, Any]:
    """The verifier's score, or why there is none: {score} or {failure, detail}."""
    try:
        score = loop.run_until_complete(verifier(prompt, response))
    except Exception as error:
        return {
            "failure": "error",
            "detail": f"{type(error).__name__}: {error}"[:DETAIL_CHARACTERS],
        }
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


def main(parent: int) -> None:
    """Serve until the parent's end of the channel closes."""
    _die_with_parent(parent)
    # The channel moves away from standard input, so that a verifier may read without breaking it;
    # what one prints goes # to standard error, because the parent's standard output may be read by
    # a # program.
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)

    first = receive(channel)
    if first is None:
        return
    config = pickle.loads(first)  # noqa: S301 - from the parent
    from megarl.environments.verifiers import load_verifier, split_name

    try:
        own = split_name(config.verifier)
        if own is not None:  # so that it may import its neighbours, as a script may
            sys.path.insert(0, str(Path(own[0]).resolve().parent))
        verifier = load_verifier(config)
    except Exception as error:
        _send(
            channel,
            refused=(
                str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            ),
        )
        return
    _send(channel, ready=True)
    loop = asyncio.new_event_loop()
    while (message := receive(channel)) is not None:
        prompt, response = pickle.loads(message)  # noqa: S301 - from the parent
        _send(channel, **judge(loop, verifier, prompt, response))
