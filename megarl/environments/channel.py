"""The channel between a pool and one of its worker processes: numbered requests and replies.

Both ways a message is its number, the length of its body (8 bytes each), and the body. Requests are
pickles. Replies are JSON only, because the worker process runs code nobody vouches for, and the
pool must not unpickle what that sends.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import struct
import sys
from typing import Any, NoReturn

HEAD = struct.Struct("!QQ")
MOST_BYTES = 2**30
"""Longest body of a reply. A longer one was not written by `WorkerChannel.send`."""


class BadReply(Exception):
    """Raised if a worker process sent something else than a reply."""


def request(number: int, message: tuple[Any, ...]) -> bytes:
    """The bytes of request `number`. Raises what `pickle.dumps` does."""
    body = pickle.dumps(message)
    return HEAD.pack(number, len(body)) + body


async def read_reply(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """(number, reply) of the next reply. Raises `BadReply`, and `asyncio.IncompleteReadError` or
    `OSError` if the process has closed its end.
    """
    number, size = HEAD.unpack(await reader.readexactly(HEAD.size))
    if size > MOST_BYTES:
        raise BadReply(f"a head of {size:,} bytes")
    body = await reader.readexactly(size)
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise BadReply(f"{body[:40]!r}")
    return number, reply


class WorkerChannel:
    """A worker process's end of the channel. A process that is forked from the worker process gets
    /dev/null in its place.
    """

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of the socket, which belongs to this object from now on."""
        self._descriptor, self._process = descriptor, os.getpid()
        self._file = _identity(descriptor)
        os.register_at_fork(after_in_child=self._let_go)

    async def connect(self) -> None:
        """Begin to read requests, in the running event loop."""
        self._reader, self._writer = await asyncio.open_connection(
            sock=socket.socket(fileno=self._descriptor), limit=2**20
        )

    async def receive(self) -> tuple[int, tuple[Any, ...]] | None:
        """(number, message) of the next request; None if the pool has closed its end."""
        try:
            number, size = HEAD.unpack(await self._reader.readexactly(HEAD.size))
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            return None
        return number, pickle.loads(body)  # noqa: S301 - from the pool

    def send(self, number: int, reply: dict[str, Any]) -> None:
        """Send the reply to request `number`. Ends the process if it is not the worker process, or
        if the user's code has closed the channel.
        """
        if os.getpid() != self._process:
            os._exit(0)
        if _identity(self._descriptor) != self._file:
            self._end("the user's code closed the descriptor of the worker's channel")
        try:
            body = json.dumps(reply).encode()
        except (TypeError, ValueError, RecursionError) as error:
            # The pool waits for a reply to this number.
            failed = {"failure": "error", "detail": f"the reply is no JSON: {error}"}
            body = json.dumps(failed).encode()
        self._writer.write(HEAD.pack(number, len(body)) + body)

    def _end(self, why: str) -> NoReturn:
        print(f"megarl: {why}", file=sys.stderr, flush=True)
        os._exit(1)

    def _let_go(self) -> None:
        if _identity(self._descriptor) == self._file:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, self._descriptor, inheritable=False)
            os.close(nothing)


def _identity(descriptor: int) -> tuple[int, int] | None:
    """What tells the open file of a descriptor from others; None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino
