"""A key-value store for ranks that meet over a network, for those only that know its secret.

torch's own store (TCPStore) listens on all interfaces and serves whoever connects; who can write to
it decides where ranks send weights. Here both ends first prove that they know the secret, and every
message afterwards carries a proof that it comes from the other end, in this order. Nothing is
encrypted: keys and values are addresses, numbers and counts, not weights.

    client                                          server, a thread of the hosting process
    <- 32 random bytes
    -> 32 random bytes, proof of both
    <- proof of both
    -> request (JSON), <- answer (JSON), ...        each with its length and its proof

A proof is HMAC-SHA256. The secret is a random token of the run, which reaches the engines through
Ray.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

PROOF_BYTES, LENGTH = 32, struct.Struct(">I")
LARGEST_BYTES = 2**20
"""Longest message in bytes; addresses of ranks take some hundred."""
HANDSHAKE_S = 10.0
"""Seconds that a client has to prove that it knows the secret."""
MARGIN_S = 10.0
"""Seconds that the server may take to answer, beside what a request waits."""


def proof(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of `parts`, [PROOF_BYTES]."""
    return hmac.digest(key, b"".join(parts), "sha256")


class _Channel:
    """Proofs of one connection's messages: by direction and position, so that none can be sent
    back, left out or repeated.
    """

    def __init__(self, secret: bytes, greetings: bytes) -> None:
        self._key, self._counts = proof(secret, b"channel", greetings), {b">": 0, b"<": 0}

    def seal(self, direction: bytes, text: bytes) -> bytes:
        """A message with its length and proof. `direction`: b">" to the server, b"<" from it."""
        return LENGTH.pack(len(text)) + self._next(direction, text) + text

    def opens(self, direction: bytes, text: bytes, found: bytes) -> bool:
        """Whether `found` is the proof of the next message."""
        return hmac.compare_digest(self._next(direction, text), found)

    def _next(self, direction: bytes, text: bytes) -> bytes:
        self._counts[direction] += 1
        return proof(self._key, direction, self._counts[direction].to_bytes(8, "big"), text)


class SecretServer:
    """Serves the store from a thread of this process, on one address."""

    def __init__(self, host: str, secret: bytes) -> None:
        """Listen on `host`, an address or name of this machine, at a free port.

        Raises `OSError` where `host` is not this machine.
        """
        self._secret, self._values = secret, dict[str, bytes]()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=1024)
        self.host, self.port = listening.getsockname()[:2]
        """The address and port on which it listens."""
        self._loop, self._ends = asyncio.new_event_loop(), asyncio.Event()
        thread = threading.Thread(
            target=self._run, args=(listening,), name="weights: store", daemon=True
        )
        thread.start()

    def close(self) -> None:
        """End the thread and all connections."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._ends.set)

    def _run(self, listening: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen(listening))

    async def _listen(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._serve, sock=listening)
        await self._ends.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: the handshake, then its requests in order."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError, KeyError):
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    channel = await self._greet(reader, writer)
                while channel is not None:
                    size = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
                    if size > LARGEST_BYTES:
                        break
                    found = await reader.readexactly(PROOF_BYTES)
                    text = await reader.readexactly(size)
                    if not channel.opens(b">", text, found):
                        break
                    answer = await self._answer(json.loads(text))
                    writer.write(channel.seal(b"<", json.dumps(answer).encode()))
                    await writer.drain()
            finally:
                writer.close()

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Channel | None:
        """The handshake; None for a client that does not know the secret."""
        own = secrets.token_bytes(PROOF_BYTES)
        writer.write(own)
        greetings = own + await reader.readexactly(PROOF_BYTES)
        found = await reader.readexactly(PROOF_BYTES)
        if not hmac.compare_digest(found, proof(self._secret, b"client", greetings)):
            return None
        writer.write(proof(self._secret, b"server", greetings))
        return _Channel(self._secret, greetings)

    async def _answer(self, request: dict[str, Any]) -> Any:
        """Carry out one request."""
        what = request["what"]
        if what == "set":
            self._values[request["key"]] = base64.b64decode(request["value"])
            for waiting in self._waiting.pop(request["key"], []):
                if not waiting.done():
                    waiting.set_result(None)
            return True
        if what == "get":
            value = self._values.get(request["key"])
            return None if value is None else base64.b64encode(value).decode()
        if what == "add":
            count = int(self._values.get(request["key"], b"0")) + request["count"]
            self._values[request["key"]] = str(count).encode()
            return count
        if what == "delete":
            return self._values.pop(request["key"], None) is not None
        if what == "check":
            return all(key in self._values for key in request["keys"])
        if what == "wait":
            try:
                async with asyncio.timeout(request["timeout_s"]):
                    for key in request["keys"]:
                        while key not in self._values:
                            came = self._loop.create_future()
                            self._waiting.setdefault(key, []).append(came)
                            await came
            except TimeoutError:
                return False
            return True
        raise ValueError(what)


class SecretStore(Store):
    """A connection to the store of a `SecretServer`. Threads may share it, but wait for each other.

    Methods raise `RuntimeError` where the server is gone. They have the names that torch calls;
    process groups of gloo and NCCL need no others.
    """

    def __init__(self, host: str, port: int, secret: bytes, timeout_s: float) -> None:
        """Connect within `timeout_s` seconds, which is also how long `get` waits for a key.

        Raises `RuntimeError` where the server cannot be reached or does not know the secret.
        """
        super().__init__()
        self._timeout_s, self._lock = timeout_s, threading.Lock()
        try:
            self._socket = socket.create_connection((host, port), timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greetings = self._read(PROOF_BYTES)
            own = secrets.token_bytes(PROOF_BYTES)
            greetings += own
            self._socket.sendall(own + proof(secret, b"client", greetings))
            if not hmac.compare_digest(
                self._read(PROOF_BYTES), proof(secret, b"server", greetings)
            ):
                raise RuntimeError("what listens there does not know the secret")
        except OSError as error:
            raise RuntimeError(str(error) or type(error).__name__) from error
        self._channel = _Channel(secret, greetings)

    def set(self, key: str, value: str | bytes) -> None:
        """Store `value` under `key`."""
        data = value if isinstance(value, bytes) else value.encode()
        self._ask(what="set", key=key, value=base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        """The value under `key`, once there is one; raises `RuntimeError` after the time-out."""
        self.wait([key])
        return base64.b64decode(self._ask(what="get", key=key))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values; never waits."""
        return self._ask(what="check", keys=list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values; raises `RuntimeError` after the time-out."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        if not self._ask(what="wait", keys=list(keys), timeout_s=timeout_s, waits_s=timeout_s):
            raise RuntimeError(f"no rank has set {', '.join(keys)} within {timeout_s:g} s")

    def add(self, key: str, count: int) -> int:
        """Add to the number under `key`, at first 0; returns the sum."""
        return self._ask(what="add", key=key, count=count)

    def delete_key(self, key: str) -> bool:
        """Remove `key`; returns whether it was there."""
        return self._ask(what="delete", key=key)

    def clone(self) -> SecretStore:
        """This connection: torch copies the stores of process groups."""
        return self

    def has_extended_api(self) -> bool:
        """Whether there are methods for several keys at once: no."""
        return False

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _ask(self, *, waits_s: float = 0.0, **request: Any) -> Any:
        """The server's answer to a request that takes up to `waits_s` seconds."""
        with self._lock:
            try:
                self._socket.settimeout(waits_s + MARGIN_S)
                text = json.dumps(request).encode()
                self._socket.sendall(self._channel.seal(b">", text))
                size = LENGTH.unpack(self._read(LENGTH.size))[0]
                found, answer = self._read(PROOF_BYTES), self._read(size)
            except OSError as error:
                self._socket.close()
                raise RuntimeError(str(error) or type(error).__name__) from error
            if not self._channel.opens(b"<", answer, found):
                self._socket.close()
                raise RuntimeError("an answer of the store was changed on its way")
        return json.loads(answer)

    def _read(self, size: int) -> bytes:
        """Read exactly `size` bytes."""
        found = bytearray()
        while len(found) < size:
            part = self._socket.recv(min(size - len(found), LARGEST_BYTES))
            if not part:
                raise ConnectionError("the connection was closed")
            found += part
        return bytes(found)
