"""Block attention on CPU through torch's flash attention, which exposes the log-sum-exp."""

from __future__ import annotations

import torch

from megarl.kernels.dense import dense_backward, dense_forward
from megarl.kernels.region_block import RegionBlock


class CpuOperator:
    """torch's flash attention for CPU, in float32 or float64, which has no soft cap: with one,
    attention is computed by matrix products.
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


class CpuBlock(RegionBlock):
    """`Block` on CPU; 16-bit inputs are computed in float32."""

    def __init__(self) -> None:
        super().__init__(CpuOperator())
