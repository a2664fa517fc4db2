"""Block attention through torch's own GPU kernels: FlashAttention-2 and cuDNN. Not the default.

NOT YET RUN ON A GPU. The behaviour of the operators was read in torch's sources (`flash_api.cpp`,
`cudnn/MHA.cpp`, `attention_backward.cu`). The tests check the calls against torch's own shape
rules, and the arithmetic with replacements on CPU.

* Precision: these kernels round each piece's output and gradients to float16 or bfloat16 before
  they are summed in float32; Triton's sums stay in float32. That is about one more rounding of the
  result, and more where the gradients of many pieces cancel.
* Backward takes output and log-sum-exp over all keys, as every block does; both kernels only read
  them.
* Pieces with a mask (irregular staircases, padded batches) are computed by matrix products in
  float32.
* Causal pieces are square, so that flash's bottom-right and cuDNN's top-left alignment agree.
* Backward is not deterministic (atomics), except for flash under
  `torch.use_deterministic_algorithms(True)`.
* cuDNN compiles a plan for each new shape, which is slow: use it for few long documents.
"""

from __future__ import annotations

import os

import torch

from megarl.kernels.dense import dense_backward, dense_forward
from megarl.kernels.piece_block import PieceBlock

WIDEST = {"flash": 256, "cudnn": 128}
"""Largest head width by block; cuDNN 9.10's 256 on Hopper is not used."""


def _check(name: str, q: torch.Tensor, k: torch.Tensor, causal: bool, cap: float | None) -> None:
    """Raise `ValueError` for dtypes, head widths and soft caps that the named kernel does not
    support.
    """
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
    if q.shape[3] % 8 or q.shape[3] > WIDEST[name]:
        raise ValueError(
            f"the {name} block takes head widths that are multiples of 8 up to {WIDEST[name]}, got"
            f" {q.shape[3]}; the block named triton takes others"
        )


class FlashOperator:
    """`Operator` for `aten::_flash_attention_forward`, which supports GQA; tensors [B, L, H, D]."""

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
        _check("flash", q, k, causal, cap)
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
        _check("flash", q, k, causal, cap)
        if mask is not None:
            return dense_backward(grad_out, q, k, v, out, lse, causal, mask, scale)
        rows = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout state
        # The kernel reads lse through a raw pointer without checking that it is contiguous.
        gradients = torch.ops.aten._flash_attention_backward.default(
            *(
                *rows,
                lse.contiguous(),
                None,
                None,
                q.shape[2],
                k.shape[2],
                0.0,
                causal,
                unused,
                unused,
            ),
            scale=scale,
        )
        grad_q, grad_k, grad_v = (grad.transpose(1, 2) for grad in gradients)
        return grad_q, grad_k, grad_v


def _dense(x: torch.Tensor, group: int = 1) -> torch.Tensor:
    """[B, H, L, D] stored contiguously as [B, L, H, D], with each head repeated `group` times."""
    x = x.transpose(1, 2)
    return (x.contiguous() if group == 1 else x.repeat_interleave(group, dim=2)).transpose(1, 2)


class CudnnOperator:
    """`Operator` for `aten::_scaled_dot_product_cudnn_attention` (tensors [B, H, L, D]).

    KV heads are repeated to the number of query heads, and their gradients summed in float32, since
    torch does not promise that cuDNN supports GQA. Raises `ValueError` where
    `TORCH_CUDNN_SDPA_AVOID_RECOMPILE` is set, which changes the layout of the log-sum-exp.
    """

    upcasts = False
    masks_are_cheap = False
    _stats_dims = 4
    """Dimensions of the log-sum-exp from forward, [B, H, L] or [B, H, L, 1] depending on torch's
    version; backward must get the same."""

    def __init__(self) -> None:
        if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0") not in ("", "0"):
            raise ValueError(
                "the cudnn block does not go with TORCH_CUDNN_SDPA_AVOID_RECOMPILE; unset it"
            )

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
        _check("cudnn", q, k, causal, cap)
        if mask is not None:
            return dense_forward(q, k, v, causal, mask, scale)
        group = q.shape[1] // k.shape[1]
        out, stats, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            _dense(q),
            _dense(k, group),
            _dense(v, group),
            None,
            True,
            0.0,
            causal,
            False,
            scale=scale,
        )
        self._stats_dims = stats.dim()
        return out, stats.reshape(q.shape[:3])

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
        _check("cudnn", q, k, causal, cap)
        if mask is not None:
            return dense_backward(grad_out, q, k, v, out, lse, causal, mask, scale)
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        stats = lse.contiguous()
        stats = stats[..., None] if self._stats_dims == 4 else stats
        unused = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout state
        inputs = (
            _dense(grad_out),
            _dense(q),
            _dense(k, group),
            _dense(v, group),
            _dense(out),
            stats,
            unused,
            unused,
        )
        grad_q, *grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            *(*inputs, None, None, None, q.shape[2], k.shape[2], 0.0, causal), scale=scale
        )
        grad_k, grad_v = (
            grad.unflatten(1, (kv_heads, group)).sum(
                2, dtype=torch.promote_types(q.dtype, torch.float32)
            )
            for grad in grads
        )
        return grad_q, grad_k, grad_v


class FlashBlock(PieceBlock):
    """`Block` through FlashAttention-2.

    16-bit inputs and head widths that are multiples of 8 up to 256.
    """

    def __init__(self) -> None:
        super().__init__(FlashOperator())


class CudnnBlock(PieceBlock):
    """`Block` through cuDNN: 16-bit inputs, head widths that are multiples of 8 up to 128."""

    def __init__(self) -> None:
        super().__init__(CudnnOperator())
