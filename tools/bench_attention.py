"""Attention split by token: schedules against one rank on CPU, the Triton block against torch's own
kernels on a GPU.

    python tools/bench_attention.py [--json] [--rounds 5] [--tokens 16384] [--documents 1] [--ranks
    2] python tools/bench_attention.py --device cuda [--json] [--rounds 10] [--tokens 16384]
    [--ranks 8] [--rank-tokens 8192]

CPU: forward and backward of one attention layer in float32. `one rank` is one process with one
thread and no schedule; the others are `--ranks` gloo ranks with one thread each, which start
together, and the time is that of the last to end. All take turns within a round. Before that each
schedule's output and gradients are checked against those of one rank, and a difference ends the
run. Ulysses is left out where the ranks cannot share the heads. `others` is the share of the CPU
that processes outside of the run took in a round: above a few percent the times are worth little,
and the CPU seconds of the busiest rank, which waiting does not lengthen, say more.

GPU: bfloat16. First whole kernels: the Triton block beside torch's flash attention and cuDNN,
forward and backward apart, in TFLOP/s of the pairs that causal attention must compute (all visible:
of all pairs). `triton, all visible` has no masked tile, so what it is faster than `triton, causal`
is the price of the mask and of tiles half hidden. Then the ring, one rank after the other on this
one GPU: the schedule as it is, with local copies in place of receives, so everything but the
network. Ideal is the whole row by the same block, or by flash, divided by the number of ranks; what
counts is the slowest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.kernels.block import Positions
from megarl.kernels.blocks import BLOCKS
from megarl.kernels.sequence_attention import AttentionPlan, sequence_attention
from megarl.parallel.sequence import cut

QUIET = 0.05
AGREES = 1e-5
SCHEDULES: dict[str, tuple[str, str, bool]] = {
    # name: cut, transport, whether all ranks are one Ulysses group
    "contiguous ring": ("contiguous", "ring", False),
    "zigzag ring": ("zigzag", "ring", False),
    "zigzag lean ring": ("zigzag", "ring_lean", False),
    "all-gather, zigzag": ("zigzag", "all_gather", False),
    "Ulysses": ("contiguous", "ring", True),
}
DEFAULTS = {
    "cpu": {"rounds": 5, "ranks": 2, "heads": 8, "kv_heads": 2, "width": 64},
    "cuda": {"rounds": 10, "ranks": 8, "heads": 32, "kv_heads": 8, "width": 128},
}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def documents(tokens: int, count: int) -> torch.Tensor:
    """Starts [count + 1] of documents of uneven lengths, the same on every rank."""
    if count == 1:
        return torch.tensor([0, tokens])
    return torch.tensor([0, *sorted(random.Random(0).sample(range(1, tokens), count - 1)), tokens])


def causal_pairs(starts: torch.Tensor) -> int:
    """(query, key) pairs that causal attention inside documents computes."""
    return sum(n * (n + 1) // 2 for n in (starts[1:] - starts[:-1]).tolist())


def make_tensors(
    args: argparse.Namespace, tokens: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    draw = torch.Generator(device).manual_seed(0)
    counts = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    return [
        torch.randn(tokens, count, args.width, generator=draw, device=device, dtype=dtype)
        for count in counts
    ]


class Alone:
    """An exchange of one."""

    rank, size = 0, 1


def layer(
    tensors: list[torch.Tensor], plan: AttentionPlan, inner: Any, outer: Any, transport: str
) -> list[torch.Tensor]:
    """Forward and backward of one layer: output and gradients."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = sequence_attention(q, k, v, plan, inner, outer, q.shape[2] ** -0.5, transport)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


# CPU: gloo ranks


def busy_s() -> float:
    """CPU seconds this machine has worked since it started, all cores and processes; 0 where that
    cannot be known.
    """
    try:
        user, nice, system, _, _, irq, softirq, *_ = (
            Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        )
    except OSError:
        return 0.0
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def cpu_worker(given: dict[str, Any], result: Path) -> None:
    """One gloo rank: every schedule in turn, `rounds` times; rank 0 writes what it measured."""
    from megarl.parallel.collectives import barrier, gather_objects
    from megarl.parallel.exchange import RingExchange
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh, finalise, initialise

    args = argparse.Namespace(**given)
    torch.set_num_threads(1)
    device = initialise(timeout_s=args.deadline)
    ring_mesh, ulysses_mesh = (
        ProcessMesh(Layout(sequence=args.ranks), ulysses=u) for u in (1, args.ranks)
    )
    whole, starts = (
        make_tensors(args, args.tokens, torch.float32, device),
        documents(args.tokens, args.documents),
    )
    runs: dict[str, tuple[list[torch.Tensor], Callable[[], list[torch.Tensor]]]] = {}
    plan = AttentionPlan.of([torch.arange(args.tokens)], starts, device)
    runs["one rank"] = (whole, lambda plan=plan: layer(whole, plan, Alone(), Alone(), "ring"))
    wanted = layer(whole, plan, Alone(), Alone(), "ring")
    shares_heads = args.heads % args.ranks == 0 and (
        args.kv_heads % args.ranks == 0 or args.ranks % args.kv_heads == 0
    )
    for name, (how, transport, is_ulysses) in SCHEDULES.items():
        if is_ulysses and not shares_heads:
            continue
        mesh = ulysses_mesh if is_ulysses else ring_mesh
        indices = cut(starts, args.ranks, how)
        plan = AttentionPlan.of(indices, starts, device, ulysses=mesh.ulysses.size)
        mine = indices[mesh.sequence.rank]
        inner, outer = RingExchange(mesh.ulysses), RingExchange(mesh.ring, mesh.ring_back)
        tensors = [x[mine] for x in whole]
        runs[name] = (
            tensors,
            lambda t=tensors, p=plan, i=inner, o=outer, via=transport: layer(t, p, i, o, via),
        )
        for found, expected in zip(runs[name][1](), wanted, strict=True):
            error = float((found - expected[mine]).norm() / expected[mine].norm())
            if error > AGREES:
                raise AssertionError(
                    f"{name} differs from one rank by {error:.1e}, more than {AGREES:.0e}"
                )
    everybody, is_first = ring_mesh.sequence, ring_mesh.sequence.rank == 0
    measured: dict[str, Any] = {
        "seconds": {name: [] for name in runs},
        "busiest": {name: [] for name in runs},
        "others": [],
    }
    for _ in range(args.rounds):
        worked, began, round_cpu_s = busy_s(), time.perf_counter(), time.process_time()
        for name, (_, run) in runs.items():
            barrier(everybody)
            start, start_cpu_s = time.perf_counter(), time.process_time()
            if is_first or name != "one rank":
                run()
            cpu_s = time.process_time() - start_cpu_s
            barrier(everybody)
            measured["seconds"][name].append(time.perf_counter() - start)
            measured["busiest"][name].append(max(gather_objects(cpu_s, everybody)))
        ours_s = sum(gather_objects(time.process_time() - round_cpu_s, everybody))
        wall_s = (time.perf_counter() - began) * (os.cpu_count() or 1)
        measured["others"].append(max(0.0, busy_s() - worked - ours_s) / wall_s)
    if is_first:
        result.write_text(json.dumps(measured))
    for mesh in (ring_mesh, ulysses_mesh):
        mesh.destroy()
    finalise()


def bench_cpu(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks and gather what they measured. Raises `RuntimeError` with their words where
    one fails.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="attention-") as folder:
        result = Path(folder) / "result.json"
        ranks, outputs = [], []
        for rank in range(args.ranks):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": args.ranks,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **{k: str(v) for k, v in place.items()},
            }
            outputs.append((Path(folder) / f"output-{rank}").open("w+"))
            command = [sys.executable, __file__, "--worker", json.dumps(vars(args)), str(result)]
            ranks.append(
                subprocess.Popen(
                    command, env=environment, stdout=outputs[-1], stderr=subprocess.STDOUT
                )
            )
        deadline = time.monotonic() + args.deadline
        try:
            while any(rank.poll() is None for rank in ranks) and not any(
                rank.poll() for rank in ranks
            ):
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"the ranks took more than {args.deadline:.0f} s; raise --deadline or lower"
                        " --tokens"
                    )
                time.sleep(0.1)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        said = []
        for output in outputs:
            output.seek(0)
            said.append(output.read())
            output.close()
        failed = next((number for number, rank in enumerate(ranks) if rank.returncode > 0), None)
        if failed is not None or not result.exists():
            raise RuntimeError(f"rank {failed or 0} failed:\n{said[failed or 0][-2000:]}")
        measured = json.loads(result.read_text())
    seconds = measured["seconds"]
    table = {}
    for name, values in seconds.items():
        table[name] = {
            "seconds": spread(values),
            "busiest_cpu_s": spread(measured["busiest"][name]),
        }
        for key, base in (("x_one_rank", "one rank"), ("x_contiguous_ring", "contiguous ring")):
            table[name][key] = spread([b / a for a, b in zip(values, seconds[base], strict=True)])
    return {"schedules": table, "others": spread(measured["others"])}


# GPU: one device


class LocalCopies:
    """An exchange that stands for rank `rank` of `size`: what it receives is a copy of something of
    that shape.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.spare: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def shift(
        self, tensor: torch.Tensor, shape: Sequence[int], *, channel: int = 0, offset: int = 1
    ) -> LocalCopies.Here:
        key = (tensor.dtype, channel)
        if key not in self.spare or self.spare[key].shape[0] < shape[0]:
            self.spare[key] = torch.randn(tuple(shape), device=tensor.device).to(tensor.dtype)
        return LocalCopies.Here(self.spare[key][: shape[0]].clone())

    class Here:
        """A message that has arrived."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def wait(self) -> torch.Tensor:
            return self.tensor


def timed(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each on the GPU, in turns; a first round, which compiles, does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            before.record()
            run()
            after.record()
            torch.cuda.synchronize()
            if number:
                seconds[name].append(before.elapsed_time(after) / 1e3)
    return seconds


def block_runs(
    name: str, queries: Positions, keys: Positions, tensors: list[torch.Tensor]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward of the Triton block over one pair of positions."""
    block, (q, k, v, upstream) = BLOCKS["triton"](), tensors
    scale, work = q.shape[2] ** -0.5, None
    work = block.prepare(queries, keys, q.device)
    if work is None:
        raise AssertionError(f"{name} sees nothing")
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    grads = [torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v)]

    def forward() -> None:
        lse.fill_(-torch.inf)  # a new beginning: what `out` holds then has no weight
        block.forward(q, k, v, work, scale, out, lse)

    def backward() -> None:
        block.backward(upstream, q, k, v, final, lse, work, scale, *grads)

    forward()
    final = out.to(q.dtype)
    return forward, backward


def stock_runs(
    backend: Any, tensors: list[torch.Tensor]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward of causal attention over the whole row by one of torch's own kernels."""
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v, upstream = (x.transpose(0, 1)[None].detach() for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )

    def forward() -> None:
        with torch.no_grad():
            attend()

    out = attend()
    return forward, lambda: torch.autograd.grad(out, inputs, upstream, retain_graph=True) and None


def bench_kernels(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """TFLOP/s of whole kernels over one row of `--tokens`."""
    from torch.nn.attention import SDPBackend

    tokens, tensors = args.tokens, make_tensors(args, args.tokens, torch.bfloat16, device)
    one, packed = documents(tokens, 1), documents(tokens, args.packed)
    whole, two = torch.arange(tokens), torch.tensor([0, 2 * tokens])
    pair = cut(two, 2, "zigzag")[0]
    positions = {
        "triton, causal": (Positions.of(whole, one), Positions.of(whole, one), causal_pairs(one)),
        "triton, all visible": (
            Positions.of(whole + tokens, two),
            Positions.of(whole, two),
            tokens * tokens,
        ),
        "triton, zigzag piece": (
            Positions.of(pair, two),
            Positions.of(pair, two),
            causal_pairs(one),
        ),
        f"triton, {args.packed} documents": (
            Positions.of(whole, packed),
            Positions.of(whole, packed),
            causal_pairs(packed),
        ),
    }
    runs: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {}
    pairs, missing = {}, {}
    for name, (queries, keys, count) in positions.items():
        runs[name], pairs[name] = block_runs(name, queries, keys, tensors), count
    for name, backend in (
        ("torch flash", SDPBackend.FLASH_ATTENTION),
        ("torch cuDNN", SDPBackend.CUDNN_ATTENTION),
    ):
        try:
            runs[name], pairs[name] = stock_runs(backend, tensors), causal_pairs(one)
        except RuntimeError as error:
            missing[name] = str(error).splitlines()[0]
    table: dict[str, Any] = {name: {} for name in runs}
    for place, (way, flop_per_pair) in enumerate((("forward", 4), ("backward", 10))):
        for name, seconds in timed(
            {name: both[place] for name, both in runs.items()}, args.rounds
        ).items():
            flop = flop_per_pair * pairs[name] * args.heads * args.width
            table[name][way] = {
                "seconds": spread(seconds),
                "tflops": spread([flop / s / 1e12 for s in seconds]),
            }
    return {"kernels": table, "missing": missing}


def bench_ring(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every rank's ring in turn, with copies for receives, against the whole row divided by the
    number of ranks.
    """
    from torch.nn.attention import SDPBackend

    tokens, table = args.ranks * args.rank_tokens, {}
    whole = make_tensors(args, tokens, torch.bfloat16, device)
    for title, count in (("one document", 1), (f"{args.packed} documents", args.packed)):
        starts = documents(tokens, count)
        alone = AttentionPlan.of([torch.arange(tokens)], starts, device)
        runs: dict[str, Callable[[], Any]] = {
            "whole": lambda p=alone: layer(whole, p, Alone(), Alone(), "ring")
        }
        if count == 1:
            forward, backward = stock_runs(SDPBackend.FLASH_ATTENTION, whole)
            runs["flash"] = lambda f=forward, b=backward: (f(), b())
        for how in ("zigzag", "zigzag_document"):
            indices = cut(starts, args.ranks, how)
            plan = AttentionPlan.of(indices, starts, device)
            for rank, index in enumerate(indices):
                mine, outer = [x[index.to(device)] for x in whole], LocalCopies(rank, args.ranks)
                runs[f"{how} {rank}"] = lambda m=mine, p=plan, o=outer: layer(
                    m, p, Alone(), o, "ring"
                )
        seconds = {
            name: statistics.median(values) for name, values in timed(runs, args.rounds).items()
        }
        for how in ("zigzag", "zigzag_document"):
            slowest = max(seconds[f"{how} {rank}"] for rank in range(args.ranks))
            row = {
                "whole_s": seconds["whole"],
                "slowest_rank_s": slowest,
                "of_ideal": seconds["whole"] / args.ranks / slowest,
            }
            if "flash" in seconds:
                row |= {
                    "flash_s": seconds["flash"],
                    "of_flash_ideal": seconds["flash"] / args.ranks / slowest,
                }
            table[f"{title}, {how}"] = row
    return {"ring": table}


def show_cpu(result: dict[str, Any]) -> list[str]:
    """The schedules as lines of a table."""
    lines = [
        f"{'schedule':20} {'s forward + backward':>24} {'busiest, CPU s':>24} {'x one rank':>22}"
        f" {'x contiguous ring':>22}"
    ]
    for name, row in result["schedules"].items():
        keys = ("seconds", "busiest_cpu_s", "x_one_rank", "x_contiguous_ring")
        cells = ["{median:.2f} ({min:.2f} to {max:.2f})".format(**row[key]) for key in keys]
        lines.append(f"{name:20} {cells[0]:>24} {cells[1]:>24} {cells[2]:>22} {cells[3]:>22}")
    lines.append(
        "others: {median:.0%} ({min:.0%} to {max:.0%}) of the CPU".format(**result["others"])
    )
    if result["others"]["max"] > QUIET:
        lines.append("NOT QUIET: other processes were working; repeat on an idle machine")
    return lines


def show_cuda(result: dict[str, Any]) -> list[str]:
    """Kernels and rings as lines of a table."""
    lines = [f"{'kernel':28} {'forward TFLOP/s':>26} {'backward TFLOP/s':>26}"]
    for name, row in result["kernels"].items():
        cells = [
            "{median:.0f} ({min:.0f} to {max:.0f})".format(**row[way]["tflops"])
            for way in ("forward", "backward")
        ]
        lines.append(f"{name:28} {cells[0]:>26} {cells[1]:>26}")
    lines += [f"{name:28} not on this machine: {why}" for name, why in result["missing"].items()]
    lines.append(
        f"\n{'ring, forward + backward':32} {'whole ms':>9} {'slowest rank ms':>16} {'of ideal':>9}"
        f" {'of flash / ranks':>17}"
    )
    for name, row in result["ring"].items():
        flash = f"{row['of_flash_ideal']:.1%}" if "of_flash_ideal" in row else ""
        lines.append(
            f"{name:32} {row['whole_s'] * 1e3:9.1f} {row['slowest_rank_s'] * 1e3:16.2f}"
            f" {row['of_ideal']:9.1%} {flash:>17}"
        )
    return lines


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cpu: schedules; cuda: kernels and rings",
    )
    parser.add_argument(
        "--rounds", type=int, help="turns that each contender gets (cpu 5, cuda 10)"
    )
    parser.add_argument(
        "--tokens", type=int, default=16384, help="tokens of the row (of the kernels' row on a GPU)"
    )
    parser.add_argument("--ranks", type=int, help="ranks that share a row (cpu 2, cuda 8)")
    parser.add_argument(
        "--rank-tokens", type=int, default=8192, help="GPU: tokens of each rank in a ring"
    )
    parser.add_argument(
        "--documents", type=int, default=1, help="CPU: documents in the row, of uneven lengths"
    )
    parser.add_argument(
        "--packed",
        type=int,
        default=24,
        help="GPU: documents in the packed rows, of uneven lengths",
    )
    parser.add_argument("--heads", type=int, help="query heads (cpu 8, cuda 32)")
    parser.add_argument("--kv-heads", type=int, help="key heads (cpu 2, cuda 8)")
    parser.add_argument("--width", type=int, help="width of a head (cpu 64, cuda 128)")
    parser.add_argument(
        "--deadline", type=float, default=1800.0, help="CPU: seconds that the ranks may take"
    )
    args = parser.parse_args(argv)
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in (
        "rounds",
        "tokens",
        "ranks",
        "rank_tokens",
        "documents",
        "packed",
        "heads",
        "kv_heads",
        "width",
    ):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; set it to 1 or more"
            )
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}")
    if max(args.documents, args.packed) > args.tokens:
        parser.error("--documents and --packed must not exceed --tokens")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda, but torch sees no GPU here; leave it out to measure on the CPU"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--worker"]:
        cpu_worker(json.loads(argv[1]), Path(argv[2]))
        return 0
    args = arguments(argv)
    device = torch.device(args.device)
    chip = (
        torch.cuda.get_device_name()
        if args.device == "cuda"
        else f"{platform.processor() or platform.machine()}"
    )
    result: dict[str, Any] = {
        "machine": chip,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "settings": vars(args),
    }
    try:
        if args.device == "cpu":
            result |= bench_cpu(args)
        else:
            result |= bench_kernels(args, device)
            torch.cuda.empty_cache()
            result |= bench_ring(args, device)
    except (RuntimeError, AssertionError) as error:
        print(f"bench_attention: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(result))
        return 0
    print(
        f"{chip}, {os.cpu_count()} cores, torch {torch.__version__}; {args.rounds} rounds; median"
        " (smallest to largest)"
    )
    print(
        f"{args.heads} query heads, {args.kv_heads} key heads of width {args.width};"
        f" {args.tokens:,} tokens"
    )
    print("\n".join(show_cpu(result) if args.device == "cpu" else show_cuda(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
