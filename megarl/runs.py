"""The commands behind the command line: check, build, run, report."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megarl import loop, sft
from megarl.cli import UserError
from megarl.config import RunConfig, SftConfig
from megarl.observe.report import write_report
from megarl.observe.summary import summary
from megarl.parallel import mesh
from megarl.parts import build
from megarl.preflight import check_run, check_sft


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


RUNS: dict[str, Callable[..., int]] = {"train": train, "sft": fine_tune}
