"""What megarl gives to DeepSpeed, vLLM, Ray and NCCL on GPUs, line by line with its reason.

Each file of `golden/` is a recipe on so many GPUs: {setting: [value, reason]}. The values are made
by the functions that a run calls. A change of one is seen here before a GPU sees it. To accept it:
`python tests/unit/test_golden_config.py`, then write the reasons of new lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megarl.apps.launch.launch_plan import Addresses, deal_gpus, make_launch_plan, processes
from megarl.engines.vllm_arguments import engine_arguments
from megarl.settings.config import RunConfig, read
from megarl.settings.rl import longest_request
from megarl.system.console import Options
from megarl.system.placement import engine_bundle
from megarl.system.process_env import RAY_SETTINGS, engine_environment

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden")
AT = Addresses("node0", 6000, 6001, 6002, "/state", "python")

# Those of tools/quickstart_settings.py on an H200.
QUICKSTART = {
    "rollout.placement": "colocated",
    "rollout.max_staleness": "0",
    "rollout.engine.dtype": "bfloat16",
    "rollout.engine.gpu_memory_utilization": "0.3",
    "rollout.engine.compile": "false",
    "training.zero_stage": "2",
    "training.layout.data": "1",
}
CASES: dict[str, tuple[str, dict[str, str], int, int]] = {
    "one_gpu": ("quickstart", QUICKSTART, 1, 1),
    "two_gpus": ("gsm8k", {}, 1, 2),
    "eight_gpus": ("dapo_14b", {}, 1, 8),
    "eight_gpus_apart": ("dapo_14b_apart", {}, 1, 8),
    "two_nodes": ("long_context_64k", {}, 2, 8),
}
"""{file: (recipe, settings, nodes, GPUs of a node)}"""


def flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """("PREFIX.key.key", value) of every leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", value


def made(recipe: str, settings: dict[str, str], nodes: int, gpus: int) -> dict[str, Any]:
    """{setting: value} of a run."""
    from megarl.trainer.zero import deepspeed_config
    from megarl.weights.transports.p2p_group import WATCHDOG_OFF

    path = ROOT / "launch" / "recipes" / f"{recipe}.yaml"
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    config = read(RunConfig, path, words)
    options = Options(recipe=str(path), overrides=tuple(words))
    plan = make_launch_plan(config, options)
    found = dict(flat(deepspeed_config(config.training, ranks_of_zero(plan)), "deepspeed"))
    engine = config.rollout.engine
    arguments = engine_arguments(
        engine,
        model="MODEL",
        max_tokens=longest_request(config),
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed,
        on_cpu=False,
    )
    found |= flat(arguments, "vllm")
    threads, cache = engine.num_threads, engine.kv_cache_gib
    environment = engine_environment(on_cpu=False, num_threads=threads, kv_cache_gib=cache)
    found |= flat(environment, "engine environment")
    found |= flat(RAY_SETTINGS, "ray environment")
    if not plan.colocated:
        bundle, asked = engine_bundle(plan.tensor, gpus=True)
        found |= {"ray bundle of an engine": bundle, "ray actor of an engine": asked}
    dealt = deal_gpus(plan, [[str(gpu) for gpu in range(gpus)]] * nodes, "")
    for process in processes(plan, dealt, options, AT):
        name = f"{process.kind} on node {process.node}"
        found[name] = " ".join(process.command.words).replace(f"{path.parent}{os.sep}", "")
        own = process.command.environment
        found |= flat({k: own[k] for k in own if k not in RAY_SETTINGS}, f"{name}, environment")
    if config.weight_sync.transport == "point_to_point":
        found |= flat(WATCHDOG_OFF, "nccl group of weights, environment")
    return found


def ranks_of_zero(plan: Any) -> int:
    """Ranks that DeepSpeed divides over: data x sequence of the policy."""
    layout = plan.roles["policy"].layout
    return layout.data * layout.sequence


def kept(name: str) -> dict[str, Any]:
    """{setting: [value, reason]} of a file; empty if there is none."""
    path = GOLDEN / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.parametrize("name", CASES)
def test_what_is_given_is_what_is_written(name: str) -> None:
    lines = kept(name)
    found = json.loads(json.dumps(made(*CASES[name])))
    wanted = {setting: value for setting, (value, _) in lines.items()}
    assert found == wanted, "see the module's docstring"
    assert [setting for setting, (_, reason) in lines.items() if len(reason) <= 10] == []


def test_vllm_reads_what_engines_are_given() -> None:
    """A variable that a new version of vLLM no longer knows would be ignored."""
    from vllm.envs import environment_variables

    given = engine_environment(on_cpu=False, num_threads=1, kv_cache_gib=1)
    assert {name for name in given if name.startswith("VLLM_")} <= environment_variables.keys()


if __name__ == "__main__":
    for file, case in CASES.items():  # written anew, with the reasons that there are
        reasons = {setting: reason for setting, (_, reason) in kept(file).items()}
        lines = [
            f" {json.dumps(setting)}: {json.dumps([value, reasons.get(setting, '')])}"
            for setting, value in made(*case).items()
        ]
        (GOLDEN / f"{file}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
