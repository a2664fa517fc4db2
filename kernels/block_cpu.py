"""Block attention on CPU through torch's flash attention, which exposes the log-sum-exp."""

from __future__ import annotations

import torch

from megarl.kernels.dense import dense_backward, dense_forward
from megarl.kernels.region_block import PieceBlock


class CpuOperator:
    """torch's flash attention for CPU, in float32 or float64, with the interface
    `piece_block.Operator`: `forward` takes q [B, Hq, n, D], k and v [B, Hkv, m, D], a mask and the
    scale of the scores, and returns output and log-sum-exp [B, Hq, n]; `backward` returns the
    gradients of q, k and v.

    Calls `aten::_scaled_dot_product_flash_attention_for_cpu`, which has no soft cap; with a soft
    cap, attention is computed by matrix products. `PieceBlock` converts 16-bit inputs to float32
    before.
    """

    upcasts = True
    masks_are_cheap = True

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
        cap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if cap is not None:
            return dense_forward(q, k, v, causal, mask, scale, cap)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, causal, attn_mask=None if mask is None else mask.to(q.dtype), scale=scale
        )

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
        cap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if cap is not None:
            return dense_backward(grad_out, q, k, v, out, lse, causal, mask, scale, cap)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            *(grad_out, q, k, v, out, lse, 0.0, causal),
            attn_mask=None if mask is None else mask.to(q.dtype),
            scale=scale,
        )


class CpuBlock(PieceBlock):
    """Attention of some queries to some keys on CPU, by torch's flash attention; 16-bit inputs are
    computed in float32. Like every block attention kernel (`block.Block`) it has `prepare`, which
    makes a work list from the positions of queries and keys, and `forward` and `backward`, which
    with this list add to the results over other keys in place.
    """

    def __init__(self) -> None:
        super().__init__(CpuOperator())
