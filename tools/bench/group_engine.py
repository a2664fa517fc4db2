"""What it saves that the requests of a group go to one engine, whose cache has their
prompt.

    python tools/bench/group_engine.py [--cases 512:8x64,512:8x256] [--groups 32] [--engines 2]
        [--rounds 3] [--steps 2] [--json]

A case is `prompt tokens : samples of a group x mean response tokens`. A step sends the requests of
all groups at once, and ends with the last answer. Responses have the lengths of a log-normal
distribution (deviation of the logarithm 0.8), cut off at four times the mean: the model has no
end-of-sequence token, so each response has exactly the length that it is given. Prompts are random,
and new in every step. Real engines in Ray, and the code of the rollout service that chooses an
engine (`megarl.rollout.requests.EnginePool`); two ways, in turns:

    group      as megarl does it
    load       each request goes to the engine with the fewest open requests
    prompts    prompt tokens that the engines compute, for each token of a prompt: 1 if every prompt
               is computed once, the size of a group if it is computed for every response

vLLM's cache holds whole blocks, of 32 tokens on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import group_shape, run_tool, spread, table
from e2e_task import write_task
from kv_slots import response_lengths

VOCABULARY, CAP, TIMEOUT_S = 1024, 4, 600.0
WAYS = ("group", "load")
OPTIONS = {
    "--cases": (
        "512:8x64,512:8x256",
        "prompt tokens : samples of a group x mean response tokens, separated by commas",
        lambda text: [group_shape(one) for one in text.split(",")],
    ),
    "--groups": (32, "groups of a step"),
    "--engines": (2, "engines, of one thread each"),
    "--rounds": (3, "turns of each way"),
    "--steps": (2, "steps of a turn"),
}


def requests(case: tuple[int, int, int], groups: int, step: int, way: str) -> list[Any]:
    """[(prompt, most response tokens)] of one step, group by group. For `way` "load" each request
    is a group of its own to the pool, and so goes by load alone.
    """
    from megarl.types import Prompt

    prompt_tokens, samples, mean = case
    draw = random.Random(f"{case} {step}")
    lengths = response_lengths(mean, CAP * mean, groups * samples, step)
    found = []
    for number in range(groups):
        ids = [draw.randrange(2, VOCABULARY) for _ in range(prompt_tokens)]
        for sample in range(samples):
            index = number if way == "group" else number * samples + sample
            found.append((Prompt(index, "", ids, ""), lengths[number * samples + sample]))
    return found


async def run_step(pool: Any, asked: list[Any]) -> None:
    """Send all requests of a step, and wait for the last answer."""
    from megarl.rollout.requests import Route

    async def answer(seed: int) -> None:
        prompt, most = asked[seed]
        ids = np.array(prompt.token_ids, dtype=np.int32)
        segment = await pool.generate(
            prompt, ids, [], seed=seed, max_tokens=most, temperature=1.0, route=Route()
        )
        assert segment.num_tokens == most, (segment, most)

    await asyncio.gather(*(answer(seed) for seed in range(len(asked))))


def write_endless_model(folder: Path) -> None:
    """`folder`/model: the model of `write_task`, which never ends a response."""
    write_task(folder, VOCABULARY)
    (folder / "model" / "generation_config.json").unlink()
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))


def measure_case(handles: list[Any], case: tuple[int, int, int], args: Any) -> dict[str, Any]:
    """{way: {"prompts": values of all counted steps}} of one case."""
    import ray

    from megarl.cluster.mailbox import Pace
    from megarl.cluster.remote import RemoteEngine
    from megarl.rollout.config import RolloutConfig
    from megarl.rollout.requests import EnginePool

    config = RolloutConfig(
        num_engines=args.engines, group_size=case[1], request_timeout_s=TIMEOUT_S
    )
    found: dict[str, list[float]] = {way: [] for way in WAYS}

    def computed() -> int:
        pulses = ray.get([handle.pulse.remote() for handle in handles], timeout=TIMEOUT_S)
        return sum(pulse.prompt_tokens - pulse.cached_tokens for pulse in pulses)

    async def run() -> None:
        pace = Pace()
        engines = [RemoteEngine(handle, pace, number=n) for n, handle in enumerate(handles)]
        pool, step = EnginePool(engines, config), 0
        for turn in range(-1, args.rounds):  # the turn -1 is not counted
            for way in WAYS:
                for _ in range(args.steps):
                    step, before = step + 1, computed()
                    await run_step(pool, requests(case, args.groups, step, way))
                    if turn >= 0:
                        found[way].append((computed() - before) / (args.groups * case[0]))

    asyncio.run(run())
    return {way: {"prompts": spread(values)} for way, values in found.items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The measurements of all cases, on the same engines."""
    from megarl.cluster.process_env import (
        engine_environment,
        own_cluster_token,
        prepare_environment,
    )

    prepare_environment(1)  # before Ray is imported, which reads its settings then
    from megarl.cluster.placement import own_seats
    from megarl.cluster.ray_cluster import Cluster
    from megarl.rollout.config import EngineConfig

    cases = {f"{p}:{g}x{r}": (p, g, r) for p, g, r in args.cases}
    with (
        contextlib.redirect_stdout(sys.stderr),  # Ray prints there what the engines print
        tempfile.TemporaryDirectory() as folder,
        Cluster(namespace=f"bench-{os.getpid()}", token=own_cluster_token()) as cluster,
    ):
        write_endless_model(Path(folder))
        engines = cluster.start_engines(
            own_seats(args.engines, tensor=1, gpus=False, timeout_s=60),
            timeout_s=TIMEOUT_S,
            load=True,
            model=f"{folder}/model",
            config=EngineConfig(),
            max_tokens=max(prompt + CAP * mean for prompt, _, mean in args.cases),
            stop_token_ids=[],
            trust_remote_code=False,
            seed=0,
            environment=engine_environment(on_cpu=True, num_threads=1, kv_cache_gib=1),
        )
        engines.wait()
        found = {name: measure_case(engines.handles, case, args) for name, case in cases.items()}
    return {"cases": found}


def show(result: dict[str, Any]) -> Iterator[str]:
    """Lines of a table."""
    rows = (
        {"case": case, "way": way, **row}
        for case, ways in result["cases"].items()
        for way, row in ways.items()
    )
    yield from table(rows, "case; way; prompts .2f")


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
