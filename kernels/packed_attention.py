"""Causal attention within each document of a packed sequence, on one rank, without padding.

    q [T, Hq, D], k and v [T, Hkv, D], documents  ->  out [T, Hq, D]

`training.attention` names the implementation:

* torch: variable-length flash attention (CUDA, 16 bit), elsewhere batches of documents of similar
  length through `scaled_dot_product_attention`.
* flash_attn: the package flash-attn (CUDA, 16 bit; `megarl.kernels.packed_varlen`).
* cudnn: cuDNN (CUDA, 16 bit; `megarl.kernels.attention_cudnn`).
* auto: in 16 bit the first of cudnn, FlashAttention-4 and torch that supports the GPU and computes
  what the reference does.
* reference: matrix products, in memory that grows with the square of the longest document.

Kernels of variable length are compared with the reference in float64 before their first use.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megarl.kernels.attention_cudnn import cudnn_needs, cudnn_varlen, keeps_plans
from megarl.kernels.packed_varlen import (
    CAPABILITIES,
    Varlen,
    has_module,
    torch_varlen,
    varlen_function,
)

PackedBackend = Literal["auto", "torch", "flash_attn", "cudnn", "reference"]
Contender = Literal["cudnn", "flash_attn"]
"""What `auto` takes if it can."""

BUCKET_SLACK = 1.25
"""The longest document of a batch is at most this many times the shortest, or 4 tokens longer."""

ALIGNED = 8
"""Torch's memory-efficient kernel takes multiples of this head width."""

TRIED_ROWS = ((1, 7, 130), (130,))
"""Tokens of the documents of each row on which kernels are compared with the reference."""
TRIED_HEADS = (8, 2)
"""Query heads and KV heads with which kernels are compared for `auto`."""
TRIED_WIDTH = 128
"""Head width of that comparison where the model's is not known."""
TRIED_ROUNDINGS = 8
"""Largest error in that comparison, in roundings (eps of the dtype times the largest value). A
right kernel is within two; a wrong scale, mask or head is off by many times this.
"""


@dataclass(frozen=True)
class Documents:
    """Boundaries of the documents in a packed sequence, and padded batches of similar length, for
    all layers.
    """

    starts: torch.Tensor
    """[D + 1] int32 on the sequence's device: first token of each document, then the length T; no
    document is empty.
    """
    longest: int
    """Tokens of the longest document."""
    batches: list[torch.Tensor]
    """[B, L] int64 positions of each batch; shorter documents repeat their last one."""
    valid: list[torch.Tensor]
    """By batch, int64 indices into the flattened [B * L] without padding."""
    order: torch.Tensor
    """[T] int64: index of each token in the concatenated valid tokens of all batches."""

    @staticmethod
    def of(starts: torch.Tensor) -> Documents:
        starts = starts.unique_consecutive()  # without empty documents
        edges = starts.tolist()
        spans = sorted(zip(edges[:-1], edges[1:], strict=True), key=lambda span: span[1] - span[0])
        buckets: list[list[tuple[int, int]]] = []
        for span in spans:
            length = span[1] - span[0]
            shortest = buckets[-1][0][1] - buckets[-1][0][0] if buckets else 0
            if buckets and length <= max(shortest * BUCKET_SLACK, shortest + 4):
                buckets[-1].append(span)
            else:
                buckets.append([span])
        batches, valid = [], []
        order = torch.empty(edges[-1], dtype=torch.int64)
        filled = 0
        for bucket in buckets:
            first = torch.tensor([a for a, _ in bucket])[:, None]
            last = torch.tensor([b - 1 for _, b in bucket])[:, None]
            length = int((last - first).max()) + 1
            positions = first + torch.arange(length)
            batch = positions.minimum(last)
            real = (positions <= last).flatten().nonzero()[:, 0]
            batches.append(batch.to(starts.device))
            valid.append(real.to(starts.device))
            order[batch.flatten()[real]] = torch.arange(filled, filled + real.numel())
            filled += real.numel()
        longest = max((b - a for a, b in spans), default=0)
        return Documents(starts, longest, batches, valid, order.to(starts.device))


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    scale: float,
    backend: PackedBackend = "torch",
) -> torch.Tensor:
    """Attention as above, differentiable. `scale` multiplies the scores. Raises `ValueError` if
    `backend` is not installed, and `RuntimeError` if a kernel differs from the reference at its
    first use with these heads.
    """
    if backend == "reference":
        return packed_reference(q, k, v, documents.starts, scale)
    function = varlen_kernel(backend, q.dtype, q.device, q.shape[2])
    if function is None:
        return _batched(q, k, v, documents, scale)
    for lengths in TRIED_ROWS:
        prove_varlen(function, lengths, q.shape[1], k.shape[1], q.shape[2], q.dtype, q.device)
    return function(q, k, v, documents.starts, documents.longest, scale)


def varlen_kernel(
    backend: PackedBackend, dtype: torch.dtype, device: torch.device, width: int = TRIED_WIDTH
) -> Varlen | None:
    """The kernel that `packed_attention` calls: (q, k, v, starts [D + 1] int32, tokens of the
    longest document, scale) -> output. None for `reference`, CPU or float32. `width`: of a head.
    """
    if backend == "auto":
        backend = automatic_attention(dtype, device, width)[0]
    if backend == "flash_attn":
        return varlen_function(_capability(device))
    if backend == "cudnn":
        return cudnn_varlen
    is_short = dtype in (torch.float16, torch.bfloat16)
    if backend == "torch" and device.type == "cuda" and is_short:
        return torch_varlen
    return None


@functools.cache
def automatic_attention(
    dtype: torch.dtype, device: torch.device, width: int = TRIED_WIDTH
) -> tuple[PackedBackend, str]:
    """(what `auto` means here for heads of this width, why). The first call compares kernels, from
    the fastest on, until one is right.
    """
    capability = _capability(device)
    shown = f"compute capability {capability[0]}.{capability[1]}"
    if device.type != "cuda":
        return "torch", "no GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        return "torch", f"{name}, and FlashAttention-4 takes 16 bit, as cuDNN does"
    if capability[0] not in CAPABILITIES:
        return "torch", f"{shown}, for which FlashAttention-4 is not made, and cuDNN not tried"
    names: dict[Contender, str] = {"cudnn": "cuDNN", "flash_attn": "FlashAttention-4"}
    if not keeps_plans():
        names = {"flash_attn": "FlashAttention-4", "cudnn": "cuDNN for rows of one document"}
    faults: list[str] = []
    for backend in names:
        fault = varlen_fault(backend, dtype, device, width)
        if not fault:
            return backend, "; ".join((f"{names[backend]}, {shown}", *faults))
        faults.append(f"{names[backend]} {fault}")
    return "torch", "; ".join(faults)


def varlen_fault(
    backend: Contender,
    dtype: torch.dtype,
    device: torch.device,
    width: int = TRIED_WIDTH,
) -> str:
    """Why cuDNN or FlashAttention-4 cannot be used here, as "is not installed"; "" if it can.
    Instead of a FlashAttention-4 that fails, torch's kernel is restored.
    """
    from torch.nn.attention import restore_flash_attention_impl

    if backend == "cudnn":
        needs = cudnn_needs(width, _capability(device))
        if lacking := " and ".join(name for name, is_there in needs.items() if not is_there):
            return f"needs {lacking}"
    elif not has_module("flash_attn.cute"):
        return "is not installed"
    try:
        function = varlen_kernel(backend, dtype, device)
        assert function is not None
        for lengths in TRIED_ROWS:
            prove_varlen(function, lengths, *TRIED_HEADS, width, dtype, device)
    except Exception as error:  # whatever a package, or its compiler, raises
        if backend == "flash_attn":
            restore_flash_attention_impl(False)
        message = str(error).partition("\n")[0]
        return f"is installed, and fails: {type(error).__name__}: {message}"
    return ""


def packed_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, scale: float
) -> torch.Tensor:
    """By matrix products, in q's dtype; differentiable."""
    dtype, group = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    outs = []
    edges = starts.tolist()
    for first, end in zip(edges[:-1], edges[1:], strict=True):
        query, key, value = (x[first:end].to(dtype) for x in (q, k, v))
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        later = torch.ones(end - first, end - first, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(outs).to(q.dtype)


@functools.cache
def prove_varlen(
    function: Varlen,
    lengths: tuple[int, ...],
    query_heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compare output and gradients of a kernel with the reference in float64, once for these
    arguments, on documents of these `lengths`. Raises `RuntimeError` if they differ by more than
    rounding. A checkpointed layer would take its backward pass for its own: call it outside of one.
    """
    draw = torch.Generator().manual_seed(0)
    starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32)
    counts = (query_heads, kv_heads, kv_heads, query_heads)
    shapes = [(sum(lengths), heads, width) for heads in counts]
    *inputs, upstream = (torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)
    scale = width**-0.5

    def results(precision: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (x.to(precision).requires_grad_() for x in inputs)
        with torch.enable_grad():
            if precision == torch.float64:
                out = packed_reference(q, k, v, starts, scale)
            else:
                out = function(q, k, v, starts, max(lengths), scale)
        return [out, *torch.autograd.grad(out, (q, k, v), upstream.to(precision))]

    names = ("the output", "the gradient of q", "the gradient of k", "the gradient of v")
    for name, result, expected in zip(names, results(dtype), results(torch.float64), strict=True):
        error = (result.double() - expected).abs().max().item()
        bound = TRIED_ROUNDINGS * torch.finfo(dtype).eps * expected.abs().max().item()
        if not error <= bound:
            raise RuntimeError(
                f"the attention kernel of {function.__module__}.{function.__name__} is wrong here:"
                f" {name} differs from the reference in float64 by {error:.3g} (bound {bound:.3g})"
                f" with {query_heads} query heads, {kv_heads} key heads of width {width} in"
                f" {dtype}; set training.attention to 'torch' or 'reference'"
            )


def _capability(device: torch.device) -> tuple[int, int]:
    """(0, 0) for the CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _batched(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float
) -> torch.Tensor:
    """Batches of documents of similar length, in which shorter ones are padded."""
    width = q.shape[2]
    if q.is_cuda:
        # Otherwise torch would store all scores: its memory-efficient kernel, the only other one
        # for float32, takes neither shared key heads nor every width.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        q, k, v = (F.pad(x, (0, -width % ALIGNED)) for x in (q, k, v))
    pieces = []
    for batch, real in zip(documents.batches, documents.valid, strict=True):
        rows, length = batch.shape
        index = batch.flatten()
        # [B, H, L, D]. Padded queries are dropped below; padded keys come after every real query.
        heads = [
            x.index_select(0, index).view(rows, length, x.shape[1], x.shape[2]).transpose(1, 2)
            for x in (q, k, v)
        ]
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if q.is_cuda else nullcontext():
            out = F.scaled_dot_product_attention(
                *heads, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        pieces.append(
            out.transpose(1, 2).reshape(rows * length, q.shape[1], q.shape[2]).index_select(0, real)
        )
    return torch.cat(pieces).index_select(0, documents.order)[..., :width]
