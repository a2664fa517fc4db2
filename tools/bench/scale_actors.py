"""The simulated engines, environment and ranks of tools/bench/simulate_scale.py, and the real
service that works with them.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from megarl.engines.channel import Channel, ChannelActor
from megarl.engines.interface import Pulse
from megarl.engines.remote import GenerateRequest, RemoteEngine
from megarl.ledger.recorder import Recorder
from megarl.rollout.batch import shares
from megarl.rollout.client import POLL_SHARE, PROGRESS_POLL_S, SERVICE
from megarl.rollout.stored_arrays import stored
from megarl.settings.rollout import DynamicSamplingConfig, RolloutConfig
from megarl.system.private_folder import MARK
from megarl.types import Prompt, Segment, TokenArrays, Verdict

SILENCE_S = 1800.0
"""Seconds without progress after which a simulated rank would end the run."""

STEPS = 2
"""Steps that are simulated; the last one is measured."""
PROMPT_TOKENS = 256
HEARTBEAT_S = 0.02


class SimulatedPrompts:
    """Prompts of random tokens."""

    def __len__(self) -> int:
        return 1_000_000

    def at(self, ordinal: int) -> Prompt:
        token_ids = np.random.default_rng(ordinal).integers(3, 32_000, PROMPT_TOKENS).tolist()
        return Prompt(ordinal, "text " * PROMPT_TOKENS, token_ids, "an answer", {"row": ordinal})


class SimulatedEngine(ChannelActor):
    """Answers each request, after a random time, as if it had generated tokens."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps, self.requests, self.version = seconds, 0, 0, 0

    async def pulse(self) -> Pulse:
        return Pulse(self.steps, 0, 0, 0, self.requests, is_paused=False, is_dead=False)

    async def serve(self, request: GenerateRequest) -> Segment:
        share = min(1.0, float(np.exp(np.random.default_rng(request.seed).normal())) / 16)
        self.requests += 1
        await asyncio.sleep(share * self.seconds)
        self.requests, self.steps = self.requests - 1, self.steps + 1
        length = max(1, int(share * request.max_tokens))
        arrays = TokenArrays(np.zeros(length, np.int32), np.zeros(length, np.float32))
        return Segment("model", length, arrays, [(self.version, length)], "stop")


class SimulatedEnvironment:
    """Scores each response at once."""

    has_start = False

    async def start(self) -> None:
        pass

    async def step(self, key: str, prompt: Prompt, segment: Segment, *, num_tokens: int) -> Verdict:
        return Verdict(float(num_tokens % 2), True)

    async def texts(self, segments: Sequence[Segment]) -> list[str]:
        return ["a response"] * len(segments)

    async def close(self) -> None:
        pass


class Fleet:
    """Actor of many simulated engines."""

    def __init__(self, count: int, seconds: float) -> None:
        self._members = [SimulatedEngine(seconds) for _ in range(count)]

    async def call(self, member: int, name: str, *arguments: Any) -> Any:
        return await getattr(self._members[member], name)(*arguments)

    async def load(self, version: int) -> None:
        for member in self._members:
            member.version = version


class Member:
    """One member of a fleet, called as if it were an actor of its own."""

    def __init__(self, fleet: Any, number: int) -> None:
        for name in ("attach", "pulse"):
            setattr(self, name, SimpleNamespace(remote=partial(fleet.call.remote, number, name)))


class Ranks:
    """Actor of all simulated ranks."""

    async def step(self, step: int, count: int, fleets: list[Any]) -> dict[str, float]:
        """Every rank releases the step before, whose weights the engines have, and takes its share
        of this one.
        """
        service, started_at = ray.get_actor(SERVICE), time.monotonic()
        self.asked = 0
        await asyncio.gather(*(one.load.remote(step) for one in fleets))
        await asyncio.gather(*(service.release.remote(step) for _ in range(count if step else 0)))
        plans = await asyncio.gather(*(self._take(service, step, rank) for rank in range(count)))
        return {
            "samples": sum(len(part) for plan in plans for part in plan.parts),
            "step_s": time.monotonic() - started_at,
            "asked": self.asked,
        }

    async def _take(self, service: Any, step: int, rank: int) -> Any:
        """As a rank that waits: it asks now and then whether there is progress."""
        taken = asyncio.ensure_future(service.take.remote(step, rank))
        every_s = max(PROGRESS_POLL_S, POLL_SHARE * SILENCE_S if rank else 0.0)
        while not (await asyncio.wait([taken], timeout=every_s))[0]:
            self.asked += 1
            await service.silent_s.remote()
        return taken.result()


async def heartbeat(file: Path) -> None:
    """Keep in `file` the longest times in milliseconds that the event loop was blocked: by the
    clock, which counts what other processes of the machine take, and in CPU time of its thread.
    """
    blocked, busy, beats = 0.0, 0.0, 0
    file.write_text(json.dumps({"pid": os.getpid()}))
    while True:
        started_at, cpu_before = time.monotonic(), time.thread_time()
        await asyncio.sleep(HEARTBEAT_S)
        late, cpu = time.monotonic() - started_at - HEARTBEAT_S, time.thread_time() - cpu_before
        blocked, busy, beats = max(blocked, late), max(busy, cpu), beats + 1
        if beats % 25 == 0:
            if not file.exists():  # whoever removes it wants to begin anew
                blocked, busy = 0.0, 0.0
            found = {"pid": os.getpid(), "blocked_ms": blocked * 1000, "busy_ms": busy * 1000}
            file.write_text(json.dumps(found))


def build(scale: Namespace, fleets: list[Any], folder: Path) -> dict[str, Any]:
    """The service's arguments, made in its process, which also begins to time its event loop."""
    channel = Channel(os.environ[MARK])
    members = [Member(fleets[n % len(fleets)], n // len(fleets)) for n in range(scale.engines)]
    config = RolloutConfig(
        groups_per_step=scale.samples // scale.group_size,
        group_size=scale.group_size,
        max_new_tokens=scale.tokens,
        dynamic_sampling=DynamicSamplingConfig(enabled=False),
    )
    environment: Any = SimulatedEnvironment()
    beat = heartbeat(folder / "heartbeat.json")
    environment.beat = asyncio.get_running_loop().create_task(beat)
    return dict(
        config=SimpleNamespace(
            rollout=config,
            seed=0,
            steps=STEPS,
            group_filter="all",
            greedy_baseline=False,
            algorithm=SimpleNamespace(truncated="train"),
            environment=SimpleNamespace(max_turns=0, max_failure_share=1.0),
        ),
        prompts=SimulatedPrompts(),
        engines=[RemoteEngine(one, channel, number=n) for n, one in enumerate(members)],
        environment=environment,
        num_data_ranks=scale.ranks,
        deal=partial(
            shares,
            num_data_ranks=scale.ranks,
            num_mini_batches=1,
            micro_batch_tokens=2 * scale.tokens,
            transcripts=2,
        ),
        ledger=Recorder(folder / "ledger.jsonl"),
        keep=stored,
    )
