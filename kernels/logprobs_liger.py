"""Log-probs and entropies through Liger's fused kernel (`pip install liger-kernel[cutedsl]`).

An alternative to our own kernel on one GPU; on Hopper, logits never leave the chip. liger-kernel
0.8.5 takes bfloat16 only there. Elsewhere it sums the weight's gradient in the weight's dtype.
Entropies are rounded to the dtype of `hidden`, and a logit of -inf makes them NaN.
"""

from __future__ import annotations

import torch

REFUSED = "log-prob backend 'liger' {}; choose backend 'chunked'"


def liger_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    shard: object | None,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `logprobs.linear_logprobs`, on one CUDA GPU. Raises `ValueError` for `shard`, `cap`,
    another device, or where the package does not import.
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
    """Liger's operator without checks, on CPU its torch fallback. Raises `ImportError` without
    liger-kernel.
    """
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as operator  # pyright: ignore[reportMissingImports]

    no_target, tiles, with_entropy = -100, 1, True
    loss, entropy = operator.apply(
        hidden, weight, targets, float(temperature), no_target, tiles, with_entropy
    )
    return -loss, entropy.float()
