"""What a step costs the rollout service's process: CPU seconds, peak memory, blocked event loop.

    python tools/bench/service.py --samples 1024 --tokens 16384 --ranks 8 --runs 3 [--json out.json]

Everything is real but the engines, which return random tokens after a random delay, and the ranks,
which take their share and drop it: Ray, the service, the environment with its worker processes
(which decode each response), the object store. CPU and memory are read from outside the service's
process; the event loop is timed by a task inside it that should wake every 20 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from megarl.cluster.inbox import Inbox
from megarl.cluster.mailbox import Pace
from megarl.cluster.process_env import own_cluster_token
from megarl.cluster.ray_cluster import Cluster
from megarl.cluster.remote import GenerateRequest, RemoteEngine
from megarl.cluster.remote_environment import RemoteEnvironment
from megarl.cluster.rollout_client import RolloutClient
from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.rollout.config import DynamicSamplingConfig, RolloutConfig
from megarl.rollout.service import RolloutService
from megarl.types import Prompt, Segment, TokenArrays

WORDS = 32_000
HEARTBEAT_S = 0.02
COLUMNS = ("cpu_s", "memory_mib", "blocked_ms", "busy_ms", "step_s", "environment_cpu_s")


@dataclass(frozen=True)
class Case:
    """The simulated step."""

    samples: int
    group_size: int
    tokens: int
    prompt_tokens: int
    ranks: int
    engines: int
    workers: int
    delay_s: float


class SimulatedEngine(Inbox):
    """Answers each request with random tokens after a random delay."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    async def serve(self, request: GenerateRequest, arrays: list[TokenArrays]) -> Segment:
        draw = np.random.default_rng(request.seed)
        await asyncio.sleep(draw.random() * self._delay_s)
        length = request.max_tokens
        made = TokenArrays(
            draw.integers(3, WORDS, length, dtype=np.int32),
            -draw.random(length, dtype=np.float32),
        )
        return Segment("model", length, made, [(0, length)], "stop")


class SimulatedPrompts:
    """Prompts of random tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def __len__(self) -> int:
        return 1_000_000

    def at(self, ordinal: int) -> Prompt:
        token_ids = np.random.default_rng(ordinal).integers(3, WORDS, self._num_tokens).tolist()
        return Prompt(ordinal, "text " * self._num_tokens, token_ids, "an answer", {"row": ordinal})


def _again() -> None:
    raise AssertionError("no engine is replaced here")


class Rank:
    """A trainer rank that takes its share of the step and drops it."""

    def __init__(self, data_rank: int) -> None:
        self._client = RolloutClient(data_rank, silence_s=600.0)

    def take(self) -> int:
        """Number of tokens received."""
        batch = self._client.take(0, _again)
        assert batch is not None
        return sum(len(part.token_ids) for part in batch.samples)


def tokenizer() -> Any:
    """A tokenizer of `WORDS` words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{n}": n for n in range(3, WORDS)}
    made = Tokenizer(models.WordLevel(words, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, **{f"{name}_token": f"<{name}>" for name in ("pad", "eos", "unk")}
    )


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


def build(case: Case, handles: list[Any], beat: Path) -> tuple[RolloutService, RemoteEnvironment]:
    """The service, made inside its process, which also begins to time its event loop."""
    pace = Pace()
    settings = EnvironmentConfig(num_workers=case.workers)
    environment = RemoteEnvironment(settings, Codec.of(tokenizer()), pace)
    service = RolloutService(
        config=RolloutConfig(
            groups_per_step=case.samples // case.group_size,
            group_size=case.group_size,
            max_new_tokens=case.tokens,
            dynamic_sampling=DynamicSamplingConfig(enabled=False),
        ),
        seed=0,
        prompts=SimulatedPrompts(case.prompt_tokens),
        engines=[RemoteEngine(handle, pace) for handle in handles],
        environment=environment,
        num_data_ranks=case.ranks,
        num_mini_batches=1,
        micro_batch_tokens=2 * case.tokens,
        last_step=0,
        transcripts_per_step=2,
    )
    service.__dict__["heartbeat"] = asyncio.get_running_loop().create_task(heartbeat(beat))
    return service, environment


class PeakMemory(threading.Thread):
    """Samples a process's resident memory every 20 ms."""

    def __init__(self, process: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._process, self._stopped = process, threading.Event()
        self.base = self.peak = process.memory_info().rss

    def run(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not self._stopped.wait(0.02):
                self.peak = max(self.peak, self._process.memory_info().rss)

    def stop(self) -> float:
        """MiB above the memory at the start."""
        self._stopped.set()
        self.join()
        return (self.peak - self.base) / 2**20


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and those below it."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        times = one.cpu_times()
        total += times.user + times.system
    return total


def find(title: str) -> psutil.Process:
    """The process below this one whose title begins with `title`."""
    for process in psutil.Process().children(recursive=True):
        words = process.cmdline()[:1]
        if words and words[0].startswith(title):
            return process
    raise RuntimeError(f"there is no process {title}")


def run(case: Case, engine: type, make: Callable[..., Any]) -> dict[str, float]:
    """One step in a fresh Ray cluster: its cost to the service's process."""
    beat = Path(tempfile.mkdtemp()) / "heartbeat.json"
    with Cluster(namespace=f"bench-{os.getpid()}", token=own_cluster_token()) as cluster:
        options = {"max_concurrency": 100_000, "num_cpus": 0}
        handles = [
            ray.remote(engine).options(**options).remote(case.delay_s) for _ in range(case.engines)
        ]
        cluster.start_service(partial(make, case, handles, beat), held_out=[])
        cluster.wait_for_service(120)
        ranks = [ray.remote(Rank).options(num_cpus=0).remote(rank) for rank in range(case.ranks)]
        ray.get([rank.__ray_ready__.remote() for rank in ranks])
        time.sleep(1.0)
        service = psutil.Process(json.loads(beat.read_text())["pid"])
        beside = find("ray::EnvironmentActor") if make is build else None
        beat.unlink()
        time.sleep(1.0)
        memory = PeakMemory(service)
        memory.start()
        before, before_beside = cpu_s(service), cpu_s(beside) if beside else 0.0
        started_at = time.monotonic()
        client = RolloutClient(0, silence_s=600.0)
        client.start()
        received = sum(ray.get([rank.take.remote() for rank in ranks], timeout=600))
        step_s = time.monotonic() - started_at
        client.release(0)
        time.sleep(1.0)
        found = json.loads(beat.read_text())
        assert received == case.samples * (case.tokens + case.prompt_tokens)
        return {
            "cpu_s": cpu_s(service) - before,
            "memory_mib": memory.stop(),
            "blocked_ms": found["blocked_ms"],
            "busy_ms": found["busy_ms"],
            "step_s": step_s,
            "environment_cpu_s": cpu_s(beside) - before_beside if beside else 0.0,
        }


def table(runs: list[dict[str, float]]) -> str:
    """The runs, their mean and standard deviation."""
    lines = ["".join(f"{name:>18}" for name in ("", *COLUMNS))]
    for number, one in enumerate(runs):
        lines.append(f"{f'run {number + 1}':>18}" + "".join(f"{one[c]:>18.2f}" for c in COLUMNS))
    for name, of in (("mean", statistics.fmean), ("deviation", statistics.pstdev)):
        values = [of([one[column] for one in runs]) for column in COLUMNS]
        lines.append(f"{name:>18}" + "".join(f"{value:>18.2f}" for value in values))
    return "\n".join(lines)


def parse(arguments: list[str]) -> tuple[Case, int, str]:
    """(case, number of runs, where the JSON object goes)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {
        "samples": 1024,
        "group-size": 16,
        "tokens": 16384,
        "prompt-tokens": 256,
        "ranks": 8,
        "engines": 4,
        "workers": 1,
        "runs": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--delay", type=float, default=2.0, help="engines answer within, seconds")
    parser.add_argument("--json", default="", help="file for the result as one JSON object")
    found = parser.parse_args(arguments)
    case = Case(
        samples=found.samples,
        group_size=found.group_size,
        tokens=found.tokens,
        prompt_tokens=found.prompt_tokens,
        ranks=found.ranks,
        engines=found.engines,
        workers=found.workers,
        delay_s=found.delay,
    )
    return case, found.runs, found.json


def main() -> None:
    case, count, file = parse(sys.argv[1:])
    runs = [run(case, SimulatedEngine, build) for _ in range(count)]
    print(case)
    print(table(runs))
    if file:
        Path(file).write_text(json.dumps({"case": vars(case), "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
