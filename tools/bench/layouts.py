"""Every layout of N ranks compared: tokens per second, memory, bytes sent by kind of collective,
and losses, which must agree.

    python tools/bench/layouts.py --ranks 2 [--json] [--zero 0,3] [--layouts 2x1x1,1x1x2]

A layout is data x sequence x tensor. Each trains the same few supervised steps
(`megarl.apps.tune.sft.sft_step`: packed sequences, RoleModel, DeepSpeed, AdamW) on the same
documents of uneven lengths, so losses must agree: the table has the largest relative difference to
the first layout's losses over all steps, and a difference beyond rounding is an error. One launch
of gloo ranks with one thread each runs all layouts (NCCL where there are GPUs); the first layout
runs once before, to load libraries. The model is a Qwen2 with random weights of the requested
sizes.

Steps of each layout, in this order: one warm-up, one counted, one warm-up, `--steps` timed.

tokens/s     all tokens of a step over the time of the slowest rank, median over the timed steps
             (smallest to largest)
memory       of the rank with the most, during the counted step, beyond what the process used before
             it built this model: weights, gradients, optimizer state, activations, buffers. On CPU
             it is VmHWM, reset before, with a malloc that returns freed memory at once
             (tools/bench/peak_memory.py, which checks itself against known tensors first); on GPUs
             torch.cuda.max_memory_allocated.
sent         bytes a rank sends in a step, mean over ranks, by kind of collective, as
             tools/bench/count_messages.py counts them: DeepSpeed's collectives and ours, by what a
             ring sends. Ring attention's messages are `send`.

Where there are more ranks than cores, only memory, bytes and losses mean something.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import random
import time
from typing import Any

from common import Args, Lines, qwen2, run_tool, spread, table, write_config
from launch_ranks import launch, make_role, ready

SEED = 1
LEARNING_RATE = 1e-3  # losses fall, so that wrong gradients show
AGREE = {"float32": 1e-4, "bfloat16": 5e-2}
"""By how much losses of two layouts may differ, relative to their size."""


TRANSPORTS = ("auto", "ring", "ring_lean", "all_gather")


def layout(text: str) -> list[int]:
    """2x1x2 -> [2, 1, 2], the degrees of data, sequence and tensor. Raises `ValueError`."""
    data, sequence, tensor = map(int, text.split("x"))
    return [data, sequence, tensor]


def layouts(text: str) -> list[list[int]]:
    """Several of them, with commas between."""
    return [layout(one) for one in text.split(",")]


OPTIONS = {
    "--ranks": (2, "processes, one GPU each where there are GPUs"),
    "--layouts": (None, "data x sequence x tensor, as 2x1x2,1x4x1; default: all", layouts),
    "--zero": ([0], "DeepSpeed ZeRO stages", (0, 1, 2, 3)),
    "--steps": (5, "timed optimizer steps of each layout"),
    "--tokens": (2048, "tokens of a step, over all ranks"),
    "--documents": (8, "documents of a step, of uneven lengths"),
    "--micro-batch-tokens": (8192, "most tokens of a packed sequence, per sequence rank"),
    "--hidden": (256, "hidden size of the model"),
    "--layers": (4, "layers of the model"),
    "--heads": (4, "query heads"),
    "--kv-heads": (2, "KV heads"),
    "--vocabulary": (4096, "vocab size"),
    "--dtype": ("float32", "bfloat16 needs ZeRO 1, 2 or 3", tuple(AGREE)),
    "--gradient-checkpointing": (False, "recompute activations in backward"),
    "--transport": ("auto", "of keys and values over the sequence axis", TRANSPORTS),
}

# ---------------------------------------------------------------------------------------- on a rank


def make_samples(tokens: int, documents: int, vocabulary: int) -> Any:
    """Documents of uneven lengths, `tokens` in all; half of each is trained on."""
    import numpy as np

    from megarl.types import Samples

    draw = random.Random(SEED)
    inner = sorted(draw.sample(range(1, tokens // 4), documents - 1))
    samples = []
    for row, (a, b) in enumerate(itertools.pairwise([0, *inner, tokens // 4])):
        length = 4 * (b - a)
        ids = [draw.randrange(2, vocabulary) for _ in range(length)]
        samples.append(Samples.one(row, ids, mask=np.arange(length) >= length // 2))
    return Samples.concatenate(samples)


def train_under(
    row: list[int], stage: int, steps: int, task: dict[str, Any], device: Any, samples: Any
) -> dict[str, Any]:
    """Train `steps` optimizer steps under the layout `row` and ZeRO `stage`, after steps that are
    not counted. Returns losses, times and memory.
    """
    import peak_memory
    import torch
    from count_messages import MessageCount

    from megarl.apps.tune.sft import sft_step
    from megarl.parallel.collectives import barrier
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh
    from megarl.settings.training import OptimizerConfig, SequenceConfig
    from megarl.trainer.finite import StepGuard

    on_gpu, losses, seconds = device.type == "cuda", list[float](), list[float]()

    def give_back(at_once: bool) -> None:
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        else:
            peak_memory.return_freed_memory(at_once)

    give_back(at_once=True)
    before = torch.cuda.memory_allocated() if on_gpu else peak_memory.resident()
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(ProcessMesh(Layout(*row), timeout_s=task["deadline"]))
        role = make_role(
            task["model"],
            mesh,
            device,
            zero_stage=stage,
            precision=task["dtype"],
            sequence=SequenceConfig(transport=task["transport"]),
            optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
            **{name: task[name] for name in ("micro_batch_tokens", "gradient_checkpointing")},
        )
        stack.callback(role.destroy)
        guard = StepGuard(role, allowed=0)

        def step() -> None:
            barrier(mesh.world)
            started_at = time.perf_counter()
            losses.append(sft_step(role, samples, len(losses), guard).metrics["loss"])
            seconds.append(time.perf_counter() - started_at)

        step()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        permitted = on_gpu or peak_memory.reset_resident_peak()
        with MessageCount() as count:
            step()
        peak = torch.cuda.max_memory_allocated() if on_gpu else peak_memory.resident("VmHWM")
        give_back(at_once=False)
        for _ in range(1 + steps):
            step()
    return {
        "losses": losses,
        "seconds": seconds[3:],
        "peak_bytes": peak - before if permitted else None,
        "sent_bytes": count.sent,
    }


def work(task: dict[str, Any]) -> dict[str, Any]:
    """All layouts and stages, on this rank."""
    import torch

    from megarl.settings.training import ModelConfig
    from megarl.trainer.model_config import load_model_config
    from megarl.trainer.sharding import refuse_tensor

    num_gpus, num_ranks = torch.cuda.device_count(), int(os.environ["WORLD_SIZE"])
    if 0 < num_gpus < num_ranks:
        raise ValueError(f"--ranks is {num_ranks}, but there are {num_gpus} GPUs; hide them")
    config, skipped, possible = load_model_config(ModelConfig(path=task["model"])), {}, []
    for row in task["layouts"]:
        try:
            refuse_tensor(config, row[2])
            possible.append(row)
        except ValueError as error:
            if task["asked"]:
                raise
            skipped["x".join(map(str, row))] = str(error)
    samples = make_samples(task["tokens"], task["documents"], task["vocabulary"])
    found = []
    with ready(task["deadline"], checks_memory=True) as device:
        same = task, device, samples
        for row in possible[:1]:  # loads libraries, and what DeepSpeed keeps of its first model
            train_under(row, task["zero"][0], 0, *same)
        for stage, row in itertools.product(task["zero"], possible):
            about = {"layout": "x".join(map(str, row)), "zero": stage}
            found.append(about | train_under(row, stage, task["steps"], *same))
    return {"found": found, "skipped": skipped}


# ----------------------------------------------------------------------------------------- the tool


def measure(args: Args) -> dict[str, Any]:
    """A table row for each layout and ZeRO stage.

    Raises `RuntimeError` if the losses of two layouts differ by more than `AGREE`, and `ValueError`
    if no layout can be built.
    """
    for row in args.layouts or []:
        if math.prod(row) != args.ranks:
            text = "x".join(map(str, row))
            raise ValueError(f"--layouts has {text}, which is not a layout of --ranks {args.ranks}")
    if args.tokens < 8 * args.documents or args.tokens % 4:
        raise ValueError(f"--tokens is {args.tokens}; set a multiple of 4, 8 a document or more")
    if args.dtype == "bfloat16" and 0 in args.zero:
        raise ValueError("--dtype bfloat16 needs ZeRO; set --zero to 1, 2 or 3")
    degrees = [n for n in range(args.ranks, 0, -1) if args.ranks % n == 0]
    every = [row for row in itertools.product(degrees, repeat=3) if math.prod(row) == args.ranks]
    inner, heads = 8 * args.hidden // 3 // 16 * 16, (args.heads, args.kv_heads)
    sizes = args.vocabulary, args.hidden, inner, args.layers, *heads
    model = write_config(args.work, qwen2(*sizes, max_position_embeddings=args.tokens))
    task = vars(args) | {"layouts": args.layouts or every, "asked": bool(args.layouts)}
    task["model"] = model
    ranks = launch(__file__, task, args.ranks)
    if not ranks[0]["found"]:
        raise ValueError(f"none of the layouts can be built: {ranks[0]['skipped']}")
    rows = [one_row(same, args.tokens) for same in zip(*(r["found"] for r in ranks), strict=True)]
    for row in rows:
        pairs = zip(row["losses"], rows[0]["losses"], strict=True)
        row["loss_difference"] = max(abs(loss - first) / abs(first) for loss, first in pairs)
        if not row["loss_difference"] <= AGREE[args.dtype]:
            raise RuntimeError(
                f"{row['layout']} under ZeRO {row['zero']} trains differently: losses"
                f" {row['losses']}, of {rows[0]['layout']} {rows[0]['losses']}"
            )
    return {"rows": rows, "skipped": ranks[0]["skipped"]}


def one_row(ranks: tuple[dict[str, Any], ...], tokens: int) -> dict[str, Any]:
    """One layout: the slowest rank's times, the largest memory, the mean of the bytes sent."""
    slowest = map(max, *(rank["seconds"] for rank in ranks), [0.0] * len(ranks[0]["seconds"]))
    peaks = [rank["peak_bytes"] for rank in ranks]
    sent = {
        kind: sum(rank["sent_bytes"][kind] for rank in ranks) / len(ranks)
        for kind in ranks[0]["sent_bytes"]
    }
    return ranks[0] | {
        "tokens_per_s": spread([tokens / seconds for seconds in slowest]),
        "peak_bytes": None if None in peaks else max(peaks),
        "sent_bytes": sent,
        "sent_total_bytes": sum(sent.values()),
        "loss": ranks[0]["losses"][-1],
    }


def show(result: dict[str, Any]) -> Lines:
    """The result as lines of a table."""
    rows = result["rows"]
    columns = (
        "data x sequence x tensor=layout; ZeRO=zero d; tokens/s=tokens_per_s ,.0f;"
        " peak MB=peak_bytes*1e-6 ,.1f; MB sent=sent_total_bytes*1e-6 ,.3f"
    )
    for kind in rows[0]["sent_bytes"]:
        if any(row["sent_bytes"][kind] for row in rows):
            columns += f"; {kind}=sent_bytes.{kind}*1e-6 ,.3f"
    yield from table(rows, columns + "; loss .5f; off the first=loss_difference .1e")
    yield from (f"{row} left out: {why}" for row, why in result["skipped"].items())
    if result["task"]["ranks"] > result["machine"]["cores"]:
        yield "more ranks than cores: tokens/s are not comparable"


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show, work)
