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

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from common import Args, in_turns, qwen2, ratios, run_tool, spread, write_config
from launch_ranks import launch, make_role, ready
from layouts import make_samples
from make_addition import write_model

VOCAB = 2048
OPTIONS = {
    "--ranks": ([1, 2], "data-parallel ranks"),
    "--hidden": (512, "width of the model"),
    "--layers": (8, "layers of the model"),
    "--tokens": (4096, "tokens of a step, over all ranks"),
    "--rounds": (8, "steps of each kind"),
}
KINDS = ("none", "before", "background")
COLUMNS = (
    "ranks d; M parameters=parameters*1e-6 .1f; checkpoint MB=bytes*1e-6 .0f; checkpoint=kind;"
    " step s=seconds .2f; cost=seconds_cost .1%; CPU s=cpu .2f; CPU cost=cpu_cost .1%;"
    " copy s=copy .3f"
)


def work(task: dict[str, Any]) -> dict[str, Any]:
    """One rank: steps of each kind in turn; returns their seconds and the bytes of a checkpoint."""
    from transformers import PreTrainedTokenizerFast

    from megarl.apps.tune.sft import sft_step
    from megarl.checkpoints.checkpoint import Checkpoints
    from megarl.parallel.collectives import barrier
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh
    from megarl.trainer.finite import StepGuard

    samples, done, path = make_samples(task["tokens"], 8, VOCAB), 0, Path()
    threads, layout = max(1, len(os.sched_getaffinity(0)) // task["size"]), Layout(task["size"])
    with (
        ready(task["deadline"], threads=threads) as device,
        ProcessMesh(layout, timeout_s=task["deadline"]) as mesh,
    ):
        settings = {"zero_stage": 1, "micro_batch_tokens": task["tokens"]}
        role = make_role(task["model"], mesh, device, **settings)
        checkpoints = Checkpoints(
            Path(task["work"]) / f"run-{task['size']}",
            keep=1,
            engine=role.engine,
            tokenizer=PreTrainedTokenizerFast.from_pretrained(task["model"]),
            mesh=mesh,
            seed=0,
            data="",
        )
        guard = StepGuard(role, allowed=0)

        def step(kind: str) -> dict[str, float]:
            nonlocal done, path
            barrier(mesh.world)
            started_at, cpu_at = time.perf_counter(), time.process_time()
            if kind != "none":
                checkpoints.in_background = kind == "background"
                path = checkpoints.save(step=done + 1, next_ordinal=0)
            copied_at = time.perf_counter()
            sft_step(role, samples, done, guard)
            checkpoints.finish()
            done += 1
            return {
                "seconds": time.perf_counter() - started_at,
                "cpu": time.process_time() - cpu_at,
                "copy": copied_at - started_at,
            }

        ways = {kind: partial(step, kind) for kind in KINDS}
        found = in_turns(task["rounds"], ways, skipped=1)
        size = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
        parameters = sum(weight.numel() for weight in role.engine.module.parameters())
        role.destroy()
    return {"found": found, "bytes": size, "parameters": parameters}


def measure(args: Args) -> dict[str, Any]:
    """The measurements by number of ranks."""
    made = []
    model = args.work / "model"
    write_model(model, "0123456789+=")
    heads = args.hidden // 64
    sizes = VOCAB, args.hidden, 4 * args.hidden, args.layers, heads, heads
    write_config(model, qwen2(*sizes))
    for size in args.ranks:
        task = vars(args) | {"size": size, "model": str(model)}
        rank = launch(__file__, task, size)[0]
        for kind in KINDS:
            row = rank | {"ranks": size, "kind": kind}
            for name in ("seconds", "cpu", "copy"):
                alone, each = ([one[name] for one in rank["found"][k]] for k in ("none", kind))
                row[name] = spread(each)
                row[f"{name}_cost"] = spread([one - 1.0 for one in ratios(each, alone)["all"]])
            made.append(row)
    return {"rows": made}


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, COLUMNS, work)
