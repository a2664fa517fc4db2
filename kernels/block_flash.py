"""Block attention through torch's FlashAttention-2 kernel. Not the default.

`test_the_block_on_a_gpu` passed on one H200 with torch 2.11: 12 cases in float16 and bfloat16, head
widths 64 and 128. Not run: other GPUs and head widths, windows, shared prefixes, several ranks.
Speed is not measured.

* Precision: the kernel rounds each piece's output and gradients to float16 or bfloat16 before they
  are summed in float32; Triton's sums stay in float32. That is about one more rounding of the
  result, and more where the gradients of many pieces cancel.
* Backward takes output and log-sum-exp over all keys, as every block does; the kernel only reads
  them.
* Pieces with a mask (irregular staircases, padded batches) are computed by matrix products in
  float32.
* Causal pieces are square, so that the kernel's alignment of the mask (bottom right) does not
  matter.
* Backward is not deterministic (atomics), except under
  `torch.use_deterministic_algorithms(True)`.
"""

from __future__ import annotations

import torch

from megarl.kernels.dense import dense_backward, dense_forward
from megarl.kernels.region_block import PieceBlock

WIDEST = 256
"""Largest head width that torch's kernel takes."""


def _check(q: torch.Tensor, k: torch.Tensor, causal: bool, cap: float | None) -> None:
    """Raise `ValueError` for dtypes, head widths and soft caps that the kernel does not support."""
    if cap is not None:
        raise ValueError(
            f"the flash block computes no soft cap of scores ({cap:g}); set"
            " training.sequence.block to triton"
        )
    assert not causal or q.shape[2] == k.shape[2], "the alignment of a causal piece must not matter"
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"the flash block takes float16 or bfloat16, got {q.dtype}; the block named triton"
            " takes float32"
        )
    if q.shape[3] % 8 or q.shape[3] > WIDEST:
        raise ValueError(
            f"the flash block takes head widths that are multiples of 8 up to {WIDEST}, got"
            f" {q.shape[3]}; the block named triton takes others"
        )


class FlashOperator:
    """torch's `aten::_flash_attention_forward` on a GPU, with the interface `piece_block.Operator`:
    `forward` takes q [B, Hq, n, D], k and v [B, Hkv, m, D], a mask and the scale of the scores, and
    returns output and log-sum-exp [B, Hq, n]; `backward` returns the gradients of q, k and v.

    Supports GQA. Both methods raise `ValueError` for a soft cap, for dtypes other than float16 and
    bfloat16, and for head widths that are no multiple of 8 or above 256. With a mask, attention is
    computed by matrix products in float32.
    """

    upcasts = False
    masks_are_cheap = False

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
        _check(q, k, causal, cap)
        if mask is not None:
            return dense_forward(q, k, v, causal, mask, scale)
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
            *rows, None, None, q.shape[2], k.shape[2], 0.0, causal, False, scale=scale
        )
        return out.transpose(1, 2), lse

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
        _check(q, k, causal, cap)
        if mask is not None:
            return dense_backward(grad_out, q, k, v, out, lse, causal, mask, scale)
        rows = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout state
        # The kernel reads lse through a raw pointer without checking that it is contiguous.
        gradients = torch.ops.aten._flash_attention_backward.default(
            *(*rows, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal),
            *(unused, unused),
            scale=scale,
        )
        grad_q, grad_k, grad_v = (grad.transpose(1, 2) for grad in gradients)
        return grad_q, grad_k, grad_v


class FlashBlock(PieceBlock):
    """Attention of some queries to some keys on a GPU, by torch's FlashAttention-2 kernel; not the
    default. Like every block attention kernel (`block.Block`) it has `prepare`, which makes a work
    list from positions, and `forward` and `backward`, which add to results over other keys in
    place.

    Takes float16 or bfloat16 inputs and head widths that are multiples of 8 up to 256, and no soft
    cap; `forward` and `backward` raise `ValueError` for others.
    """

    def __init__(self) -> None:
        super().__init__(FlashOperator())
