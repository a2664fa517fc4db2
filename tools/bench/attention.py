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
`one rank, repeated` it is in front of each. `MB` is the most that torch's allocator gave beyond q,
k, v and the gradient of the output (tools/bench/peak_memory.py), on the rank with the most;
`x ranks` is that times the ranks, over that of one rank: 1.00 falls exactly as 1 / ranks. Below the
table stand the tokens and the pairs of query and key of each way.

GPU: bfloat16. First whole kernels: the Triton and cuDNN blocks beside torch's flash attention and
cuDNN, and beside the kernels of variable length that `training.attention: torch`, `cudnn` and
`flash_attn` take, the last where the package is installed; forward and backward apart, in TFLOP/s
of the pairs that causal attention must compute (all visible: of all pairs). `triton, all visible`
has no masked tile, so what it is faster than `triton, causal` is the price of the mask and of tiles
half hidden. Then the ring, one rank after the other on this one GPU: the schedule as it is, with
local copies in place of receives, so everything but the network. Ideal is the whole sequence by the
same block, or by flash, divided by the number of ranks; what counts is the slowest.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from common import Args, group_shape, in_turns, ratios, run_tool, spread, table
from launch_ranks import launch, ready

from megarl.kernels.sequence_attention import AttentionPlan, sequence_attention
from megarl.parallel.sequence import cut

DEFAULTS = {
    "cpu": {"rounds": 5, "ranks": 2, "heads": 8, "kv_heads": 2, "width": 64},
    "cuda": {"rounds": 10, "ranks": 8, "heads": 32, "kv_heads": 8, "width": 128},
}
OPTIONS = {
    "--device": ("cpu", "cpu: schedules; cuda: kernels and rings", ("cpu", "cuda")),
    "--rounds": (0, "turns that each contender gets; default: 5, on a GPU 10"),
    "--tokens": (16384, "tokens of the sequence (of the kernels' sequence on a GPU)"),
    "--ranks": (0, "ranks that share a sequence; default: 2, on a GPU 8"),
    "--rank-tokens": (8192, "GPU: tokens of each rank in a ring"),
    "--documents": (1, "CPU: documents in the packed sequence, of uneven lengths"),
    "--group": (None, "CPU: groups, as prompt tokens : responses x response tokens", group_shape),
    "--window": (0, "CPU: sliding window in tokens, beside one rank without; 0 for none"),
    "--packed": (24, "GPU: documents in the packed sequences, of uneven lengths"),
    "--heads": (0, "query heads; default: 8, on a GPU 32"),
    "--kv-heads": (0, "KV heads; default: 2, on a GPU 8"),
    "--width": (0, "width of a head; default: 64, on a GPU 128"),
    "--block": ("triton", "GPU: block of the rings, also path/to/file.py:Class of your own"),
}
AGREES = 1e-5
SCHEDULES: dict[str, tuple[str, str, bool]] = {
    # name: cut, transport, whether all ranks are one Ulysses group
    "contiguous ring": ("contiguous", "ring", False),
    "zigzag ring": ("zigzag", "ring", False),
    "zigzag lean ring": ("zigzag", "ring_lean", False),
    "all-gather, zigzag": ("zigzag", "all_gather", False),
    "Ulysses": ("contiguous", "ring", True),
}

# ------------------------------------------------------------------------------------------- inputs


def documents(tokens: int, count: int) -> torch.Tensor:
    """Starts [count + 1] of documents of uneven lengths, the same on every rank."""
    inner = random.Random(0).sample(range(1, tokens), count - 1)
    return torch.tensor([0, *sorted(inner), tokens])


def trees(tokens: int, shape: tuple[int, int, int]) -> tuple[torch.Tensor, list[int]]:
    """As many groups of `shape` as `tokens` hold, each prompt once in front of its responses:
    starts [D + 1] of the D documents, and for each document the one that it continues, or -1.
    """
    prompt, responses, response = shape
    lengths, parents = [0], list[int]()
    for _ in range(tokens // (prompt + responses * response)):
        parents += [-1] + [len(parents)] * responses
        lengths += [prompt] + [response] * responses
    return torch.tensor(lengths).cumsum(0), parents


def laid_out(args: Args) -> tuple[torch.Tensor, list[int]]:
    """The documents, or the trees, that the command line asks for; see `trees`."""
    if args.group:
        return trees(args.tokens, args.group)
    return documents(args.tokens, args.documents), []


def causal_pairs(starts: torch.Tensor) -> int:
    """(query, key) pairs that causal attention inside documents computes."""
    return sum(n * (n + 1) // 2 for n in (starts[1:] - starts[:-1]).tolist())


def make_tensors(
    args: Args, tokens: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    draw = torch.Generator(device).manual_seed(0)
    counts = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    make = partial(torch.randn, generator=draw, device=device, dtype=dtype)
    return [make(tokens, count, args.width) for count in counts]


ALONE = SimpleNamespace(rank=0, size=1)
"""An exchange of one."""


def layer(
    tensors: list[torch.Tensor], plan: AttentionPlan, inner: Any, outer: Any, transport: str
) -> list[torch.Tensor]:
    """Forward and backward of one layer: output and gradients."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = sequence_attention(q, k, v, plan, inner, outer, q.shape[2] ** -0.5, transport)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


# ----------------------------------------------------------------------------------- ranks on a CPU


def alone_runs(
    args: Args, device: torch.device
) -> Iterator[tuple[str, AttentionPlan, list[torch.Tensor]]]:
    """(name, plan, tensors) of one rank that has all tokens: with all that the command line asks
    for, then without the window, and with repeated prompts.
    """

    def whole(starts: torch.Tensor, parents: list[int]) -> tuple[AttentionPlan, Any]:
        tokens = int(starts[-1])
        plan = AttentionPlan.of([torch.arange(tokens)], starts, device, parents=parents)
        return plan, make_tensors(args, tokens, torch.float32, device)

    starts, parents = laid_out(args)
    plan, tensors = whole(starts, parents)
    yield "one rank", plan.within(args.window or None), tensors
    if args.window:
        yield "one rank, no window", plan, tensors
    if args.group:
        prompt, _, response = args.group
        count = sum(parent >= 0 for parent in parents)
        plan, tensors = whole(torch.arange(count + 1) * (prompt + response), [])
        yield "one rank, repeated", plan.within(args.window or None), tensors


def work(task: dict[str, Any]) -> dict[str, Any]:
    """One gloo rank: every schedule in turn, `rounds` times."""
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh

    args = Args(**task)
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(ready(args.deadline))
        layout = Layout(sequence=args.ranks)
        each = (ProcessMesh(layout, ulysses=size) for size in (1, args.ranks))
        meshes = [stack.enter_context(mesh) for mesh in each]
        return measure_schedules(args, device, meshes)


def measure_schedules(args: Args, device: torch.device, meshes: list[Any]) -> dict[str, Any]:
    """Seconds of each schedule by rounds, and bytes, on meshes without and with a Ulysses group."""
    from peak_memory import peak_of

    from megarl.parallel.collectives import barrier
    from megarl.parallel.exchange import RingExchange

    everybody = meshes[0].sequence
    alone = {name: found for name, *found in alone_runs(args, device)}
    runs: dict[str, Callable[[], Any]] = {
        name: partial(layer, tensors, plan, ALONE, ALONE, "ring")
        for name, (plan, tensors) in alone.items()
    }
    expected, *_ = [run() for run in runs.values()]  # all, so that none is timed cold
    starts, parents = laid_out(args)
    shares_keys = 0 in (args.kv_heads % args.ranks, args.ranks % args.kv_heads)
    for name, (how, transport, is_ulysses) in SCHEDULES.items():
        if is_ulysses and (args.heads % args.ranks or not shares_keys):
            continue
        mesh, indices = meshes[is_ulysses], cut(starts, args.ranks, how)
        size = mesh.ulysses.size
        plan = AttentionPlan.of(indices, starts, device, parents=parents, ulysses=size)
        mine = indices[mesh.sequence.rank]
        exchanges = RingExchange(mesh.ulysses), RingExchange(mesh.ring, mesh.ring_back)
        tensors = [x[mine] for x in alone["one rank"][1]]
        seen = plan.within(args.window or None)
        runs[name] = partial(layer, tensors, seen, *exchanges, transport)
        for found, whole in zip(runs[name](), expected, strict=True):
            error = float((found - whole[mine]).norm() / whole[mine].norm())
            if error > AGREES:
                raise RuntimeError(f"{name} differs from one rank by {error:.1e}, over {AGREES}")

    def timed(name: str) -> float:
        barrier(everybody)
        started_at = time.perf_counter()
        if everybody.rank == 0 or not name.startswith("one rank"):
            runs[name]()
        barrier(everybody)
        return time.perf_counter() - started_at

    seconds = in_turns(args.rounds, {name: partial(timed, name) for name in runs})
    return {
        "bytes": {name: peak_of(run)[0].allocated for name, run in runs.items()},
        "seconds": seconds,
        "pairs": {name: _pairs(plan) for name, (plan, _) in alone.items()},
        "tokens": {name: plan.lengths[0] for name, (plan, _) in alone.items()},
    }


def _pairs(plan: AttentionPlan) -> int:
    """(query, key) pairs that attention computes."""
    views = [view for own in plan.positions for view in own.views(plan.window)]
    return sum(int((view.index - view.first + 1).clamp_min(0).sum()) for view in views)


# ----------------------------------------------------------------------------------------- the tool


def measure(args: Args) -> dict[str, Any]:
    """Schedules on CPU ranks, or kernels and rings on a GPU."""
    for name, value in DEFAULTS[args.device].items():
        setattr(args, name, getattr(args, name) or value)
    if args.heads % args.kv_heads:
        raise ValueError(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}")
    if args.group and args.group[0] + args.group[1] * args.group[2] > args.tokens:
        raise ValueError("--group must not exceed --tokens")
    if args.device == "cuda":
        import attention_cuda

        return attention_cuda.measure(args)
    ranks = launch(__file__, vars(args), args.ranks, CUDA_VISIBLE_DEVICES="")
    seconds, alone = ranks[0]["seconds"], ranks[0]["bytes"]["one rank"]
    rows: dict[str, dict[str, Any]] = {}
    for name, values in seconds.items():
        most = max(rank["bytes"][name] for rank in ranks)
        size = 1 if name.startswith("one rank") else args.ranks
        rows[name] = {
            "schedule": name,
            "seconds": spread(values),
            "x_one_rank": ratios(seconds["one rank"], values),
            "x_contiguous_ring": ratios(seconds["contiguous ring"], values),
            "bytes": most,
            "x_ranks": most * size / alone,
        }
    return {"schedules": rows, **{name: ranks[0][name] for name in ("pairs", "tokens")}}


def show(result: dict[str, Any]) -> Iterator[str]:
    """Format what `measure` returns as the lines of tables."""
    if result["task"]["device"] == "cuda":
        import attention_cuda

        yield from attention_cuda.show(result)
        return
    columns = (
        "schedule; forward + backward s=seconds .2f; x one rank=x_one_rank .2f;"
        " x contiguous ring=x_contiguous_ring .2f; MB=bytes*1e-6 .1f; x ranks=x_ranks .2f"
    )
    yield from table(result["schedules"].values(), columns)
    for name, pairs in result["pairs"].items():
        yield f"{name}: {result['tokens'][name]:,} tokens, {pairs:,} pairs of query and key"


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show, work)
