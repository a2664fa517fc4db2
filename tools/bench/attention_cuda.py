"""The GPU part of tools/bench/attention.py: the Triton block beside torch's own kernels and those
that `training.attention` names, and every rank's ring in turn on one GPU.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attention_inputs import Alone, causal_pairs, documents, layer, make_tensors
from common import cell, spread

from megarl.kernels import packed_varlen
from megarl.kernels.attention_plan import BLOCKS
from megarl.kernels.block import Positions
from megarl.kernels.sequence_attention import AttentionPlan
from megarl.parallel.sequence import cut


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
    """Forward and backward of the Triton block over one pair of places."""
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


def torch_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
) -> torch.Tensor:
    """As `packed_varlen.torch_varlen`, also by a torch that has no `enable_gqa`: 2.11 shares key
    heads without being told.
    """
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    settings = {name: value for name, value in packed_varlen.causal(scale).items() if name in known}
    return varlen_attn(q, k, v, starts, starts, longest, longest, **settings)  # pyright: ignore


def varlen_runs(
    function: packed_varlen.Varlen, tensors: list[torch.Tensor], starts: torch.Tensor
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward of causal attention within documents by a kernel of variable length."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    longest = int((starts[1:] - starts[:-1]).max())
    edges, scale = starts.to(q.device, torch.int32), q.shape[2] ** -0.5

    def forward() -> None:
        with torch.no_grad():
            function(q, k, v, edges, longest, scale)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), tensors[3], retain_graph=True)

    out = function(q, k, v, edges, longest, scale)
    return forward, backward


Way = tuple[tuple[Callable[[], None], Callable[[], None]], int]
"""Forward and backward of a kernel, and the pairs of query and key that it must compute."""


def of_variable_length(
    name: str, function: packed_varlen.Varlen, tensors: list[torch.Tensor], packed: torch.Tensor
) -> dict[str, Way]:
    """A kernel of variable length over one document, and over the documents of `packed`."""
    one = documents(tensors[0].shape[0], 1)
    return {
        f"{name}, {title}": (varlen_runs(function, tensors, starts), causal_pairs(starts))
        for title, starts in (("causal", one), (f"{len(packed) - 1} documents", packed))
    }


def measured(args: argparse.Namespace, ways: dict[str, Way]) -> dict[str, Any]:
    """Seconds and TFLOP/s of each way, forward and backward, in turns."""
    table: dict[str, Any] = {name: {} for name in ways}
    for place, (way, flop_per_pair) in enumerate((("forward", 4), ("backward", 10))):
        runs = {name: both[place] for name, (both, _) in ways.items()}
        for name, seconds in timed(runs, args.rounds).items():
            flop = flop_per_pair * ways[name][1] * args.heads * args.width
            table[name][way] = {
                "seconds": spread(seconds),
                "tflops": spread([flop / s / 1e12 for s in seconds]),
            }
    return table


def bench_flash_attn(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The package flash-attn over the same rows: {"kernels", "missing"}. Comes after everything
    else: FlashAttention-4 takes the place of torch's own kernel in the whole process.
    """
    name = packed_varlen.provider(torch.cuda.get_device_capability(device))
    if not name:
        return {"kernels": {}, "missing": {"flash-attn": "no package for this GPU is installed"}}
    title = f"flash-attn {name.removeprefix('FA')}"
    try:
        function = packed_varlen.varlen_function(torch.cuda.get_device_capability(device))
        function = torch_varlen if name == "FA4" else function
        tensors = make_tensors(args, args.tokens, torch.bfloat16, device)
        packed = documents(args.tokens, args.packed)
        ways = of_variable_length(title, function, tensors, packed)
        return {"kernels": measured(args, ways), "missing": {}}
    except (RuntimeError, ImportError, TypeError) as error:
        return {"kernels": {}, "missing": {title: str(error).splitlines()[0]}}


def best_of(table: dict[str, Any]) -> dict[str, Any]:
    """The fastest kernel of one causal document in each direction, by median TFLOP/s."""
    causal = {name: row for name, row in table.items() if name.endswith(", causal")}
    found = {}
    for way in ("forward", "backward"):
        name = max(causal, key=lambda one: causal[one][way]["tflops"]["median"])
        found[way] = {"kernel": name, "tflops": causal[name][way]["tflops"]["median"]}
    return found


def bench_kernels(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """TFLOP/s of whole kernels over one row of `--tokens`."""
    from torch.nn.attention import SDPBackend

    tokens, tensors = args.tokens, make_tensors(args, args.tokens, torch.bfloat16, device)
    one, packed = documents(tokens, 1), documents(tokens, args.packed)
    whole, two = torch.arange(tokens), torch.tensor([0, 2 * tokens])
    pair = cut(two, 2, "zigzag")[0]
    places = {
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
    ways: dict[str, Way] = {
        name: (block_runs(name, queries, keys, tensors), count)
        for name, (queries, keys, count) in places.items()
    }
    missing: dict[str, str] = {}
    others: dict[str, Callable[[], dict[str, Way]]] = {
        f"torch {name}": lambda name=name, backend=backend: {
            f"torch {name}, causal": (stock_runs(backend, tensors), causal_pairs(one))
        }
        for name, backend in (
            ("flash", SDPBackend.FLASH_ATTENTION),
            ("cuDNN", SDPBackend.CUDNN_ATTENTION),
        )
    }
    others["torch varlen"] = lambda: of_variable_length(
        "torch varlen", torch_varlen, tensors, packed
    )
    for name, make in others.items():
        try:
            ways |= make()
        except (RuntimeError, ImportError, TypeError) as error:
            missing[name] = str(error).splitlines()[0]
    return {"kernels": measured(args, ways), "missing": missing}


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


def show(result: dict[str, Any]) -> list[str]:
    """Kernels and rings as lines of a table."""
    lines = [f"{'kernel':28} {'forward TFLOP/s':>26} {'backward TFLOP/s':>26}"]
    for name, row in result["kernels"].items():
        cells = [cell(row[way]["tflops"], ".0f") for way in ("forward", "backward")]
        lines.append(f"{name:28} {cells[0]:>26} {cells[1]:>26}")
    lines += [f"{name:28} not on this machine: {why}" for name, why in result["missing"].items()]
    for way, found in result["best"].items():
        lines.append(f"best {way}: {found['kernel']}, {found['tflops']:.0f} TFLOP/s")
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
