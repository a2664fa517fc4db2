"""Context length against the size of the sequence axis: memory and time a rank, of attention and of
a model's step.

    python tools/bench/long_context.py [--json] [--tokens 16384,32768,65536] [--sizes 1,2,4]
    [--schedules ring_lean,ring] [--what attention|model|both] [--heads 4] [--kv-heads 1]

attention   forward and backward of one layer's `sequence_attention` over one causal document of
            `tokens`, in float32.
model       forward and backward of a RoleModel: `--layers` of these heads with checkpointed
            activations, and the log-prob head over a vocab of `--vocabulary`, without logits in
            memory. Weights and their gradients are there before.

`size` gloo ranks with one thread each share the sequence by `--cut`. Memory is that of the rank
with the most:

    beyond      the most that torch's allocated beyond what was there before, which is of attention
                q, k, v and the gradient of the output, and of a model its weights, their gradients
                and the sequence's ids
    in all      the same, and what was there before
    x size      the memory times the size, over that of size 1: 1.00 falls exactly as 1/size

It is counted from every allocation and release of torch's allocator (tools/bench/peak_memory.py)
and checked against tensors of known size first. The most resident memory is measured beside it by
the kernel's own count, which sees libraries and sockets as well: `resident`. The work lists of a
sequence are made before, once for all layers; they are small, and in the JSON object.

Time is that of the last rank to end, of one run, in the same run: what is written down are a few
hundred allocations. Where there are more ranks than cores, memory is right and time is not
comparable, and the table marks it with `*`. A run is refused where the sum of outputs or gradients
differs from that of the first size.
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
    command_line,
    numbers,
    require_positive,
    run_tool,
    spread,
    warn_if_not_quiet,
    write_qwen2_config,
)
from launch_ranks import launch
from long_context_rank import SCHEDULES, WHAT, work

CUTS = ("zigzag", "contiguous", "zigzag_document", "striped")
AGREES = 1e-4
BAR = 0.15
"""A warning is printed if a rank's attention memory at the longest length is more than this
fraction above (memory with one rank) / (number of sequence-parallel ranks)."""


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of the table for every subject, schedule, length and size."""
    task = {
        name: getattr(args, name)
        for name in ("heads", "kv_heads", "width", "layers", "vocabulary", "cut", "tokens")
    }
    task |= {"what": args.what, "deadline": args.deadline}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="long-context-") as folder:
        task["model"] = write_qwen2_config(
            Path(folder),
            vocab_size=args.vocabulary,
            hidden_size=args.heads * args.width,
            intermediate_size=3 * args.heads * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads,
            max_position_embeddings=max(args.tokens),
        )
        for size in args.sizes:
            # On one rank nothing travels: the schedules are the same code.
            schedules = args.schedules if size > 1 else args.schedules[:1]
            with Others() as others:
                ranks = launch(
                    __file__,
                    task | {"size": size, "schedules": schedules},
                    num_ranks=size,
                    deadline_s=args.deadline,
                    environment={"CUDA_VISIBLE_DEVICES": ""},
                )
            for key in ranks[0]:
                what, schedule, tokens = key.split()
                rows.append(
                    row(
                        [rank[key] for rank in ranks],
                        what,
                        schedule,
                        int(tokens),
                        size,
                        others.share,
                    )
                )
            print(f"size {size} done, others {others.share:.0%}", file=sys.stderr, flush=True)
    order = {what: number for number, what in enumerate(WHAT)}
    rows.sort(key=lambda row: (order[row["what"]], row["tokens"], row["size"]))
    for made in rows:
        against(made, rows)
    return rows


def row(
    ranks: list[dict[str, Any]], what: str, schedule: str, tokens: int, size: int, others: float
) -> dict[str, Any]:
    """What the ranks found, as one row: memory of the rank with the most, time of the last to
    end.
    """
    most = max(ranks, key=lambda rank: rank["beyond_bytes"])
    measured = [rank["resident_bytes"] for rank in ranks if rank["resident_bytes"] is not None]
    return {
        "what": what,
        "schedule": schedule if size > 1 else "one rank",
        "tokens": tokens,
        "size": size,
        "beyond_bytes": most["beyond_bytes"],
        "total_bytes": max(rank["beyond_bytes"] + rank["before_bytes"] for rank in ranks),
        "resident_bytes": max(measured) if measured else None,
        "plan_bytes": max(rank["plan_bytes"] for rank in ranks),
        "rank_beyond_bytes": [rank["beyond_bytes"] for rank in ranks],
        "seconds": max(rank["seconds"] for rank in ranks),
        "cpu_s": spread([rank["cpu_s"] for rank in ranks])["max"],
        "others": others,
        "digest": ranks[0]["digest"],
    }


def against(made: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add the ratios to the first size's row, and refuse different results."""
    same = [
        other for other in rows if all(other[name] == made[name] for name in ("what", "tokens"))
    ]
    first = min(same, key=lambda other: other["size"])
    for mine, theirs in zip(made["digest"], first["digest"], strict=True):
        if not abs(mine - theirs) <= AGREES * abs(theirs):
            where = f"{made['what']}, {made['tokens']} tokens, {made['schedule']} of {made['size']}"
            raise RuntimeError(
                f"{where} does not compute what size {first['size']} does: norms {made['digest']},"
                f" {first['digest']}"
            )
    if first["size"] == 1:
        for name in ("beyond", "total"):
            made[f"{name}_x_size"] = made[f"{name}_bytes"] * made["size"] / first[f"{name}_bytes"]
        made["speed_up"] = first["seconds"] / made["seconds"]


def show(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    here, task, rows = result["machine"], result["task"], result["rows"]
    yield f"{here['cpu']}, {here['cores']} cores; torch {here['torch']}; one thread a rank"
    yield (
        f"{task['heads']} query heads, {task['kv_heads']} KV heads of width {task['width']},"
        f" float32, {task['cut']} cut; model: {task['layers']} layers, vocab"
        f" {task['vocabulary']:,}"
    )
    head = (
        f"{'what':10} {'tokens':>7} {'size':>4}  {'schedule':10} {'beyond MB':>10} {'x size':>6}"
        f" {'in all MB':>10} {'x size':>6}"
    )
    yield f"{head} {'resident MB':>12} {'seconds':>9} {'times as fast':>14} {'others':>6}"
    for made in rows:
        beyond, total = (
            f"{made[name]:.2f}" if name in made else ""
            for name in ("beyond_x_size", "total_x_size")
        )
        mark = "*" if made["size"] > here["cores"] else " "
        resident = (
            "not permitted"
            if made["resident_bytes"] is None
            else f"{made['resident_bytes'] / 1e6:.1f}"
        )
        speed = f"{made['speed_up']:.2f}" if "speed_up" in made else ""
        yield (
            f"{made['what']:10} {made['tokens']:7} {made['size']:4}  {made['schedule']:10}"
            f" {made['beyond_bytes'] / 1e6:10.1f} {beyond:>6} {made['total_bytes'] / 1e6:10.1f}"
            f" {total:>6} {resident:>12} {made['seconds']:8.2f}{mark} {speed:>13}{mark}"
            f" {made['others']:6.0%}"
        )
    yield from remarks(rows, here["cores"], max(task["tokens"]))


def remarks(rows: list[dict[str, Any]], cores: int, longest_tokens: int) -> Iterator[str]:
    """Warnings below the table."""
    if any(made["size"] > cores for made in rows):
        yield (f"* more ranks than the {cores} cores: memory is right, time is not comparable")
    longest = [
        made for made in rows if made["tokens"] == longest_tokens and "beyond_x_size" in made
    ]
    off = [
        made for made in longest if made["what"] == "attention" and made["beyond_x_size"] > 1 + BAR
    ]
    for made in off:
        yield (
            f"above 1/size by more than {BAR:.0%}: {made['schedule']} of {made['size']} at"
            f" {made['tokens']:,} tokens"
        )
    yield from warn_if_not_quiet(max(made["others"] for made in rows))


OPTIONS: dict[str, dict[str, Any]] = {
    "--tokens": {
        "type": numbers,
        "default": "16384,32768,65536",
        "help": "lengths of the sequence, separated by commas",
    },
    "--sizes": {
        "type": numbers,
        "default": "1,2,4",
        "help": "sizes of the sequence axis; ratios need 1 among them",
    },
    "--schedules": {
        "default": "ring_lean,ring",
        "help": f"separated by commas, of: {', '.join(SCHEDULES)}",
    },
    "--what": {"choices": (*WHAT, "both"), "default": "attention", "help": "what is measured"},
    "--cut": {"choices": CUTS, "default": "zigzag", "help": "which rank holds which tokens"},
    "--heads": {
        "type": int,
        "default": 4,
        "help": "query heads; memory ratios depend on heads : KV heads only",
    },
    "--kv-heads": {"type": int, "default": 1, "help": "KV heads; they divide the query heads"},
    "--width": {
        "type": int,
        "default": 32,
        "help": "of a head; the model's hidden size is heads x width",
    },
    "--layers": {"type": int, "default": 2, "help": "of the model"},
    "--vocabulary": {"type": int, "default": 4096, "help": "vocab size of the model"},
    "--deadline": {
        "type": float,
        "default": 1800.0,
        "help": "seconds that the ranks of one size may take",
    },
}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    require_positive(
        parser, args, ("heads", "kv_heads", "width", "layers", "vocabulary", "deadline")
    )
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}")
    if args.vocabulary < 3:
        parser.error("--vocabulary must be 3 or more")
    args.sizes, args.tokens = sorted(set(args.sizes)), sorted(set(args.tokens))
    if args.tokens[0] < 2 * args.sizes[-1]:
        parser.error(
            f"--tokens {args.tokens[0]} are fewer than two a rank; set {2 * args.sizes[-1]} or more"
        )
    args.what = list(WHAT) if args.what == "both" else [args.what]
    args.schedules = args.schedules.split(",")
    if not set(args.schedules) <= set(SCHEDULES):
        parser.error(
            f"--schedules is {','.join(args.schedules)!r}; choose of {', '.join(SCHEDULES)}"
        )
    for size in args.sizes if "ulysses" in args.schedules else []:
        if args.heads % size or (args.kv_heads % size and size % args.kv_heads):
            parser.error(
                f"--schedules has ulysses, but {size} ranks cannot share {args.heads} heads; set"
                " --heads to a multiple"
            )
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_tool(
        "long_context",
        arguments=arguments,
        work=work,
        measure=lambda args: {"rows": compare(args)},
        show=show,
        argv=argv,
    )


if __name__ == "__main__":
    sys.exit(main())
