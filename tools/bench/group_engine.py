"""What it costs and saves that the requests of a group go to one engine, whose cache has their
prompt.

    python tools/bench/group_engine.py [--cases 512:8x64,512:8x256] [--groups 32] [--engines 2]
        [--rounds 3] [--steps 2] [--json]

A case is `prompt tokens : samples of a group x mean response tokens`. A step sends the requests of
all groups at once, and ends with the last answer. Responses have the lengths of a log-normal
distribution (deviation of the logarithm 0.8), cut off at four times the mean: the model has no
end-of-sequence token, so each response has exactly the length that it is given. Prompts are random,
and new in every step. Real engines in Ray, and the code of the rollout service that chooses an
engine (`megarl.rollout.requests.EnginePool`); three ways, in turns:

    group      as megarl does it
    load       each request goes to the engine with the fewest open requests
    step       seconds of a step
    prompts    prompt tokens that the engines compute, for each token of a prompt: 1 if every prompt
               is computed once, the size of a group if it is computed for every response
    idle       mean share of a step for which an engine waits for the last answer of the others

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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from attention_inputs import group
from common import (
    Others,
    cell,
    command_line,
    require_positive,
    run_tool,
    spread,
    warn_if_not_quiet,
)
from e2e_task import write_task
from kv_slots import response_lengths

VOCABULARY, CAP, TIMEOUT_S = 1024, 4, 600.0
WAYS = ("group", "load")
OPTIONS: dict[str, dict[str, Any]] = {
    "--cases": {
        "type": lambda text: [group(one) for one in text.split(",")],
        "default": [(512, 8, 64), (512, 8, 256)],
        "help": "prompt tokens : samples of a group x mean response tokens, separated by commas",
    },
    "--groups": {"type": int, "default": 32, "help": "groups of a step"},
    "--engines": {"type": int, "default": 2, "help": "engines, of one thread each"},
    "--rounds": {"type": int, "default": 3, "help": "turns of each way"},
    "--steps": {"type": int, "default": 2, "help": "steps of a turn"},
}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    require_positive(parser, args, ["groups", "engines", "rounds", "steps"])
    return args


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


async def run_step(pool: Any, asked: list[Any]) -> tuple[float, float]:
    """(seconds, mean share of idle time of the engines) of one step."""
    from megarl.rollout.requests import Route

    ends = [0.0] * len(pool.engines)
    started_at = time.monotonic()

    async def answer(seed: int) -> None:
        prompt, most = asked[seed]
        route = Route()
        ids = np.array(prompt.token_ids, dtype=np.int32)
        segment = await pool.generate(
            prompt, ids, [], seed=seed, max_tokens=most, temperature=1.0, route=route
        )
        assert segment.num_tokens == most, (segment, most)
        assert route.engine is not None
        ends[route.engine] = time.monotonic() - started_at

    await asyncio.gather(*(answer(seed) for seed in range(len(asked))))
    return max(ends), sum(1 - end / max(ends) for end in ends) / len(ends)


def write_endless_model(folder: Path) -> None:
    """`folder`/model: the model of `write_task`, which never ends a response."""
    write_task(folder, VOCABULARY)
    (folder / "model" / "generation_config.json").unlink()
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))


def measure_case(handles: list[Any], case: tuple[int, int, int], args: Any) -> dict[str, Any]:
    """{way: {"step", "prompts", "idle": values of all counted steps}} of one case."""
    import ray

    from megarl.cluster.mailbox import Pace
    from megarl.cluster.remote import RemoteEngine
    from megarl.rollout.config import RolloutConfig
    from megarl.rollout.requests import EnginePool

    config = RolloutConfig(
        num_engines=args.engines, group_size=case[1], request_timeout_s=TIMEOUT_S
    )
    found: dict[str, dict[str, list[float]]] = {
        way: {"step": [], "prompts": [], "idle": []} for way in WAYS
    }

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
                    asked = requests(case, args.groups, step, way)
                    step_s, idle = await run_step(pool, asked)
                    if turn >= 0:
                        tokens = (computed() - before) / (args.groups * case[0])
                        for name, value in (("step", step_s), ("prompts", tokens), ("idle", idle)):
                            found[way][name].append(value)

    asyncio.run(run())
    return {way: {name: spread(row) for name, row in rows.items()} for way, rows in found.items()}


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
        with Others() as others:
            found = {
                name: measure_case(engines.handles, case, args) for name, case in cases.items()
            }
    return {"cases": found, "others": others.share}


def show(result: dict[str, Any]) -> Iterator[str]:
    """Lines of a table."""
    task = result["task"]
    yield f"{task['groups']} groups a step, {task['engines']} engines; median (smallest to largest)"
    for name, ways in result["cases"].items():
        for way, row in ways.items():
            yield (
                f"  {name:12} {way:6} {cell(row['step'], '.2f')} s   prompts"
                f" {cell(row['prompts'], '.2f')}   idle {cell(row['idle'], '.1%')}"
            )
    yield from warn_if_not_quiet(result["others"])


if __name__ == "__main__":
    sys.exit(run_tool("group_engine", arguments=arguments, measure=measure, show=show))
