"""The worker processes in which a recipe's sessions run, as the environment calls them.

    SessionPool.begin(key, prompt), .step(key, token_ids) -> Outcome     always the same process

Thousands of sessions are open at once; calls of one process wait beside one another. A call that
exceeds its time limit costs its own rollout. A process that ends, or that one call keeps from
answering anything, costs the rollouts whose sessions it ran; the next call starts another process.
If that fails, the calls fail, and the start is tried again later: the run goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import pickle
import time
import zlib
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.environments.outcome import Outcome
from megarl.environments.pool import DECODE_TRIES
from megarl.environments.user_code import Sources
from megarl.environments.verifiers import own_files
from megarl.environments.worker import LENGTH
from megarl.environments.worker_handle import UserFiles, WorkerHandle, how_it_ended
from megarl.types import Prompt

GRACE_S = 5.0
"""Seconds without a sign of life, beyond the time limit of a call, after which a process is
killed: an `async` method keeps it by computing, or code in C keeps Python's lock."""
LOOK_S = 0.5
TRIES, FIRST_PAUSE_S = 3, 1.0
"""How often a process is started that does not, and the pause after the first try, which doubles.
"""
PAUSE_S = 30.0
"""Seconds for which the calls of a process that did not start fail before it is tried again."""


class _Lost(Exception):
    """Raised if the process of a session ended, or was killed, before it replied."""

    def __init__(self, failure: Literal["error", "timeout"], message: str) -> None:
        super().__init__(message)
        self.failure = failure


class _Host:
    """One worker process, with the calls that wait for its replies."""

    def __init__(self, handle: WorkerHandle, config: EnvironmentConfig) -> None:
        self.handle, self._config = handle, config
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._limits_s: dict[int, float] = {}
        """Time limit of each call in `_waiting`."""
        self._numbers = itertools.count(1)
        self.lost: _Lost | None = None
        """Why the process is gone; None while it runs."""
        self.retires = False
        """Whether the process asked to be replaced: it starts no more sessions."""
        self.sessions: set[str] = set()
        """Keys of the rollouts whose sessions it runs."""

    async def connect(self) -> None:
        """Begin to read the process's replies."""
        self.handle.channel.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(
            sock=self.handle.channel, limit=2**20
        )
        self._heard_at = time.monotonic()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    async def ask(self, command: str, *arguments: Any) -> dict[str, Any]:
        """The reply to a command. Raises `_Lost` if the process is gone before it comes."""
        if self.lost:
            raise self.lost
        number, config = next(self._numbers), self._config
        body = pickle.dumps((number, command, *arguments))
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._limits_s[number] = config.start_limit_s if command == "begin" else config.time_limit_s
        try:
            self._writer.write(LENGTH.pack(len(body)) + body)
            return await self._waiting[number]
        finally:
            del self._waiting[number], self._limits_s[number]

    @property
    def is_idle(self) -> bool:
        """Whether it runs no session and no call waits for it."""
        return not self._waiting and not self.sessions

    async def _read(self) -> None:
        try:
            while True:
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                reply = json.loads(await self._reader.readexactly(size))
                self._heard_at = time.monotonic()
                number = reply.pop("number")
                self.retires = self.retires or reply.pop("retire", False)
                future = self._waiting.get(number)
                if future is not None and not future.done():
                    future.set_result(reply)
        except Exception as error:  # it ended, or the user's code wrote to the channel
            known = isinstance(error, asyncio.IncompleteReadError | OSError)
            await self._lose(None if known else _Lost("error", f"it sent no reply but {error}"))

    async def _watch(self) -> None:
        """Kill the process if it gives no sign of life."""
        while True:
            looked_at = time.monotonic()
            await asyncio.sleep(LOOK_S)
            if time.monotonic() - looked_at > LOOK_S + GRACE_S / 2:
                # This process stood still itself, and has not read what came meanwhile.
                self._heard_at = time.monotonic()
            silent_s = time.monotonic() - self._heard_at
            limit_s = max(self._limits_s.values(), default=self._config.time_limit_s)
            if silent_s > limit_s + GRACE_S:
                said = f"a call kept it from answering for {silent_s:.0f} s"
                advice = "an async method must wait, not compute"
                await self._lose(_Lost("timeout", f"{said}; {advice}"))
                return

    async def _lose(self, reason: _Lost | None) -> None:
        """Kill the process; every waiting call raises `reason`, or without one how it ended."""
        if self.lost:
            return
        self.lost = reason or _Lost("error", "it ended")
        if reason is None:
            await asyncio.to_thread(self.handle.let_end)
        await asyncio.to_thread(self.handle.kill)
        if reason is None:
            self.lost = _Lost("error", f"it ended {how_it_ended(self.handle.process.returncode)}")
        self._fail_calls(self.lost)

    def _fail_calls(self, reason: _Lost) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(reason)

    async def close(self) -> None:
        """Kill the process and close the socket."""
        self.lost = self.lost or _Lost("error", "the pool is closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self.handle.kill)
        self._writer.close()
        self._fail_calls(self.lost)


class SessionPool:
    """Runs the sessions of a recipe in `config.num_workers` worker processes."""

    def __init__(
        self, config: EnvironmentConfig, codec: Codec | None, known: Sources | None = None
    ) -> None:
        """Raises `ValueError` if a file of the user's is missing. `codec` is required for
        everything but `start`. `known`: see `UserFiles`.
        """
        self._config, self._codec = config, codec
        self._files = UserFiles(own_files(config), known)
        self._hosts: list[_Host | None] = [None] * config.num_workers
        self._starting = [asyncio.Lock() for _ in self._hosts]
        self._homes: dict[str, _Host] = {}
        """{key of a rollout: the process that runs its session}."""
        self._failed: list[tuple[float, str]] = [(-PAUSE_S, "") for _ in self._hosts]
        """Of each process: when it last did not start, and why."""
        self._has_loaded = False
        self._old: set[asyncio.Task[None]] = set()
        self._closed = False
        self.tools: list[dict[str, Any]] = []
        """The recipe's tools, once a process has started."""

    async def start(self, within_s: float | None = None) -> None:
        """Start a first process and load the session there; raises `ValueError` if it does not load
        within `within_s` seconds.
        """
        await self._host(0, within_s)
        self._has_loaded = True

    @property
    def sources(self) -> Sources:
        """The user's files as the run first read them, by path."""
        return self._files.sources

    async def begin(self, key: str, prompt: Prompt) -> Outcome:
        """Start the session of rollout `key`. The outcome holds its first observation, which may be
        empty.
        """
        return await self._ask(key, "begin", key, prompt)

    async def step(self, key: str, token_ids: np.ndarray) -> Outcome:
        """Pass the model's response to the session of rollout `key`. The outcome holds an
        observation, an answer or a score.
        """
        return await self._ask(key, "step", key, token_ids)

    async def cut_off(self, key: str, token_ids: np.ndarray | None = None) -> Outcome:
        """Discard the session of rollout `key`. `token_ids`: its last response, if it is cut off at
        the token limit; the outcome says where.
        """
        return await self._ask(key, "cut_off", key, token_ids)

    async def decode(self, token_ids: np.ndarray) -> str:
        """Decode `token_ids` to text in a worker process; raises `RuntimeError` if that fails in
        `DECODE_TRIES` processes.
        """
        reply: dict[str, Any] = {}
        for _ in range(DECODE_TRIES):
            reply = await self._reply("", "decode", token_ids)
            if "text" in reply:
                return reply["text"]
        raise RuntimeError(f"decoding a response failed: {reply.get('detail')}")

    async def _ask(self, key: str, command: str, *arguments: Any) -> Outcome:
        try:
            found = Outcome(**await self._reply(key, command, *arguments))
        except TypeError as error:  # a reply that the user's code forged
            return Outcome(failure="error", detail=f"{error}")
        if found.observation is not None:
            return found
        return replace(found, warning=self._files.take_warning())

    async def _reply(self, key: str, command: str, *arguments: Any) -> dict[str, Any]:
        """The reply of the process that is responsible for rollout `key`, or {failure, detail}."""
        number = zlib.crc32(key.encode()) % len(self._hosts)
        reply: dict[str, Any] = {}
        try:
            host = self._homes.get(key) or await self._host(number)
            if command == "begin":
                self._homes[key] = host
                host.sessions.add(key)
            reply = await host.ask(command, *arguments)
        except _Lost as error:
            said = f"the process of the session is gone: {error}"
            reply = {"failure": error.failure, "detail": said}
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            reply = {"failure": "error", "detail": f"{type(error).__name__}: {error}"}
        finally:
            if command == "cut_off" or (command != "decode" and "observation" not in reply):
                self._forget(key)
        return reply

    def _forget(self, key: str) -> None:
        """Note that the session of rollout `key` has ended."""
        host = self._homes.pop(key, None)
        if host is None:
            return
        host.sessions.discard(key)
        if host.retires and host not in self._hosts and host.is_idle:
            self._close_later(host)

    def _close_later(self, host: _Host) -> None:
        task = asyncio.create_task(host.close())
        self._old.add(task)
        task.add_done_callback(self._old.discard)

    async def _host(self, number: int, within_s: float | None = None) -> _Host:
        """Worker process `number`, started if it does not run. Raises `_Lost` if it does not start;
        `ValueError` instead if no process has started before, since the user's code is then wrong.
        """
        async with self._starting[number]:
            host = self._hosts[number]
            if host is not None and (host.lost or host.retires):
                self._hosts[number] = None
                if host.lost or host.is_idle:
                    self._close_later(host)
                host = None  # one that retires is closed with its last session
            if host is None:
                handle = await self._started(number, within_s)
                self.tools = handle.tools
                host = _Host(handle, self._config)
                await host.connect()
                self._hosts[number] = host
            return host

    async def _started(self, number: int, within_s: float | None) -> WorkerHandle:
        """A new process in the place `number`; see `_host`."""
        failed_at, why = self._failed[number]
        if time.monotonic() - failed_at < PAUSE_S:
            raise _Lost("error", why)
        for left in reversed(range(TRIES)):
            if self._closed:
                raise RuntimeError("the environment's pool is closed")
            try:
                return await asyncio.to_thread(
                    self._files.start_worker, self._config, self._codec, within_s
                )
            except ValueError as error:
                if not self._has_loaded:
                    raise
                if not left:
                    why = f"another did not start: {error}"
                    self._failed[number] = (time.monotonic(), why)
                    raise _Lost("error", why) from None
            await asyncio.sleep(FIRST_PAUSE_S * 2 ** (TRIES - 1 - left))
        raise AssertionError("every try returns or raises")

    async def close(self) -> None:
        """Kill all processes. May be called twice."""
        self._closed = True
        for number, lock in enumerate(self._starting):
            async with lock:
                host, self._hosts[number] = self._hosts[number], None
            if host is not None:
                with contextlib.suppress(OSError):
                    await host.close()
        for host in set(self._homes.values()):  # those that retire
            with contextlib.suppress(OSError):
                await host.close()
        await asyncio.gather(*self._old)
