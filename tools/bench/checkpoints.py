"""What a checkpoint costs: the time of a training step alone, of a step and a checkpoint that is
written before training goes on, and of a step during which the checkpoint before it is written.

    python tools/bench/checkpoints.py [--ranks 1,2] [--hidden 512] [--tokens 4096] [--rounds 8]

A Qwen2 with random weights trains on data-parallel ranks under ZeRO 1, in float32 with AdamW. In
every round three steps follow each other, the first without a checkpoint. A step with a checkpoint
in the background is timed from before the copy of the state until the checkpoint is on the disk, if
that is after the step's end. `copy` is the time for which training is held up; `cost` is the time
over that of a step alone, in percent of that. `CPU` is the CPU time of rank 0 and its threads, and
its cost: where training uses every core, that is what writing takes from it.

With a batch of a real run a step takes minutes, and the same copy and the same files are a smaller
part of it: the figures belong to the ratio of tokens to parameters, which is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import (
    Others,
    cell,
    command_line,
    numbers,
    require_positive,
    run_tool,
    spread,
    warn_if_not_quiet,
    write_qwen2_config,
)
from launch_ranks import launch
from layouts_rank import make_samples

VOCAB, DEADLINE_S = 2048, 600.0
OPTIONS = {
    "--ranks": {"type": numbers, "default": [1, 2], "help": "data-parallel ranks, 1,2"},
    "--hidden": {"type": int, "default": 512, "help": "width of the model"},
    "--layers": {"type": int, "default": 8, "help": "layers of the model"},
    "--tokens": {"type": int, "default": 4096, "help": "tokens of a step, over all ranks"},
    "--rounds": {"type": int, "default": 8, "help": "steps of each kind"},
    "--folder": {"default": None, "help": "where to write; default: the temporary folder"},
}
KINDS = ("none", "before", "background")


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    require_positive(parser, args, ["hidden", "layers", "tokens", "rounds"])
    return args


def work(task: dict[str, Any]) -> dict[str, Any]:
    """One rank: steps of each kind in turn; returns their seconds and the bytes of a checkpoint."""
    import torch
    from transformers import PreTrainedTokenizerFast

    from megarl.apps.tune.sft import train
    from megarl.checkpoints.checkpoint import Checkpoints
    from megarl.parallel import mesh as mesh_module
    from megarl.parallel.collectives import barrier
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh
    from megarl.trainer.config import ModelConfig, TrainingConfig
    from megarl.trainer.finite import StepGuard
    from megarl.trainer.role import Role

    torch.set_num_threads(task["threads"])
    device, samples = mesh_module.initialise(timeout_s=DEADLINE_S), make_samples(task)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
    copies, steps, size = list[float](), 3 * (task["rounds"] + 1), 0
    with ProcessMesh(Layout(data=task["ranks"]), timeout_s=DEADLINE_S) as mesh:
        role = Role(
            "policy",
            model=ModelConfig(path=task["model"], from_scratch=True),
            training=TrainingConfig(zero_stage=1, micro_batch_tokens=task["tokens"]),
            mesh=mesh,
            device=device,
            seed=1,
            optimizer_steps=steps,
        )
        checkpoints = Checkpoints(
            Path(task["folder"]) / f"run-{task['ranks']}",
            keep=1,
            engine=role.engine,
            tokenizer=PreTrainedTokenizerFast.from_pretrained(task["model"]),
            mesh=mesh,
            seed=0,
            data="",
        )
        guard = StepGuard(role, allowed=0)
        for number in range(steps):
            kind = KINDS[number % 3]
            barrier(mesh.world)
            started_at, cpu_at = time.perf_counter(), time.process_time()
            if kind != "none":
                checkpoints.in_background = kind == "background"
                path = checkpoints.save(step=number + 1, next_ordinal=0)
            copied_at = time.perf_counter()
            train(role, samples, number, guard)
            checkpoints.finish()
            if number >= 3:  # the first round is not timed
                seconds[kind].append(time.perf_counter() - started_at)
                cpu[kind].append(time.process_time() - cpu_at)
                copies += [copied_at - started_at] if kind == "background" else []
        size = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
        parameters = sum(weight.numel() for weight in role.engine.module.parameters())
        role.destroy()
    mesh_module.finalise()
    return {
        "seconds": seconds,
        "cpu": cpu,
        "copy": copies,
        "bytes": size,
        "parameters": parameters,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The measurements by number of ranks."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from make_addition import write_model

    found, cores = {}, len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, Others() as others:
        model = Path(folder) / "model"
        write_model(model, "0123456789+=")
        write_qwen2_config(
            model,
            vocab_size=VOCAB,
            hidden_size=args.hidden,
            intermediate_size=4 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            num_key_value_heads=args.hidden // 64,
        )
        for ranks in args.ranks:
            task = {
                **vars(args),
                "ranks": ranks,
                "threads": max(1, cores // ranks),
                "model": str(model),
                "folder": folder,
                "documents": 8,
                "vocab": VOCAB,
            }
            found[ranks] = launch(__file__, task, num_ranks=ranks, deadline_s=DEADLINE_S)[0]
    return {"ranks": found, "others": others.share}


def costs(seconds: dict[str, list[float]], kind: str) -> list[float]:
    """Per round, the time of a step of `kind` over that of a step alone, in percent of that."""
    return [
        100.0 * (one / alone - 1.0)
        for one, alone in zip(seconds[kind], seconds["none"], strict=True)
    ]


def show(result: dict[str, Any]) -> Iterator[str]:
    """Lines of a table."""
    for ranks, found in result["ranks"].items():
        tokens = result["task"]["tokens"]
        yield (
            f"{ranks} ranks, {found['parameters'] / 1e6:.1f} M parameters, {tokens} tokens a step,"
            f" checkpoint of {found['bytes'] / 1e6:.0f} MB"
        )
        for kind in KINDS:
            line = f"  {kind:10} {cell(spread(found['seconds'][kind]), '.2f')} s"
            if kind != "none":
                line += f"   cost {cell(spread(costs(found['seconds'], kind)), '.1f')} %"
            line += f"   CPU {cell(spread(found['cpu'][kind]), '.2f')} s"
            if kind != "none":
                line += f"   cost {cell(spread(costs(found['cpu'], kind)), '.1f')} %"
            yield line
        yield f"  copy       {cell(spread(found['copy']), '.3f')} s"
    yield from warn_if_not_quiet(result["others"])


if __name__ == "__main__":
    sys.exit(run_tool("checkpoints", arguments=arguments, measure=measure, show=show, work=work))
