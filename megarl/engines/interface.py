"""The interface of an inference engine. `vllm_engine.Engine` is vLLM's; name your own class as
`rollout.engine.kind: my_engine.py:MyEngine`.

An engine lives in a Ray actor of its own. Its methods run in one event loop, perhaps at the same
time. Token ids in, token ids and log-probs out.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.types import Segment

MOST_PAUSES = 4096
"""Ended pauses that an engine remembers."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """An engine's sign of life."""

    steps: int
    """Engine steps so far; an engine with requests that makes none is taken for hung."""
    tokens: int
    """Generated so far."""
    prompt_tokens: int
    """Of all answered requests, earlier turns included."""
    cached_tokens: int
    """Those of `prompt_tokens` that were in the prefix cache."""
    requests: int
    """Not yet answered."""
    is_paused: bool
    """On purpose: weights arrive, or the engine sleeps."""
    is_dead: bool
    """Whether one of its processes has died."""
    preemptions: int = 0
    """Requests pushed out of a full key-value cache so far, not by new weights."""


class InferenceEngine(Protocol):
    """Generates, scores tokens and receives weights. The class is called with the keyword arguments
    of `vllm_engine.Engine`.
    """

    async def start(self) -> None:
        """Load the model. Unless it was made with `load=True`, weights may have any values."""
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
        """Sample one response of at most `max_tokens`; temperature 0 is greedy. `stop`: texts that
        end it, part of it; given only where an agent asks for some. Log-probs are at
        `temperature`; `versions` say which weights made which tokens. A class with
        `reports_experts` True also fills `TokenArrays.experts`, if made with `records_experts`.
        """
        ...

    async def score(self, token_ids: list[int], adapted: bool = True) -> list[float]:
        """Log-probs of `token_ids[1:]` at temperature 1; `adapted` False: without LoRA adapters."""
        ...

    async def connect(self, info: dict[str, Any]) -> None:
        """Connect to the trainer. `info`: `weights.bucket_receiver.InitInfo`. Raises `RuntimeError`
        if weights cannot be received.
        """
        ...

    async def update(self, version: int, timeout_s: float) -> list[dict[str, Any]]:
        """Receive weights, while open requests wait and then go on. Returns for each rank
        {"version", "digests", "seconds", "problem"} as `WeightSyncWorker.megarl_weight_status`.
        """
        ...

    async def load_adapter(self, version: int, files: dict[str, bytes]) -> dict[str, Any]:
        """Load LoRA adapters, {file name: content} in PEFT's format. Returns {"version", "receipt"
        by `receipt_of_adapter`}.
        """
        ...

    async def pulse(self) -> Pulse:
        """Called about once a second."""
        ...

    async def paused_s(self, last_s: float) -> float:
        """Of the last `last_s` seconds, those in a pause; they do not count towards a request's
        deadline.
        """
        ...

    async def sleep(self) -> None:
        """Free the GPU memory for a colocated trainer; open requests wait."""
        ...

    async def wake(self) -> None:
        """Allocate the memory again; the next `update` fills it."""
        ...

    async def stop(self) -> None:
        """End the engine's processes, at the end of the run."""
        ...


class Pauses:
    """When generation was paused on purpose, by `time.monotonic`."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float]] = deque(maxlen=MOST_PAUSES)
        """(begin, end) of each pause."""
        self._began: float | None = None
        """Begin of the present pause."""

    @property
    def is_paused(self) -> bool:
        return self._began is not None

    def begin(self) -> None:
        """In a pause it changes nothing."""
        if self._began is None:
            self._began = time.monotonic()

    def end(self) -> None:
        """Outside of a pause it changes nothing."""
        if self._began is not None:
            self._ended.append((self._began, time.monotonic()))
            self._began = None

    def had(self, at: float) -> bool:
        """Whether generation was paused at the time `at`."""
        if self._began is not None and at >= self._began:
            return True
        begins = (began for began, ended in reversed(self._ended) if ended >= at)
        return any(began <= at for began in begins)

    def within(self, last_s: float) -> float:
        """Paused seconds of the last `last_s`."""
        now = time.monotonic()
        since = now - last_s
        paused_s = now - max(self._began, since) if self._began is not None else 0.0
        for began, ended in reversed(self._ended):
            if ended <= since:
                break
            paused_s += ended - max(began, since)
        return paused_s
