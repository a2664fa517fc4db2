"""Log-probs and entropies through Liger's fused kernel (`pip install liger-kernel[cutedsl]`).

An alternative to our own kernel on one GPU; on Hopper, logits never leave the chip. Differences of
liger-kernel 0.8.5 from ours: on Hopper it takes bfloat16 only. Elsewhere it runs chunks of 512
tokens in torch and sums the weight's gradient in the weight's dtype. Entropies are rounded to the
dtype of `hidden`. A logit of -inf makes the entropy NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megarl.kernels.logprobs import VocabularyShard

REFUSED = "log-prob backend 'liger' {}; choose backend 'chunked'"
"""Message of the `ValueError` where Liger cannot run; the placeholder is what the backend lacks."""


def liger_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    shard: VocabularyShard | None,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets` and entropies of softmax(hidden weight^T / temperature) by Liger's
    fused kernel, on one CUDA GPU. Same arguments as the other backends of
    `logprobs.linear_logprobs`.

    `hidden` [T, H], `weight` [V, H] of the same dtype, `targets` [T] int64 token ids. Returns
    (log-probs [T], entropies [T] float32), differentiable in `hidden` and `weight`. Raises
    `ValueError` where Liger cannot run: `shard` (a vocabulary split over ranks) or `cap` (a soft
    cap of logits) is not None, there is no CUDA GPU, or the package does not import.
    """
    if cap is not None:
        raise ValueError(REFUSED.format("does not take a soft cap of logits"))
    if shard is not None:
        raise ValueError(REFUSED.format("does not take a vocabulary split over ranks"))
    if not hidden.is_cuda:
        raise ValueError(
            REFUSED.format(f"needs a CUDA device, and the tensors are on {hidden.device}")
        )
    try:
        return apply(hidden, weight, targets, temperature)
    except ImportError as error:
        raise ValueError(
            REFUSED.format(f"needs liger-kernel[cutedsl], which does not import here: {error}")
        ) from error


def apply(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call Liger's operator, on any device (on CPU Liger's torch fallback), without checks.

    `hidden` [T, H], `weight` [V, H] of the same dtype, `targets` [T] int64, `temperature` the
    divisor of the logits. Returns (log-probs of the targets [T], entropies [T] float32),
    differentiable in `hidden` and `weight`. Raises `ImportError` without the package liger-kernel.
    """
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as operator  # pyright: ignore[reportMissingImports]

    no_target, tiles, with_entropy = -100, 1, True
    loss, entropy = operator.apply(
        hidden, weight, targets, float(temperature), no_target, tiles, with_entropy
    )
    return -loss, entropy.float()
