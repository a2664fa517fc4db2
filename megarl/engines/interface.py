"""The interface of an inference engine, and what tells its pauses. vLLM's engine is
`megarl.engines.vllm_engine.Engine`; another one is a class in a file of your own, which a recipe
names as `rollout.engine.kind: my_engine.py:MyEngine`.

An engine is made in a process of its own, a Ray actor, and all its methods run in one event loop
there, where they may run at the same time. Token ids in, token ids and their log-probs out.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.types import Segment

MOST_PAUSES = 4096
"""Number of ended pauses that an engine remembers."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """An engine's sign of life, which it gives about once a second when asked: counts of its steps,
    tokens and requests, and whether it is paused or dead.
    """

    steps: int
    """Engine steps so far. A step computes the next token of every running request, or a part of
    the prompts. An engine that has requests and makes none is taken for hung."""
    tokens: int
    """Tokens generated so far."""
    prompt_tokens: int
    """Tokens of the prompts of all answered requests, earlier turns included."""
    cached_tokens: int
    """How many of `prompt_tokens` were in the prefix cache, so that they were not computed."""
    requests: int
    """Requests that are not yet answered."""
    is_paused: bool
    """Whether generation is paused on purpose: new weights arrive, or the engine sleeps."""
    is_dead: bool
    """Whether one of the engine's processes has died."""
    preemptions: int = 0
    """Times that a running request was pushed out of a full key-value cache so far, so that its
    cache is computed again; those of new weights do not count."""


class InferenceEngine(Protocol):
    """Interface of an inference engine, which generates responses, scores tokens, and receives the
    trainer's weights. The setting `rollout.engine.kind` names a class with these methods. The class
    is called with keyword arguments only, those of `megarl.engines.vllm_engine.Engine`: number,
    model, config, max_tokens and others.
    """

    async def start(self) -> None:
        """Load the model and return when it is ready. If the engine was constructed with
        `load=True`, the weights must be those on disk. Otherwise they may have any values, since
        the trainer sends version 0 before generation.
        """
        ...

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        seed: int,
        max_tokens: int,
        temperature: float,
        stop: tuple[str, ...] = (),
    ) -> Segment:
        """Sample one response of at most `max_tokens` tokens, which `seed` decides; `temperature` 0
        is greedy. `stop`: texts at which the response ends, the text included; given only where an
        agent's call asks for some. Returns a segment of kind "model" with token ids and their
        log-probs at `temperature`; its `versions` say which weight versions have generated how many
        of the tokens.
        """
        ...

    async def score(self, token_ids: list[int], adapted: bool = True) -> list[float]:
        """Log-probs of `token_ids[1:]`, each given the tokens before it, at temperature 1, by the
        present weights; with `adapted` False without LoRA adapters. After new weights were sent,
        the trainer compares these log-probs with its own.
        """
        ...

    async def connect(self, info: dict[str, Any]) -> None:
        """Connect to the trainer, which will send weights. `info`: a dict with "transport" (its
        name), "spec" (the fields of a `RouteSpec`, by which both sides plan the transfer), "engine"
        (the engine's position among those that receive), "init_info" (what the transport's sender
        says, such as addresses), and "table" (the model's parameter table as JSON text).
        Raises `RuntimeError` if weights cannot be received.
        """
        ...

    async def update(self, version: int, timeout_s: float) -> list[dict[str, Any]]:
        """Receive the weights of `version` in at most `timeout_s` seconds, while open requests
        wait and then go on with the new weights. Returns for each of the engine's ranks {"version":
        that it has, "digests": [int64 for each tensor], "seconds": {part: s}, "problem": error
        message or ""}.
        """
        ...

    async def load_adapter(self, version: int, files: dict[str, bytes]) -> dict[str, Any]:
        """Load LoRA adapters as the weights of `version`. `files`: {file name: content} in PEFT's
        format. Returns {"version": the same, "receipt": digest of the files by
        `megarl.weights.weight_receipts.receipt_of_adapter`}. Called for
        `training.lora.publish: adapter` only.
        """
        ...

    async def pulse(self) -> Pulse:
        """Return the engine's sign of life: counts of its steps, tokens and open requests so far,
        and whether it is paused or dead. Called about once a second.
        """
        ...

    async def paused_s(self, last_s: float) -> float:
        """Return how many of the last `last_s` seconds the engine did not generate because it was
        told to pause: while it received weights, or slept. These seconds do not count towards the
        deadline of a request.
        """
        ...

    async def sleep(self) -> None:
        """Free the memory of a GPU that a colocated trainer shares, and return when that is done.
        Open requests wait.
        """
        ...

    async def wake(self) -> None:
        """Allocate the memory that `sleep` has freed again. The weights' values come with the next
        `update`, for which requests wait.
        """
        ...

    async def stop(self) -> None:
        """End the engine's processes; called once, at the end of the run."""
        ...


class Pauses:
    """When an engine's generation was paused on purpose: the intervals of pauses so far. Times are
    those of the calls, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float]] = deque(maxlen=MOST_PAUSES)
        """(begin, end) of each pause, by `time.monotonic`."""
        self._began: float | None = None
        """Begin of the present pause; None if there is none."""

    @property
    def is_paused(self) -> bool:
        """Whether the engine's generation is paused now."""
        return self._began is not None

    def begin(self) -> None:
        """Note that the engine's generation pauses now; in a pause the call changes nothing."""
        if self._began is None:
            self._began = time.monotonic()

    def end(self) -> None:
        """Note that the engine's generation goes on now; outside of a pause the call changes
        nothing.
        """
        if self._began is not None:
            self._ended.append((self._began, time.monotonic()))
            self._began = None

    def had(self, at: float) -> bool:
        """Whether generation was paused at the time `at`, by `time.monotonic`."""
        if self._began is not None and at >= self._began:
            return True
        begins = (began for began, ended in reversed(self._ended) if ended >= at)
        return any(began <= at for began in begins)

    def within(self, last_s: float) -> float:
        """For how many of the last `last_s` seconds the engine's generation was paused."""
        now = time.monotonic()
        since = now - last_s
        found = now - max(self._began, since) if self._began is not None else 0.0
        for began, ended in reversed(self._ended):
            if ended <= since:
                break
            found += ended - max(began, since)
        return found
