"""Log-probs and entropies with gradients, eager against fused: peak memory and time.

    python tools/bench/logprobs.py [--json] [--tokens 4096] [--vocabulary 151936] [--hidden 256]
    python tools/bench/logprobs.py --device cuda        32,768 tokens, vocab 151,936, hidden 4,096,
                                                        bfloat16

    eager          the whole logits: torch's matmul, log_softmax, gather, entropy, autograd's
                   backward
    eager oneDNN   the same with megarl's matrix product, on CPU only: what fusing alone is worth
    fused          megarl.kernels.logprobs.linear_logprobs
    liger          the same with backend "liger", on CUDA where liger-kernel imports

One step is forward and backward, with an upstream gradient for each token's log-prob and entropy,
to both hidden states and weight. Every measurement is a process of its own; systems take turns, and
the table has medians over rounds.

Memory is the most that a step used beyond its inputs and the two gradients that are its result. On
CPU:
    VmHWM after the step, reset before it through /proc/self/clear_refs, minus VmRSS before it,
    minus the gradients' bytes
in a process of its own whose malloc gives every tensor of 64 KiB or more a mapping
(MALLOC_MMAP_THRESHOLD_), so that what is freed leaves VmRSS at once. A step of a few tokens goes
before, so that libraries are loaded. At the peak of eager the gradients need not be there yet:
subtracting them makes its figure smaller, not ours. The method is checked against tensors of known
size first, of which some are freed, and refused if it is off by more than 2 %. On CUDA:
max_memory_allocated.

Time is measured with the malloc that everybody has. On CPU it is one step a process, after one of a
few tokens: memory of this size goes back to the system when freed, so a second step would find
nothing warmer. On CUDA the median of --repeats. TFLOP/s-equivalent counts the products a step
cannot do without, 2 T H V forward and 6 T H V in all; fused makes one more, as it computes the
logits again. `CPU s` is the CPU time of a step, which other processes disturb least. Runs are
refused where results differ; `others` is the share of the CPU that processes outside of the run
took meanwhile: above a few percent the times are worth little.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
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
)
from launch_ranks import launch
from logprobs_step import EAGER, FUSED, LIGER, ONEDNN, SYSTEMS, TIMES, work

DEFAULTS = {
    "cpu": {"tokens": 4096, "vocabulary": 151936, "hidden": 256, "dtype": "float32"},
    "cuda": {"tokens": 32768, "vocabulary": 151936, "hidden": 4096, "dtype": "bfloat16"},
}
EAGER_COPIES = 6
"""Copies of the float32 logits that eager needs at most, to check the memory before; it used 4 to 5
when this was written.
"""
AGREE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2}
"""By how much results of two systems may differ, relative to their size."""


def measure_one(args: argparse.Namespace, system: str, what: str) -> dict[str, Any]:
    """Memory or time of one system, in a process of its own. Raises `RuntimeError` if it fails."""
    given = {
        name: getattr(args, name)
        for name in ("device", "tokens", "vocabulary", "hidden", "dtype", "threads", "repeats")
    }
    environment = {"OMP_NUM_THREADS": str(args.threads)}
    if what == "memory":
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    task = {**given, "system": system, "measure": what}
    with Others() as others:
        (found,) = launch(
            __file__, task, num_ranks=1, deadline_s=args.deadline, environment=environment
        )
    found["others"] = others.share
    said = {name: value for name, value in found.items() if name != "digest"}
    print(f"{system:13} {what:7} {said}", file=sys.stderr, flush=True)
    return found


def compare(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """{system: row of the table}. Measures the peak memory of every implementation in
    `args.systems`, then the times of those that fit into memory, alternating for `args.rounds`.

    Raises `RuntimeError` if their results differ.
    """
    rows: dict[str, dict[str, Any]] = {
        system: measure_one(args, system, "memory") for system in args.systems
    }
    fitting = [system for system in args.systems if "does_not_fit" not in rows[system]]
    for system in fitting[1:]:
        for name, mine, first in zip(
            ("log-probs", "entropies", "grad of hidden", "grad of weight"),
            rows[system]["digest"],
            rows[fitting[0]]["digest"],
            strict=True,
        ):
            if not abs(mine - first) <= AGREE[args.dtype] * abs(first):
                raise RuntimeError(
                    f"{name} differ: norm {mine} of {system}, {first} of {fitting[0]}"
                )
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in fitting}
    for _ in range(args.rounds):
        for system in fitting:
            runs[system].append(measure_one(args, system, "time"))
    products = args.tokens * args.vocabulary * args.hidden / 1e12
    for system in fitting:
        row, of_system = rows[system], runs[system]
        row |= {name: spread([run[name] for run in of_system]) for name in TIMES}
        row["forward_tflops"] = 2 * products / row["forward_s"]["median"]
        row["step_tflops"] = 6 * products / row["step_s"]["median"]
        row["others"] = max(run["others"] for run in of_system)
        if EAGER in fitting and system != EAGER:
            row["memory_of_eager"] = row["peak_bytes"] / rows[EAGER]["peak_bytes"]
            pairs = zip(of_system, runs[EAGER], strict=True)
            row["times_as_fast"] = spread(
                [eager["step_s"] / ours["step_s"] for ours, eager in pairs]
            )
    return rows


def show(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    here, task = result["machine"], result["task"]
    yield f"{here.get('gpu', here['cpu'])}; torch {here['torch']}; {task['threads']} threads"
    yield (
        f"{task['tokens']:,} tokens, vocab {task['vocabulary']:,}, hidden {task['hidden']:,},"
        f" {task['dtype']}; {task['rounds']} rounds, median (smallest to largest)"
    )
    head = (
        f"{'system':13} {'peak MB':>9} {'of eager':>8} {'forward s':>25} {'step s':>25}"
        f" {'CPU s':>7} {'times as fast':>20}"
    )
    yield f"{head} {'TFLOP/s fwd, step':>18} {'others':>6}"
    for system, row in result["systems"].items():
        if "does_not_fit" in row:
            yield f"{system:13} does not fit"
            continue
        share = f"{row['memory_of_eager']:.2%}" if "memory_of_eager" in row else ""
        ratio = cell(row["times_as_fast"], ".2f") if "times_as_fast" in row else ""
        forward, step = (cell(row[name], ".3f") for name in ("forward_s", "step_s"))
        rates = f"{row['forward_tflops']:.3g}, {row['step_tflops']:.3g}"
        yield (
            f"{system:13} {row['peak_bytes'] / 1e6:9,.0f} {share:>8} {forward:>25} {step:>25}"
            f" {row['cpu_s']['median']:7.2f} {ratio:>20} {rates:>18} {row['others']:6.0%}"
        )
    if FUSED in result["systems"]:
        yield (
            "largest chunk of logits of fused:"
            f" {result['systems'][FUSED]['room_bytes'] / 1e6:,.0f} MB"
        )
    yield from warn_if_not_quiet(max(row["others"] for row in result["systems"].values()))


OPTIONS: dict[str, dict[str, Any]] = {
    "--device": {"choices": tuple(DEFAULTS), "default": "cpu"},
    "--tokens": {"type": int, "help": "tokens of a step (cpu 4096, cuda 32768)"},
    "--vocabulary": {"type": int, "help": "vocab size (151936)"},
    "--hidden": {"type": int, "help": "hidden size (cpu 256, cuda 4096)"},
    "--dtype": {"choices": tuple(AGREE), "help": "cpu float32, cuda bfloat16"},
    "--systems": {"help": f"separated by commas, of: {', '.join(SYSTEMS)}"},
    "--rounds": {"type": int, "default": 3, "help": "turns that each system gets"},
    "--repeats": {
        "type": int,
        "help": "steps of a process that measures time; 1 on CPU, 10 on CUDA",
    },
    "--threads": {"type": int, "default": 1, "help": "torch's, in every process"},
    "--deadline": {
        "type": float,
        "default": 1800.0,
        "help": "seconds a single process may take",
    },
}


def require_memory(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with a usage error if the whole logits do not fit into memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(
        int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
    )
    needed = EAGER_COPIES * 4 * args.tokens * args.vocabulary
    if available < needed:
        parser.error(
            f"eager needs about {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are"
            f" available; set --tokens to {int(args.tokens * available / needed)} or less, or"
            " --systems fused"
        )


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    for name, value in {
        **DEFAULTS[args.device],
        "repeats": 1 if args.device == "cpu" else 10,
    }.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    require_positive(
        parser, args, ("tokens", "vocabulary", "hidden", "rounds", "repeats", "threads")
    )
    on_gpu = [EAGER, FUSED, *([LIGER] if importlib.util.find_spec("liger_kernel") else [])]
    default = [EAGER, ONEDNN, FUSED] if args.device == "cpu" else on_gpu
    args.systems = args.systems.split(",") if args.systems else default
    if not set(args.systems) <= set(SYSTEMS):
        parser.error(f"--systems is {','.join(args.systems)!r}; choose of {', '.join(SYSTEMS)}")
    if args.device == "cpu" and LIGER in args.systems:
        parser.error("--systems has liger, which needs --device cuda")
    if args.device == "cpu" and {EAGER, ONEDNN} & set(args.systems):
        require_memory(parser, args)
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_tool(
        "logprobs",
        arguments=arguments,
        work=work,
        measure=lambda args: {"systems": compare(args)},
        show=show,
        argv=argv,
    )


if __name__ == "__main__":
    sys.exit(main())
