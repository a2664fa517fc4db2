"""The commands behind the command line: check, build, run, report."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megarl import loop, sft
from megarl.cli import UserError
from megarl.cluster import Cluster, RolloutClient
from megarl.config import RunConfig, SftConfig
from megarl.observe.report import write_report
from megarl.observe.summary import summary
from megarl.parallel import mesh
from megarl.parts import build, service_builder, start_engines
from megarl.preflight import check_run, check_sft
from megarl.schema import require
from megarl.third_party import own_cluster_token


def train(config: RunConfig, *, only_check: bool) -> int:
    """Reinforcement learning; rank 0 prints one JSON object as the last line."""
    begun = time.monotonic()
    try:
        checked = check_run(config, num_ranks=mesh.num_ranks(), on_cpu=mesh.local_device().type == "cpu")
    except ValueError as error:
        raise UserError(str(error)) from error
    if only_check:
        print(f"checked: {checked.layout}, {len(checked.prompts or ())} prompts", file=sys.stderr)
        return 0
    with build(config, checked) as parts:
        loop.run(parts)
        main = parts.observer is not None
    if main:
        folder = Path(config.folder)
        write_report(folder, title=folder.name)
        print(json.dumps(summary(folder) | {"seed": config.seed, "run_s": round(time.monotonic() - begun, 1)}), flush=True)
    return 0


def fine_tune(config: SftConfig, *, only_check: bool) -> int:
    """Supervised fine-tuning."""
    try:
        checked = check_sft(config, num_ranks=mesh.num_ranks())
    except ValueError as error:
        raise UserError(str(error)) from error
    if only_check:
        print(f"checked: {checked.layout}, {len(checked.demonstrations or ())} demonstrations", file=sys.stderr)
        return 0
    sft.run(config, checked)
    return 0


def evaluate(config: RunConfig, *, only_check: bool) -> int:
    """The recipe's held-out problems, answered by `model.path` as it is; prints one JSON object."""
    on_cpu = mesh.local_device().type == "cpu"
    try:
        require(mesh.num_ranks() == 1, f"megarl eval runs as one process, but was started as {mesh.num_ranks()} ranks")
        require(bool(config.evaluation.prompts.source), "evaluation.prompts.source is empty; set it to held-out problems")
        checked = check_run(replace(config, resume=True), num_ranks=1, on_cpu=on_cpu)
    except ValueError as error:
        raise UserError(str(error)) from error
    if only_check:
        return 0
    with Cluster(namespace=f"megarl-{os.getpid()}", token=own_cluster_token()) as cluster:
        engines = start_engines(cluster, config, checked, on_cpu=on_cpu, load=True)
        engines.wait()
        cluster.start_service(service_builder(config, checked, engines, 0, 0))
        client = RolloutClient(0, deadline_s=config.rollout.request_timeout_s)
        held_out = list(checked.held_out or ())
        metrics, _ = client.evaluate(held_out, config.evaluation.temperature, "eval")
    print(json.dumps({"model": config.model.path, **metrics, "seed": config.seed}), flush=True)
    return 0


RUNS: dict[str, Callable[..., int]] = {"train": train, "sft": fine_tune, "eval": evaluate}
