"""The worker processes in which a recipe's sessions run, as the environment calls them.

    SessionPool.begin(key, prompt), .step(key, token_ids) -> Outcome     always the same process

Thousands of sessions are open at once; calls of one process wait beside one another. A call that
exceeds its time limit costs its own rollout. A process that ends, or that one call keeps from
answering anything, costs the rollouts whose sessions it ran; the next call starts another process.
If that fails, the calls fail, and the start is tried again later: the run goes on.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.environments.pool import DECODE_TRIES
from megarl.environments.scores import Outcome
from megarl.environments.user_code import Sources
from megarl.environments.workers import Worker, WorkerLost, Workers
from megarl.types import Prompt


class SessionPool:
    """Runs the sessions of a recipe in `config.num_workers` worker processes."""

    def __init__(
        self, config: EnvironmentConfig, codec: Codec | None, known: Sources | None = None
    ) -> None:
        """Raises `ValueError` if a file of the user's is missing. `codec` is required for
        everything but `start`. `known`: see `UserFiles`.
        """
        self._config = config
        self._workers = Workers(config, codec, known, config.num_workers)
        self._homes: dict[str, Worker] = {}
        """{key of a rollout: the process that runs its session}."""
        self.tools: list[dict[str, Any]] = []
        """The recipe's tools, once a process has started."""

    async def start(self, within_s: float | None = None) -> None:
        """Start a first process and load the session there; raises `ValueError` if it does not load
        within `within_s` seconds.
        """
        self.tools = (await self._workers.at(0, within_s)).tools

    @property
    def sources(self) -> Sources:
        """The user's files as the run first read them, by path."""
        return self._workers.files.sources

    async def begin(self, key: str, prompt: Prompt) -> Outcome:
        """Start the session of rollout `key`. The outcome holds its first observation, which may be
        empty.
        """
        return await self._ask(key, ("observation",), "begin", key, prompt)

    async def step(self, key: str, token_ids: np.ndarray) -> Outcome:
        """Pass the model's response to the session of rollout `key`. The outcome holds an
        observation, an answer or a score.
        """
        ends = ("observation", "answer", "score")
        return await self._ask(key, ends, "step", key, token_ids)

    async def cut_off(self, key: str, token_ids: np.ndarray | None = None) -> Outcome:
        """Discard the session of rollout `key`. `token_ids`: its last response, if it is cut off at
        the token limit; the outcome says where.
        """
        return await self._ask(key, ("finish",), "cut_off", key, token_ids)

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

    async def _ask(self, key: str, ends: tuple[str, ...], command: str, *arguments: Any) -> Outcome:
        found = Outcome.of(await self._reply(key, command, *arguments), *ends)
        if found.observation is not None:
            return found
        return replace(found, warning=self._workers.files.take_warning())

    async def _reply(self, key: str, command: str, *arguments: Any) -> dict[str, Any]:
        """The reply of the process that is responsible for rollout `key`, or {failure, detail}."""
        place = zlib.crc32(key.encode()) % self._config.num_workers
        config = self._config
        limit_s = config.start_limit_s if command == "begin" else config.time_limit_s
        worker, reply = self._homes.get(key), dict[str, Any]()
        try:
            worker = worker or await self._workers.at(place)
            if command == "begin":
                self._homes[key] = worker
                worker.sessions.add(key)
            reply = await worker.ask(command, *arguments, limit_s=limit_s)
        except WorkerLost as lost:
            said = f"the process of the session {lost}"
            reply = {"failure": lost.failure, "detail": said}
        finally:
            ends = command == "cut_off" or (command != "decode" and "observation" not in reply)
            if worker is not None:
                if ends and self._homes.pop(key, None):
                    worker.sessions.discard(key)
                self._workers.settle(worker)
        return reply

    async def close(self) -> None:
        """Kill all processes. May be called twice."""
        await self._workers.close()
