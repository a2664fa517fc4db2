"""Every layout of N ranks compared: tokens per second, memory, bytes sent by kind of collective,
and losses, which must agree.

    python tools/bench/layouts.py --ranks 2 [--json] [--zero 0,3] [--layouts 2x1x1,1x1x2]
    python tools/bench/layouts.py --ranks 8 --model PATH --dtype bfloat16 --tokens 131072
    where there are 8 GPUs

A layout is data x sequence x tensor. Each trains the same few supervised steps
(`megarl.apps.tune.sft.train`: packed sequences, RoleModel, DeepSpeed, AdamW) on the same documents
of uneven lengths, so losses must agree: the table has the largest relative difference to the first
layout's losses over all steps, and a difference beyond rounding is an error. One launch of gloo
ranks with one thread each runs all layouts (NCCL where there are GPUs); the first layout runs once
before, to load libraries. The model is a Qwen2 with random weights of the requested sizes, or of
`--model`'s config.json.

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

`others` is the share of the CPU that processes outside of the run used meanwhile: above a few
percent the times are worth little. Where there are more ranks than cores, only memory, bytes and
losses mean something.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import (
    Others,
    cell,
    command_line,
    require_positive,
    run_tool,
    spread,
    warn_if_not_quiet,
    write_qwen2_config,
)
from launch_ranks import launch
from layouts_rank import ROW, work

TRANSPORTS = ("auto", "ring", "ring_lean", "all_gather")
CUTS = ("auto", "contiguous", "zigzag", "zigzag_document", "striped")
AGREE = {"float32": 1e-4, "bfloat16": 5e-2}
"""By how much losses of two layouts may differ, relative to their size."""
AXES = ("data", "sequence", "tensor")


def layouts_of(size: int) -> list[ROW]:
    """Every (data, sequence, tensor) of `size` ranks, data first."""
    degrees = [n for n in range(size, 0, -1) if size % n == 0]
    return [
        (data, s, size // (data * s)) for data in degrees for s in degrees if size % (data * s) == 0
    ]


def vocab_of(model: str) -> int:
    """The vocab size in a model's config.json."""
    from megarl.trainer.config import ModelConfig
    from megarl.trainer.model_config import load_model_config

    return load_model_config(ModelConfig(path=model)).get_text_config().vocab_size


def model_of(args: argparse.Namespace, folder: str) -> str:
    """`--model`, or `folder` with the config.json of a Qwen2 of the requested sizes."""
    if args.model:
        return args.model
    return write_qwen2_config(
        Path(folder),
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate or 8 * args.hidden // 3 // 16 * 16,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.tokens,
    )


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Measurements of the ranks, one table row for each layout and ZeRO stage.

    Raises `RuntimeError` if the losses of two layouts differ by more than `AGREE`, and `ValueError`
    if no layout can be built.
    """
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
        "learning_rate",
        "deadline",
    )
    task = {name: getattr(args, name) for name in names}
    task |= {"layouts": args.layouts or layouts_of(args.ranks), "asked": bool(args.layouts)}
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder, Others() as others:
        task["model"] = model_of(args, folder)
        task["vocab"] = vocab_of(args.model) if args.model else args.vocabulary
        ranks = launch(__file__, task, num_ranks=args.ranks, deadline_s=args.deadline)
    if not ranks[0]["found"]:
        raise ValueError(f"none of the layouts can be built: {ranks[0]['skipped']}")
    rows = [
        one_row(key, [rank["found"][key] for rank in ranks], args.tokens)
        for key in ranks[0]["found"]
    ]
    for row in rows:
        pairs = zip(row["losses"], rows[0]["losses"], strict=True)
        row["loss_difference"] = max(abs(loss - first) / abs(first) for loss, first in pairs)
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
    """One layout: the slowest rank's times, the largest memory, the mean of the bytes sent."""
    layout, stage = key.split()
    slowest = [max(seconds) for seconds in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    peaks = [rank["peak_bytes"] for rank in ranks]
    sent = {
        kind: sum(rank["sent_bytes"][kind] for rank in ranks) / len(ranks)
        for kind in ranks[0]["sent_bytes"]
    }
    return {
        "layout": layout,
        **dict(zip(AXES, map(int, layout.split("x")), strict=True)),
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
    yield (
        f"{here.get('gpu', here['cpu'])}, {here['cores']} cores; torch {here['torch']};"
        f" {task['ranks']} ranks, {result['backend']}, {task['dtype']}"
    )
    model = task["model"] or (
        f"random Qwen2, {task['layers']} layers of {task['hidden']}, {task['heads']} heads,"
        f" {task['kv_heads']} KV heads, vocab of {task['vocabulary']:,}"
    )
    yield (
        f"{model}; {task['tokens']:,} tokens in {task['documents']} documents a step;"
        f" {task['steps']} timed steps"
    )
    kinds = [kind for kind in KINDS if any(row["sent_bytes"][kind] for row in rows)]
    head = f"{'d x s x t':9} {'ZeRO':>4} {'tokens/s':>26} {'peak MB':>9} {'MB sent':>9}"
    yield f"{head} {' '.join(f'{kind:>14}' for kind in kinds)} {'loss':>9} {'difference':>10}"
    for row in rows:
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.1f}"
        parts = " ".join(f"{row['sent_bytes'][kind] / 1e6:14,.3f}" for kind in kinds)
        yield (
            f"{row['layout']:9} {row['zero']:4} {cell(row['tokens_per_s'], ',.0f'):>26} {peak:>9}"
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
    yield from warn_if_not_quiet(result["others"])


def parse_layouts(text: str) -> list[ROW]:
    """2x1x2,1x4x1 -> [(2, 1, 2), (1, 4, 1)]. Raises `ValueError`."""
    found = [tuple(int(word) for word in layout.split("x")) for layout in text.split(",")]
    if any(len(layout) != 3 or min(layout) < 1 for layout in found):
        raise ValueError(text)
    return [(data, sequence, tensor) for data, sequence, tensor in found]


def parse_stages(text: str) -> list[int]:
    """ZeRO stages separated by commas. Raises `ValueError`."""
    found = [int(word) for word in text.split(",")]
    if not set(found) <= {0, 1, 2, 3}:
        raise ValueError(text)
    return found


def _model_size(default: int, what: str) -> dict[str, Any]:
    return {
        "type": int,
        "default": default,
        "help": f"{what} of the random model, without --model",
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "--ranks": {
        "type": int,
        "default": 2,
        "help": "processes, one GPU each where there are GPUs",
    },
    "--layouts": {
        "type": parse_layouts,
        "help": "data x sequence x tensor, as 2x1x2,1x4x1; default: all of --ranks",
    },
    "--zero": {"type": parse_stages, "default": "0", "help": "DeepSpeed ZeRO stages, as 0,1,2,3"},
    "--steps": {"type": int, "default": 5, "help": "timed optimizer steps of each layout"},
    "--tokens": {"type": int, "default": 2048, "help": "tokens of a step, over all ranks"},
    "--documents": {
        "type": int,
        "default": 8,
        "help": "documents of a step, of uneven lengths",
    },
    "--micro-batch-tokens": {
        "type": int,
        "default": 8192,
        "help": "most tokens of a packed sequence, per sequence rank",
    },
    "--model": {
        "default": "",
        "help": "folder or hub name; only its config.json is used, weights are random",
    },
    "--hidden": _model_size(256, "hidden size"),
    "--layers": _model_size(4, "layers"),
    "--heads": _model_size(4, "query heads"),
    "--kv-heads": _model_size(2, "KV heads"),
    "--vocabulary": _model_size(4096, "vocab size"),
    "--intermediate": _model_size(0, "MLP width (0: 8/3 of --hidden)"),
    "--dtype": {
        "choices": tuple(AGREE),
        "default": "float32",
        "help": "bfloat16 needs ZeRO 1, 2 or 3",
    },
    "--gradient-checkpointing": {
        "action": "store_true",
        "help": "recompute activations in backward",
    },
    "--transport": {
        "choices": TRANSPORTS,
        "default": "auto",
        "help": "of keys and values over the sequence axis",
    },
    "--cut": {"choices": CUTS, "default": "auto", "help": "which rank holds which tokens"},
    "--learning-rate": {
        "type": float,
        "default": 1e-3,
        "help": "of AdamW; losses fall, so that wrong gradients show",
    },
    "--deadline": {"type": float, "default": 1800.0, "help": "seconds that all may take"},
}
AT_LEAST_ONE = (
    "ranks",
    "steps",
    "documents",
    "hidden",
    "layers",
    "heads",
    "kv_heads",
    "micro_batch_tokens",
)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    require_positive(parser, args, AT_LEAST_ONE)
    for data, sequence, tensor in args.layouts or []:
        if data * sequence * tensor != args.ranks:
            parser.error(
                f"--layouts has {data}x{sequence}x{tensor}, which is not a layout of --ranks"
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
        "layouts", arguments=arguments, work=work, measure=compare, show=show, argv=argv
    )


if __name__ == "__main__":
    sys.exit(main())
