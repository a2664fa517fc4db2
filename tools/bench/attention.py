"""Attention split by token: schedules against one rank on CPU, the Triton block against torch's own
kernels on a GPU.

    python tools/bench/attention.py [--json] [--rounds 5] [--tokens 16384] [--ranks 2]
    python tools/bench/attention.py --device cuda [--rounds 10] [--ranks 8] [--rank-tokens 8192]

CPU: forward and backward of one attention layer in float32. `one rank` is one process with one
thread and no schedule; the others are `--ranks` gloo ranks with one thread each, which start
together, and the time is that of the last to end. All take turns within a round. Before that each
schedule's output and gradients are checked against those of one rank, and a difference ends the
run. Ulysses is left out where the ranks cannot share the heads. With `--window` all have a sliding
window, but for `one rank, no window`. With `--group 512:8x64` the sequence holds as many groups of
8 responses of 64 tokens as fit, each prompt of 512 tokens once in front of its responses; in
`one rank, repeated` it is in front of each. Below the table stand the tokens and the pairs of query
and key of each way. `others` is the share of the CPU
that processes outside of the run took in a round: above a few percent the times are worth little,
and the CPU seconds of the busiest rank, which waiting does not lengthen, say more.

GPU: bfloat16. First whole kernels: the Triton block beside torch's flash attention and cuDNN, and
beside the kernels of variable length that `training.attention: torch` and `flash_attn` take, the
last where the package is installed; forward and backward apart, in TFLOP/s of the pairs that causal
attention must compute (all visible: of all pairs). `triton, all visible` has no masked tile, so
what it is faster than `triton, causal` is the price of the mask and of tiles half hidden. Then the
ring, one rank after the other on this one GPU: the schedule as it is, with local copies in place of
receives, so everything but the network. Ideal is the whole sequence by the same block, or by flash,
divided by the number of ranks; what counts is the slowest.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import attention_cpu
import attention_inputs
from common import command_line, require_positive, run_tool
from launch_ranks import launch

DEFAULTS = {
    "cpu": {"rounds": 5, "ranks": 2, "heads": 8, "kv_heads": 2, "width": 64},
    "cuda": {"rounds": 10, "ranks": 8, "heads": 32, "kv_heads": 8, "width": 128},
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Schedules on CPU ranks, or kernels and rings on a GPU."""
    if args.device == "cpu":
        task = {name: value for name, value in vars(args).items() if name != "json"}
        ranks = launch(
            __file__,
            task,
            num_ranks=args.ranks,
            deadline_s=args.deadline,
            environment={"CUDA_VISIBLE_DEVICES": ""},
        )
        return attention_cpu.table_of(ranks[0])
    import attention_cuda
    import torch

    device = torch.device("cuda")
    found = attention_cuda.bench_kernels(args, device)
    torch.cuda.empty_cache()
    found |= attention_cuda.bench_ring(args, device)
    torch.cuda.empty_cache()
    for name, value in attention_cuda.bench_flash_attn(args, device).items():
        found[name] |= value
    return found | {"best": attention_cuda.best_of(found["kernels"])}


def show(result: dict[str, Any]) -> list[str]:
    """The result as lines of a table."""
    here, task = result["machine"], result["task"]
    chip = here["gpu"] if task["device"] == "cuda" else here["cpu"]
    head = [
        f"{chip}, {here['cores']} cores, torch {here['torch']}; {task['rounds']} rounds; median"
        " (smallest to largest)",
        f"{task['heads']} query heads, {task['kv_heads']} KV heads of width {task['width']};"
        f" {task['tokens']:,} tokens",
    ]
    if task["device"] == "cpu":
        return head + attention_cpu.show(result)
    import attention_cuda

    return head + attention_cuda.show(result)


OPTIONS: dict[str, dict[str, Any]] = {
    "--device": {
        "choices": ("cpu", "cuda"),
        "default": "cpu",
        "help": "cpu: schedules; cuda: kernels and rings",
    },
    "--rounds": {"type": int, "help": "turns that each contender gets (cpu 5, cuda 10)"},
    "--tokens": {
        "type": int,
        "default": 16384,
        "help": "tokens of the sequence (of the kernels' sequence on a GPU)",
    },
    "--ranks": {"type": int, "help": "ranks that share a sequence (cpu 2, cuda 8)"},
    "--rank-tokens": {
        "type": int,
        "default": 8192,
        "help": "GPU: tokens of each rank in a ring",
    },
    "--documents": {
        "type": int,
        "default": 1,
        "help": "CPU: documents in the packed sequence, of uneven lengths",
    },
    "--group": {
        "type": attention_inputs.group,
        "default": None,
        "help": "CPU: groups as prompt tokens : responses x response tokens, beside one rank with"
        " repeated prompts",
    },
    "--window": {
        "type": int,
        "default": 0,
        "help": "CPU: sliding window in tokens, beside one rank without; 0 for none",
    },
    "--packed": {
        "type": int,
        "default": 24,
        "help": "GPU: documents in the packed sequences, of uneven lengths",
    },
    "--heads": {"type": int, "help": "query heads (cpu 8, cuda 32)"},
    "--kv-heads": {"type": int, "help": "KV heads (cpu 2, cuda 8)"},
    "--width": {"type": int, "help": "width of a head (cpu 64, cuda 128)"},
    "--deadline": {
        "type": float,
        "default": 1800.0,
        "help": "CPU: seconds that the ranks may take",
    },
}
AT_LEAST_ONE = (
    "rounds",
    "tokens",
    "ranks",
    "rank_tokens",
    "documents",
    "packed",
    "heads",
    "kv_heads",
    "width",
)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    require_positive(parser, args, AT_LEAST_ONE)
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}")
    if max(args.documents, args.packed) > args.tokens:
        parser.error("--documents and --packed must not exceed --tokens")
    if args.group and args.documents > 1:
        parser.error("--group and --documents exclude each other")
    if args.group and args.group[0] + args.group[1] * args.group[2] > args.tokens:
        parser.error("--group must not exceed --tokens")
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error(
                "--device cuda, but torch sees no GPU here; leave it out to measure on the CPU"
            )
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_tool(
        "attention",
        arguments=arguments,
        work=attention_cpu.work,
        measure=measure,
        show=show,
        argv=argv,
    )


if __name__ == "__main__":
    sys.exit(main())
