"""Every layout of N ranks beside the others: tokens a second, memory, bytes on the wire by kind,
and the same loss.

    python tools/bench_layouts.py --ranks 2 [--json] [--zero 0,3] [--layouts 2x1x1,1x1x2] [--steps
    5] [--tokens 2048]
    python tools/bench_layouts.py --ranks 8 --model PATH --dtype bfloat16 --tokens 131072
    where there are 8 GPUs

A layout is data x sequence x tensor. Each trains the same few supervised steps
(`megarl.loops.sft.train`: packed rows, RoleModel, DeepSpeed, AdamW) on the same documents of
uneven lengths, again and again, so losses must agree: the largest relative difference to the first
layout's losses over all steps is in the table, and more than rounding ends the run. One launch of
gloo ranks with one thread each does all (NCCL where there are GPUs); the first layout runs once
before, to load libraries. The model is a Qwen2 with random weights of the sizes asked for, or of
`--model`'s config.json.

Each layout's steps, in this order: one to warm up, one counted, one more to warm up, `--steps`
timed.

tokens/s     all tokens of a step over the time of the slowest rank, median over the timed steps
             (smallest to largest)
memory       of the rank with the most, during the counted step, beyond what the process used before
             it made this model: weights, gradients, optimizer state, activations, buffers. On CPU
             it is VmHWM, reset before, with a malloc that gives back what is freed
             (tools/peak_memory.py, where it is checked against known tensors first); on GPUs
             torch.cuda.max_memory_allocated.
sent         bytes a rank sends in a step, mean over ranks, by kind of collective, as
             tools/count_messages.py counts them: DeepSpeed's collectives and ours, by what a ring
             sends. Ring attention's messages are `send`.

`others` is the share of the CPU that processes outside of the run took meanwhile: above a few
percent the times are worth little. Where there are more ranks than cores, only memory, bytes and
losses mean something.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch_ranks import QUIET, Others, launch, run_tool, spread

ROW = tuple[int, int, int]
TRANSPORTS = ("auto", "ring", "ring_lean", "all_gather")
AGREE = {"float32": 1e-4, "bfloat16": 5e-2}
"""By how much losses of two layouts may differ, relative to their size."""
SEED = 1
WAYS = ("data", "sequence", "tensor")


def layouts_of(size: int) -> list[ROW]:
    """Every (data, sequence, tensor) of `size` ranks, data first."""
    degrees = [n for n in range(size, 0, -1) if size % n == 0]
    return [
        (data, s, size // (data * s)) for data in degrees for s in degrees if size % (data * s) == 0
    ]


# ----------------------------------------------------------------------------------------- one rank


def make_samples(task: dict[str, Any]) -> Any:
    """Documents of uneven lengths, `tokens` in all; half of each is trained on."""
    import numpy as np

    from megarl.types import Samples

    draw, tokens, count = random.Random(SEED), task["tokens"], task["documents"]
    edges = [0, *sorted(draw.sample(range(1, tokens // 4), count - 1)), tokens // 4]
    samples = []
    for row, (a, b) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        length = 4 * (b - a)
        ids = [draw.randrange(2, task["words"]) for _ in range(length)]
        samples.append(Samples.one(row, ids, mask=np.arange(length) >= length // 2))
    return Samples.concatenate(samples)


class Bench:
    """One rank's measurements."""

    def __init__(self, task: dict[str, Any], device: Any) -> None:
        import peak_memory

        self.task, self.device, self.memory = task, device, peak_memory
        self.samples = make_samples(task)
        self.permitted = device.type == "cuda" or peak_memory.reset_resident_peak()

    def settings(self, stage: int) -> Any:
        from megarl.trainer.config import OptimizerConfig, SequenceConfig, TrainingConfig

        task = self.task
        return TrainingConfig(
            zero_stage=stage,  # type: ignore[arg-type]
            precision=task["dtype"],
            micro_batch_tokens=task["micro_batch_tokens"],
            gradient_checkpointing=task["gradient_checkpointing"],
            sequence=SequenceConfig(transport=task["transport"], cut=task["cut"]),
            optimizer=OptimizerConfig(learning_rate=task["learning_rate"]),
        )

    def owned(self, *, reset: bool = False) -> int:
        """Bytes in use; with `reset`, the peak begins anew here."""
        import torch

        if self.device.type == "cuda":
            if reset:
                torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        if reset:
            self.memory.reset_resident_peak()
        return self.memory.resident()

    def peak(self) -> int:
        import torch

        return (
            torch.cuda.max_memory_allocated()
            if self.device.type == "cuda"
            else self.memory.resident("VmHWM")
        )

    def measure(self, row: ROW, stage: int, steps: int) -> dict[str, Any]:
        """One layout under one ZeRO stage."""
        from count_messages import MessageCount

        from megarl.loops.sft import train
        from megarl.parallel.collectives import barrier
        from megarl.parallel.layout import Layout
        from megarl.parallel.mesh import ProcessMesh
        from megarl.trainer.config import ModelConfig
        from megarl.trainer.loading import load_model
        from megarl.trainer.model import RoleModel
        from megarl.trainer.policy import DTYPES
        from megarl.trainer.zero import TrainEngine

        task, training = self.task, self.settings(stage)
        self._give_back(at_once=True)
        before, losses, seconds = self.owned(), [], []
        with contextlib.ExitStack() as stack:
            mesh = stack.enter_context(ProcessMesh(Layout(*row), timeout_s=task["deadline"]))
            whole = load_model(
                ModelConfig(path=task["model"], from_scratch=True),
                dtype=DTYPES[task["dtype"]],
                seed=SEED,
            )
            network = RoleModel(whole, mesh, training)
            engine = TrainEngine(network, training, mesh, self.device, total_steps=steps + 3)
            stack.callback(engine.destroy)

            def step() -> None:
                barrier(mesh.world)
                started_at = time.perf_counter()
                losses.append(train(engine, mesh, self.samples, len(losses)).metrics["loss"])
                seconds.append(time.perf_counter() - started_at)

            step()
            self.owned(reset=True)
            with MessageCount() as count:
                step()
            peak = self.peak() - before
            self._give_back(at_once=False)
            for _ in range(1 + steps):
                step()
        return {
            "losses": losses,
            "seconds": seconds[3:],
            "peak_bytes": peak if self.permitted else None,
            "sent_bytes": count.sent,
            "calls": count.calls,
        }

    def _give_back(self, *, at_once: bool) -> None:
        """Forget what is freed, and choose malloc's way (see tools/peak_memory.py)."""
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            self.memory.return_freed_memory(at_once)
            ctypes.CDLL(None).malloc_trim(0)


def work(task: dict[str, Any]) -> dict[str, Any]:
    """All layouts and stages, on this rank."""
    import torch

    from megarl.parallel.mesh import finalise, initialise
    from megarl.trainer.config import ModelConfig
    from megarl.trainer.loading import load_model_config
    from megarl.trainer.sharding import refuse_tensor

    torch.set_num_threads(1)
    num_gpus, num_ranks = torch.cuda.device_count(), int(os.environ["WORLD_SIZE"])
    if 0 < num_gpus < num_ranks:
        raise ValueError(
            f"--ranks is {num_ranks}, but there are {num_gpus} GPUs; set it to {num_gpus}, or hide"
            " them"
        )
    device = initialise(timeout_s=task["deadline"])
    bench, found = Bench(task, device), {}
    if device.type == "cpu":
        bench.memory.return_freed_memory(True)
        bench.memory.check()
    config, skipped, possible = load_model_config(ModelConfig(path=task["model"])), {}, []
    for row in task["layouts"]:
        try:
            refuse_tensor(config, row[2])
        except ValueError as error:
            if task["asked"]:
                raise
            skipped["x".join(map(str, row))] = str(error)
        else:
            possible.append(tuple(row))
    for row in possible[:1]:  # loads libraries, and what DeepSpeed keeps of its first model
        bench.measure(row, task["zero"][0], 0)
    for stage in task["zero"]:
        for row in possible:
            found[f"{'x'.join(map(str, row))} {stage}"] = bench.measure(row, stage, task["steps"])
    finalise()
    return {
        "found": found,
        "skipped": skipped,
        "backend": "nccl" if device.type == "cuda" else "gloo",
    }


# --------------------------------------------------------------------------------------- comparison


def write_model_config(args: argparse.Namespace, folder: Path) -> None:
    """A Qwen2 of the asked sizes, as a config.json: weights are random."""
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": args.vocabulary,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate or 8 * args.hidden // 3 // 16 * 16,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "max_position_embeddings": args.tokens,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def words_of(model: str) -> int:
    """The size of a model's vocabulary."""
    from megarl.trainer.config import ModelConfig
    from megarl.trainer.loading import load_model_config

    return load_model_config(ModelConfig(path=model)).get_text_config().vocab_size


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """What the ranks found, a row a layout and stage."""
    names = (
        "tokens",
        "documents",
        "steps",
        "dtype",
        "zero",
        "micro_batch_tokens",
        "gradient_checkpointing",
        "transport",
        "cut",
    )
    task = {name: getattr(args, name) for name in (*names, "learning_rate", "deadline")}
    task |= {"layouts": args.layouts or layouts_of(args.ranks), "asked": bool(args.layouts)}
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder, Others() as others:
        task |= {
            "model": args.model or folder,
            "words": words_of(args.model) if args.model else args.vocabulary,
        }
        if not args.model:
            write_model_config(args, Path(folder))
        ranks = launch(__file__, task, num_ranks=args.ranks, deadline_s=args.deadline)
    if not ranks[0]["found"]:
        raise ValueError(f"none of the layouts can be built: {ranks[0]['skipped']}")
    rows = [
        one_row(key, [rank["found"][key] for rank in ranks], args.tokens)
        for key in ranks[0]["found"]
    ]
    for row in rows:
        pairs = zip(row["losses"], rows[0]["losses"], strict=True)
        row["loss_difference"] = max(abs(mine - first) / abs(first) for mine, first in pairs)
        if not row["loss_difference"] <= AGREE[args.dtype]:
            where = f"{row['layout']} under ZeRO {row['zero']}"
            raise RuntimeError(
                f"{where} trains differently: losses {row['losses']}, of {rows[0]['layout']}"
                f" {rows[0]['losses']}"
            )
    return {
        "rows": rows,
        "skipped": ranks[0]["skipped"],
        "others": others.share,
        "backend": ranks[0]["backend"],
    }


def one_row(key: str, ranks: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """One layout: the slowest rank's times, the largest memory, the mean of what is sent."""
    layout, stage = key.split()
    slowest = [max(seconds) for seconds in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    peaks = [rank["peak_bytes"] for rank in ranks]
    sent = {
        kind: sum(rank["sent_bytes"][kind] for rank in ranks) / len(ranks)
        for kind in ranks[0]["sent_bytes"]
    }
    return {
        "layout": layout,
        **dict(zip(WAYS, map(int, layout.split("x")), strict=True)),
        "zero": int(stage),
        "tokens_per_s": spread([tokens / seconds for seconds in slowest]),
        "peak_bytes": None if None in peaks else max(peaks),
        "rank_peak_bytes": peaks,
        "sent_bytes": sent,
        "sent_total_bytes": sum(sent.values()),
        "rank_sent_bytes": [rank["sent_bytes"] for rank in ranks],
        "calls": ranks[0]["calls"],
        "losses": ranks[0]["losses"],
    }


def show(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    from count_messages import KINDS

    here, task, rows = result["machine"], result["task"], result["rows"]
    name = here.get("gpu", here["cpu"])
    yield (
        f"{name}, {here['cores']} cores; torch {here['torch']}; {task['ranks']} ranks,"
        f" {result['backend']}, {task['dtype']}"
    )
    model = task["model"] or (
        f"random Qwen2, {task['layers']} layers of {task['hidden']}, {task['heads']} heads,"
        f" {task['kv_heads']} key heads, {task['vocabulary']:,} words"
    )
    yield (
        f"{model}; {task['tokens']:,} tokens in {task['documents']} documents a step;"
        f" {task['steps']} timed steps"
    )
    kinds = [kind for kind in KINDS if any(row["sent_bytes"][kind] for row in rows)]
    head = f"{'d x s x t':9} {'ZeRO':>4} {'tokens/s':>26} {'peak MB':>9} {'MB sent':>9}"
    yield f"{head} {' '.join(f'{kind:>14}' for kind in kinds)} {'loss':>9} {'difference':>10}"
    for row in rows:
        speed = "{median:,.0f} ({min:,.0f} to {max:,.0f})".format(**row["tokens_per_s"])
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.1f}"
        parts = " ".join(f"{row['sent_bytes'][kind] / 1e6:14,.3f}" for kind in kinds)
        yield (
            f"{row['layout']:9} {row['zero']:4} {speed:>26} {peak:>9}"
            f" {row['sent_total_bytes'] / 1e6:9,.3f} {parts} {row['losses'][-1]:9.5f}"
            f" {row['loss_difference']:10.1e}"
        )
    worst = max(row["loss_difference"] for row in rows)
    yield (
        f"largest relative difference of losses to the first layout, over {len(rows[0]['losses'])}"
        f" steps: {worst:.1e}"
    )
    for layout, why in result["skipped"].items():
        yield f"{layout} left out: {why}"
    if any(row["peak_bytes"] is None for row in rows):
        yield (
            "no peak memory: this system does not permit a process to reset its VmHWM"
            " (/proc/self/clear_refs)"
        )
    if result["backend"] == "gloo" and task["ranks"] > here["cores"]:
        yield f"{task['ranks']} ranks on {here['cores']} cores: tokens/s are not comparable"
    if result["others"] > QUIET:
        yield (
            f"NOT QUIET: other processes took {result['others']:.0%} of the CPU; repeat on an idle"
            " machine for tokens/s"
        )


def parse_layout(text: str) -> ROW:
    """2x1x2 -> (2, 1, 2)."""
    found = tuple(int(word) for word in text.split("x"))
    if len(found) != 3 or min(found) < 1:
        raise ValueError(text)
    return found


def parse_layouts(text: str) -> list[ROW]:
    """Layouts separated by commas."""
    return [parse_layout(word) for word in text.split(",")]


def parse_stages(text: str) -> list[int]:
    """ZeRO stages separated by commas."""
    found = [int(word) for word in text.split(",")]
    if not set(found) <= {0, 1, 2, 3}:
        raise ValueError(text)
    return found


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes, one GPU each where there are GPUs"
    )
    parser.add_argument(
        "--layouts",
        type=parse_layouts,
        help="data x sequence x tensor, as 2x1x2,1x4x1; default: all of --ranks",
    )
    parser.add_argument(
        "--zero", type=parse_stages, default="0", help="DeepSpeed ZeRO stages, as 0,1,2,3"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed optimizer steps of each layout")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step, over all ranks")
    parser.add_argument(
        "--documents", type=int, default=8, help="documents of a step, of uneven lengths"
    )
    parser.add_argument(
        "--micro-batch-tokens",
        type=int,
        default=8192,
        help="most tokens of a packed row, a sequence rank",
    )
    parser.add_argument(
        "--model",
        default="",
        help="folder or hub name; only its config.json is used, weights are random",
    )
    for name, value, what in (
        ("hidden", 256, "hidden size"),
        ("layers", 4, "layers"),
        ("heads", 4, "query heads"),
        ("kv-heads", 2, "key heads"),
        ("vocabulary", 4096, "words"),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=value,
            help=f"{what} of the random model, without --model",
        )
    parser.add_argument(
        "--intermediate",
        type=int,
        default=0,
        help="width of its feed-forward layers; 0: 8/3 of --hidden",
    )
    parser.add_argument(
        "--dtype", choices=tuple(AGREE), default="float32", help="bfloat16 needs ZeRO 1, 2 or 3"
    )
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="recompute activations in backward"
    )
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default="auto", help="of keys over the sequence axis"
    )
    parser.add_argument(
        "--cut",
        default="auto",
        choices=("auto", "contiguous", "zigzag", "zigzag_document", "striped"),
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=1e-3,
        help="of AdamW; losses fall, so that wrong gradients show",
    )
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds that all may take")
    args = parser.parse_args(argv)
    for name in (
        "ranks",
        "steps",
        "documents",
        "hidden",
        "layers",
        "heads",
        "kv_heads",
        "micro_batch_tokens",
    ):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; set it to 1 or more"
            )
    for row in args.layouts or []:
        if row[0] * row[1] * row[2] != args.ranks:
            parser.error(
                f"--layouts has {'x'.join(map(str, row))}, which is not a layout of --ranks"
                f" {args.ranks}"
            )
    if args.tokens < 8 * args.documents or args.tokens % 4:
        parser.error(
            f"--tokens is {args.tokens}; set it to a multiple of 4, and at least"
            f" {8 * args.documents}"
        )
    if args.hidden % args.heads or args.heads % args.kv_heads or args.vocabulary < 3:
        parser.error(
            "--heads must divide --hidden, --kv-heads must divide --heads, and --vocabulary must be"
            " 3 or more"
        )
    if args.dtype == "bfloat16" and 0 in args.zero:
        parser.error("--dtype bfloat16 needs ZeRO; set --zero to 1, 2 or 3")
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_tool(
        "bench_layouts", arguments=arguments, work=work, measure=compare, show=show, argv=argv
    )


if __name__ == "__main__":
    sys.exit(main())
