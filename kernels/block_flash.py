"""Block attention through torch's FlashAttention-2 kernel. Not the default.

`test_the_block_on_a_gpu` passed on one H200 with torch 2.11: 12 cases in 16 bit, head widths 64 and
128. Not run: other GPUs and head widths, windows, shared prefixes, several ranks. Speed is not
measured.

* The kernel rounds each piece's output and gradients to 16 bit before they are summed in float32:
  about one more rounding than Triton's, and more where gradients of many pieces cancel.
* Pieces with a mask are computed by matrix products in float32.
* Backward is not deterministic (atomics), except under `torch.use_deterministic_algorithms(True)`.
"""

from __future__ import annotations

import torch

from megarl.kernels.dense import dense_backward, dense_forward
from megarl.kernels.region_block import RegionBlock

WIDEST = 256
"""Largest head width that torch's kernel takes."""


def _check(
    operator: FlashOperator, q: torch.Tensor, k: torch.Tensor, causal: bool, cap: float | None
) -> None:
    name, widest = operator.name, operator.widest
    if cap is not None:
        raise ValueError(
            f"the {name} block computes no soft cap of scores ({cap:g}); set"
            " training.sequence.block to triton"
        )
    assert not causal or q.shape[2] == k.shape[2], "the alignment of a causal piece must not matter"
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"the {name} block takes float16 or bfloat16, got {q.dtype}; the block named triton"
            " takes float32"
        )
    if q.shape[3] % 8 or q.shape[3] > widest:
        raise ValueError(
            f"the {name} block takes head widths that are multiples of 8 up to {widest}, got"
            f" {q.shape[3]}; the block named triton takes others"
        )


class FlashOperator:
    """torch's `aten::_flash_attention_forward`, with GQA. Raises `ValueError` for a soft cap, other
    dtypes than 16 bit, and head widths that are no multiple of 8 or above 256.
    """

    name, widest = "flash", WIDEST
    upcasts = False
    masks_are_cheap = False

    def takes(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """Whether the kernel computes this piece; matrix products do otherwise."""
        return mask is None

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
        _check(self, q, k, causal, cap)
        if not self.takes(q, k, mask):
            return dense_forward(q, k, v, causal, mask, scale)
        return self.kernel(q, k, v, causal, scale)

    def kernel(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, without a mask."""
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
        _check(self, q, k, causal, cap)
        if not self.takes(q, k, mask):
            return dense_backward(grad_out, q, k, v, out, lse, causal, mask, scale)
        return self.kernel_backward((grad_out, q, k, v, out), lse, causal, scale)

    def kernel_backward(
        self, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `backward`, of (grad_out, q, k, v, out) without a mask."""
        rows, (_, q, k, *_) = (x.transpose(1, 2) for x in tensors), tensors
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout state
        # The kernel reads lse through a raw pointer without checking that it is contiguous.
        gradients = torch.ops.aten._flash_attention_backward.default(
            *(*rows, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal),
            *(unused, unused),
            scale=scale,
        )
        grad_q, grad_k, grad_v = (grad.transpose(1, 2) for grad in gradients)
        return grad_q, grad_k, grad_v


class FlashBlock(RegionBlock):
    """`Block` by torch's FlashAttention-2 kernel."""

    def __init__(self) -> None:
        super().__init__(FlashOperator())
