"""Attention by cuDNN on a GPU, in 16 bit: within the documents of a packed row, and for a ring.

    aten::_cudnn_attention_forward   q, k, v, bounds  ->  out, log-sum-exp
    aten::_cudnn_attention_backward  grad_out, q, k, v, out, log-sum-exp, bounds  ->  gradients

`bounds` are cumulative lengths for q [T, Hq, D], or None for a batch q [B, Hq, n, D].

cuDNN makes a plan for each new shape, which takes some 40 ms; torch keeps it. Packed rows are
padded, so that few shapes occur. torch 2.13 makes the plans of cumulative lengths anew in every
call, and may take the head width for the longest document in the backward pass
(pytorch/pytorch#191576, #186142). There, rows of several documents are computed by torch's flash
attention, and rows of one document, which need no bounds, by cuDNN.

NOT YET RUN ON A GPU. Through `scaled_dot_product_attention`, cuDNN 9.19 has run on one H200.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from megarl.kernels import mask_regions
from megarl.kernels.block_flash import FlashOperator
from megarl.kernels.packed_varlen import CAPABILITIES, torch_varlen
from megarl.kernels.region_block import RegionBlock

OLDEST = 91800
"""cuDNN 9.18, from which on torch itself takes cuDNN for documents of different lengths."""
WIDEST = 128
"""Largest head width of the backward pass on every GPU."""
MULTIPLE = 256
"""Packed rows are padded to a multiple of so many tokens."""


def cudnn_needs(width: int, capability: tuple[int, int]) -> dict[str, bool]:
    """{what cuDNN's attention needs for heads of this width, in words: whether it is there}"""
    version = torch.backends.cudnn.version() or 0
    return {
        f"cuDNN 9.18 ({OLDEST}), for variable lengths (here {version})": version >= OLDEST,
        f"compute capability 9 or 10 (here {capability[0]}.{capability[1]})": (
            capability[0] in CAPABILITIES
        ),
        f"heads of 8, 16, ... {WIDEST} (here {width})": width % 8 == 0 and width <= WIDEST,
    }


@functools.cache
def keeps_plans() -> bool:
    """Whether torch keeps cuDNN's plans of cumulative lengths: since #191576 (see above)."""
    arguments = torch.ops.aten._cudnn_attention_forward.default._schema.arguments
    return any(argument.name == "seqused_k" for argument in arguments)


def cudnn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
) -> torch.Tensor:
    """As `torch_varlen`; no document may be empty."""
    total, is_single = len(q), len(starts) == 2
    if not is_single and not keeps_plans():
        return torch_varlen(q, k, v, starts, longest, scale)
    padding = 0 if is_single else _power_of_2(len(starts)) - len(starts) + 1
    rows = -(-(total + padding) // MULTIPLE) * MULTIPLE
    if rows > total:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, rows - total)) for x in (q, k, v))
    if is_single:  # padding comes after all its tokens
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return _forward(q, k, v, None, rows, rows, True, scale)[0][0].transpose(0, 1)[:total]
    # Padding is further documents, none empty: before 9.25 cuDNN returns NaN for empty ones.
    more = torch.arange(total + 1, total + padding, dtype=starts.dtype, device=starts.device)
    bounds = F.pad(torch.cat((starts, more)), (0, 1), value=rows)
    most = _power_of_2(max(longest, MULTIPLE))
    return _forward(q, k, v, bounds, most, most, True, scale)[0][:total]


def _power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor | None,
    most_queries: int,
    most_keys: int,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp); differentiable."""
    return torch.ops.aten._cudnn_attention_forward.default(
        *(q, k, v, None, bounds, bounds, most_queries, most_keys, True, 0.0, causal), scale=scale
    )[:2]


class CudnnOperator(FlashOperator):
    """cuDNN, with GQA; small pieces by matrix products, since each new shape needs a plan. Raises
    `ValueError` for a soft cap, other dtypes than 16 bit, and head widths that are no multiple of 8
    or above 128.
    """

    name, widest = "cudnn", WIDEST

    def takes(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> bool:
        queries, keys = q.shape[2], k.shape[2]
        is_large = queries * keys > mask_regions.SMALL_SCORES and min(queries, keys) > 1
        return mask is None and len(q) == 1 and is_large

    def kernel(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _forward(q, k, v, None, q.shape[2], k.shape[2], causal, scale)
        return out, lse.reshape(q.shape[:3])

    def kernel_backward(
        self, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _, q, k, *_ = tensors
        unused = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout state
        return torch.ops.aten._cudnn_attention_backward.default(
            *(*tensors, lse.contiguous()[..., None], unused, unused),
            *(None, None, None, q.shape[2], k.shape[2], 0.0, causal),
            scale=scale,
        )


class CudnnBlock(RegionBlock):
    """`Block` by cuDNN."""

    def __init__(self) -> None:
        super().__init__(CudnnOperator())
