"""The commands behind the command line: check, build, run, report.

What is heavy (DeepSpeed, Ray) is imported after the checks, so that a mistake in a recipe is told in a moment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megarl.cli import UserError
from megarl.config import RunConfig, SftConfig, patience_s
from megarl.parallel import mesh
from megarl.preflight import Checked, check_run, check_sft
from megarl.schema import require


def checked(check: Callable[[], Checked]) -> Checked:
    """What `check` returns; what it finds wrong is the user's to mend."""
    try:
        return check()
    except ValueError as error:
        raise UserError(str(error)) from error


def on_cpu() -> bool:
    """Whether this machine has no GPU."""
    return mesh.local_device().type == "cpu"


def train(config: RunConfig, *, only_check: bool) -> int:
    """Reinforcement learning; rank 0 prints one JSON object as the last line."""
    begun = time.monotonic()
    found = checked(lambda: check_run(config, num_ranks=mesh.num_ranks(), on_cpu=on_cpu()))
    if only_check:
        print(f"checked: {found.layout}, {len(found.prompts or ())} prompts", file=sys.stderr)
        return 0
    from megarl import loop, parts
    from megarl.observe.report import write_report
    from megarl.observe.summary import summary

    with parts.build(config, found) as made:
        loop.run(made)
        main = made.observer is not None
    if main:
        folder = Path(config.folder)
        write_report(folder, title=folder.name)
        print(json.dumps(summary(folder) | {"seed": config.seed, "run_s": round(time.monotonic() - begun, 1)}), flush=True)
    return 0


def fine_tune(config: SftConfig, *, only_check: bool) -> int:
    """Supervised fine-tuning."""
    found = checked(lambda: check_sft(config, num_ranks=mesh.num_ranks()))
    if only_check:
        print(f"checked: {found.layout}, {len(found.demonstrations or ())} demonstrations", file=sys.stderr)
        return 0
    from megarl import sft

    sft.run(config, found)
    return 0


def evaluate(config: RunConfig, *, only_check: bool) -> int:
    """The recipe's held-out problems, answered by `model.path` as it is; prints one JSON object."""

    def check() -> Checked:
        require(mesh.num_ranks() == 1, f"megarl eval runs as one process, but was started as {mesh.num_ranks()} ranks")
        require(bool(config.evaluation.prompts.source), "evaluation.prompts.source is empty; set it to held-out problems")
        return check_run(config, num_ranks=1, on_cpu=on_cpu(), new=False)

    found = checked(check)
    if only_check:
        return 0
    from megarl import parts
    from megarl.cluster import Cluster, RolloutClient
    from megarl.third_party import own_cluster_token

    with Cluster(namespace=f"megarl-{os.getpid()}", token=own_cluster_token()) as cluster:
        engines = parts.start_engines(cluster, config, found, on_cpu=on_cpu(), load=True)
        engines.wait()
        builder = parts.service_builder(config, found, engines, 0, 0)
        cluster.start_service(builder, timeout_s=config.rollout.engine.start_timeout_s)
        held_out = list(found.held_out or ())
        client = RolloutClient(0, deadline_s=patience_s(config, len(held_out)))
        metrics, _ = client.evaluate(held_out, config.evaluation.temperature, "eval")
    print(json.dumps({"model": config.model.path, **metrics, "seed": config.seed}), flush=True)
    return 0


RUNS: dict[str, Callable[..., int]] = {"train": train, "sft": fine_tune, "eval": evaluate}
