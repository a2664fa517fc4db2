"""The GPU part of tools/bench/attention.py: the Triton block beside torch's own kernels and those
that `training.attention` names, and every rank's ring in turn on one GPU.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from attention import ALONE, causal_pairs, documents, layer, make_tensors
from common import Args, in_turns, spread, table

from megarl.environments.user_code import function_of
from megarl.kernels import packed_varlen
from megarl.kernels.attention_cudnn import cudnn_varlen
from megarl.kernels.attention_plan import BLOCKS
from megarl.kernels.block import Positions
from megarl.kernels.sequence_attention import AttentionPlan
from megarl.parallel.sequence import cut

OTHERS = {"triton, wide keys": "WideKeys", "triton, small programs": "SmallPrograms"}
"""{name in the table: class in kernels/block_triton.py}"""
Way = tuple[Callable[[], Any], Callable[[], Any], int]
"""Forward and backward of a kernel, and the pairs of query and key that it must compute."""


class LocalCopies:
    """An exchange that stands for rank `rank` of `size`: what it receives is a copy of something of
    that shape.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.spare: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def shift(
        self, tensor: torch.Tensor, shape: Sequence[int], *, channel: int = 0, offset: int = 1
    ) -> Any:
        key = (tensor.dtype, channel)
        if key not in self.spare or self.spare[key].shape[0] < shape[0]:
            self.spare[key] = torch.randn(tuple(shape), device=tensor.device).to(tensor.dtype)
        here = self.spare[key][: shape[0]].clone()
        return SimpleNamespace(wait=lambda: here)


def timed(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each on the GPU, in turns; a first round, which compiles, does not count."""

    def seconds(run: Callable[[], Any]) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        before.record()
        run()
        after.record()
        torch.cuda.synchronize()
        return before.elapsed_time(after) / 1e3

    return in_turns(rounds, {name: partial(seconds, run) for name, run in runs.items()}, skipped=1)


def block_of(name: str) -> Callable[[], Any]:
    """The block of `BLOCKS`, a `TritonBlock` with another backward, or a path/to/file.py:Class."""
    from megarl.kernels import block_triton

    if name in OTHERS:
        return getattr(block_triton, OTHERS[name])
    return function_of(name, BLOCKS, "training.sequence.block")


def block_runs(name: str, places: list[Positions], tensors: list[torch.Tensor], pairs: int) -> Way:
    """The block `name` over one pair of places, of queries and of keys."""
    block, (q, k, v, upstream) = block_of(name)(), tensors
    scale, work = q.shape[2] ** -0.5, block.prepare(*places, q.device)
    assert work is not None
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    grads = [torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v)]

    def forward() -> None:
        lse.fill_(-torch.inf)  # a new beginning: what `out` holds then has no weight
        block.forward(q, k, v, work, scale, out, lse)

    forward()
    final = out.to(q.dtype)
    backward = partial(block.backward, upstream, q, k, v, final, lse, work, scale, *grads)
    return forward, backward, pairs


def _autograd_runs(
    attend: Callable[[], torch.Tensor], inputs: list[torch.Tensor], upstream: Any, pairs: int
) -> Way:
    """Forward, and backward through autograd, of a function of `inputs`."""
    out = attend()

    def forward() -> None:
        with torch.no_grad():
            attend()

    backward = partial(torch.autograd.grad, out, inputs, upstream, retain_graph=True)
    backward()  # what this machine lacks shows before anything is timed
    return forward, backward, pairs


def stock_runs(backend: Any, tensors: list[torch.Tensor], pairs: int) -> Way:
    """Causal attention over the whole row by one of torch's own kernels."""
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    *inputs, upstream = (x.transpose(0, 1)[None].detach() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)

    def attend() -> torch.Tensor:
        shared = q.shape[1] != k.shape[1]
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)

    return _autograd_runs(attend, inputs, upstream, pairs)


def torch_varlen(q: Any, k: Any, v: Any, starts: Any, longest: int, scale: float) -> torch.Tensor:
    """As `packed_varlen.torch_varlen`, also by a torch that has no `enable_gqa`: 2.11 shares key
    heads without being told.
    """
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    settings = {name: value for name, value in packed_varlen.causal(scale).items() if name in known}
    return varlen_attn(q, k, v, starts, starts, longest, longest, **settings)  # pyright: ignore


def varlen_runs(
    name: str, function: packed_varlen.Varlen, tensors: list[torch.Tensor], packed: torch.Tensor
) -> dict[str, Way]:
    """A kernel of variable length over one document, and over the documents of `packed`."""
    found = {}
    one = documents(len(tensors[0]), 1)
    for title, starts in (("causal", one), (f"{len(packed) - 1} documents", packed)):
        inputs = [x.detach().requires_grad_() for x in tensors[:3]]
        edges, longest = starts.to(inputs[0].device, torch.int32), int(starts.diff().max())
        attend = partial(function, *inputs, edges, longest, inputs[0].shape[2] ** -0.5)
        pairs = causal_pairs(starts)
        found[f"{name}, {title}"] = _autograd_runs(attend, inputs, tensors[3], pairs)
    return found


def measured(args: Args, ways: dict[str, Way]) -> dict[str, Any]:
    """Seconds and TFLOP/s of each way, forward and backward, in turns."""
    rows: dict[str, Any] = {name: {} for name in ways}
    for place, (way, flop_per_pair) in enumerate((("forward", 4), ("backward", 10))):
        for name, seconds in timed({n: one[place] for n, one in ways.items()}, args.rounds).items():
            flop = flop_per_pair * ways[name][2] * args.heads * args.width
            tflops = spread([flop / s / 1e12 for s in seconds])
            rows[name][way] = {"seconds": spread(seconds), "tflops": tflops}
    return rows


def bench(args: Args, makers: dict[str, Callable[[], dict[str, Way]]]) -> Any:
    """{"kernels": measurements, "missing": {kernel: why it is not on this machine}}."""
    ways: dict[str, Way] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        try:
            ways |= make()
        except (RuntimeError, ImportError, TypeError) as error:
            missing[name] = str(error).splitlines()[0]
    return {"kernels": measured(args, ways), "missing": missing}


def bench_kernels(args: Args, device: torch.device) -> dict[str, Any]:
    """TFLOP/s of whole kernels over one row of `--tokens`."""
    from torch.nn.attention import SDPBackend

    tokens, tensors = args.tokens, make_tensors(args, args.tokens, torch.bfloat16, device)
    one, packed = documents(tokens, 1), documents(tokens, args.packed)
    whole, two = torch.arange(tokens), torch.tensor([0, 2 * tokens])
    pair, pairs = cut(two, 2, "zigzag")[0], causal_pairs(one)
    later = [Positions.of(whole + tokens, two), Positions.of(whole, two)]
    places = {
        "causal": ([Positions.of(whole, one)] * 2, pairs),
        "all visible": (later, tokens * tokens),
        "zigzag piece": ([Positions.of(pair, two)] * 2, pairs),
        f"{args.packed} documents": ([Positions.of(whole, packed)] * 2, causal_pairs(packed)),
    }

    def blocks(name: str) -> dict[str, Way]:
        return {
            f"{name}, {title}": block_runs(name, pair_of_places, tensors, n)
            for title, (pair_of_places, n) in places.items()
        }

    def stock(name: str, backend: Any) -> dict[str, Way]:
        return {f"torch {name}, causal": stock_runs(backend, tensors, pairs)}

    return bench(
        args,
        {
            **{name: partial(blocks, name) for name in (args.block, "triton", *OTHERS, "cudnn")},
            "torch flash": partial(stock, "flash", SDPBackend.FLASH_ATTENTION),
            "torch cuDNN": partial(stock, "cuDNN", SDPBackend.CUDNN_ATTENTION),
            "torch varlen": partial(varlen_runs, "torch varlen", torch_varlen, tensors, packed),
            "cuDNN varlen": partial(varlen_runs, "cuDNN varlen", cudnn_varlen, tensors, packed),
        },
    )


def bench_flash_attn(args: Args, device: torch.device) -> dict[str, Any]:
    """The package flash-attn over the same rows. Comes after everything else: FlashAttention-4
    takes the place of torch's own kernel in the whole process.
    """
    capability = torch.cuda.get_device_capability(device)
    name = packed_varlen.provider(capability)
    if not name:
        return {"kernels": {}, "missing": {"flash-attn": "no package for this GPU is installed"}}
    title = f"flash-attn {name.removeprefix('FA')}"

    def make() -> dict[str, Way]:
        function = packed_varlen.varlen_function(capability)
        tensors = make_tensors(args, args.tokens, torch.bfloat16, device)
        packed = documents(args.tokens, args.packed)
        return varlen_runs(title, torch_varlen if name == "FA4" else function, tensors, packed)

    return bench(args, {title: make})


def best_of(rows: dict[str, Any]) -> dict[str, Any]:
    """The fastest kernel of one causal document in each direction, by median TFLOP/s."""
    found = {}
    for way in ("forward", "backward"):
        causal = {n: r[way]["tflops"]["median"] for n, r in rows.items() if n.endswith(", causal")}
        name = max(causal, key=causal.__getitem__)
        found[way] = {"kernel": name, "tflops": causal[name]}
    return found


def bench_ring(args: Args, device: torch.device) -> dict[str, Any]:
    """Every rank's ring in turn, with copies for receives, against the whole row divided by the
    number of ranks.
    """
    from torch.nn.attention import SDPBackend

    tokens, rows = args.ranks * args.rank_tokens, {}
    whole = make_tensors(args, tokens, torch.bfloat16, device)
    block = block_of(args.block)
    for title, count in (("one document", 1), (f"{args.packed} documents", args.packed)):
        starts = documents(tokens, count)
        alone = AttentionPlan.of([torch.arange(tokens)], starts, device, block=block)
        runs: dict[str, Callable[[], Any]] = {
            "whole": partial(layer, whole, alone, ALONE, ALONE, "ring")
        }
        if count == 1:
            forward, backward, _ = stock_runs(SDPBackend.FLASH_ATTENTION, whole, 0)
            runs["flash"] = lambda f=forward, b=backward: (f(), b())
        for how in ("zigzag", "zigzag_document"):
            indices = cut(starts, args.ranks, how)
            plan = AttentionPlan.of(indices, starts, device, block=block)
            for rank, index in enumerate(indices):
                mine, outer = [x[index.to(device)] for x in whole], LocalCopies(rank, args.ranks)
                runs[f"{how} {rank}"] = partial(layer, mine, plan, ALONE, outer, "ring")
        seconds = {name: statistics.median(each) for name, each in timed(runs, args.rounds).items()}
        for how in ("zigzag", "zigzag_document"):
            slowest = max(seconds[f"{how} {rank}"] for rank in range(args.ranks))
            row = {"slowest_rank_s": slowest}
            for name, share in (("whole", "of_ideal"), ("flash", "of_flash_ideal")):
                if name in seconds:
                    row[f"{name}_s"] = seconds[name]
                    row[share] = seconds[name] / args.ranks / slowest
            rows[f"{title}, {how}"] = row
    return {"ring": rows}


def measure(args: Args) -> dict[str, Any]:
    """All of it on one GPU. Raises `ValueError` where there is none."""
    if not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no GPU here; leave it out for the CPU")
    device = torch.device("cuda")
    found = bench_kernels(args, device)
    torch.cuda.empty_cache()
    found |= bench_ring(args, device)
    torch.cuda.empty_cache()
    for name, value in bench_flash_attn(args, device).items():
        found[name] |= value
    return found | {"best": best_of(found["kernels"])}


def show(result: dict[str, Any]) -> Iterator[str]:
    """Kernels and rings as lines of tables."""
    columns = "kernel; forward TFLOP/s=forward.tflops .0f; backward TFLOP/s=backward.tflops .0f"
    yield from table(({"kernel": name, **row} for name, row in result["kernels"].items()), columns)
    yield from (f"{name} is not on this machine: {why}" for name, why in result["missing"].items())
    for way, found in result["best"].items():
        yield f"best {way}: {found['kernel']}, {found['tflops']:.0f} TFLOP/s"
    columns = (
        "ring, forward + backward=ring; whole ms=whole_s*1e3 .1f;"
        " slowest rank ms=slowest_rank_s*1e3 .2f; of ideal=of_ideal .1%;"
        " of flash / ranks=of_flash_ideal .1%"
    )
    yield ""
    yield from table(({"ring": name, **row} for name, row in result["ring"].items()), columns)
