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
"""Error message; the placeholder is what the backend lacks."""


def liger_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    shard: VocabularyShard | None,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of targets and entropies by Liger; arguments as in `logprobs.linear_logprobs`.

    Raises `ValueError` where Liger cannot run: no CUDA GPU, a split vocabulary, a soft cap, or no
    package.
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
    """(log-probs [T], entropies [T] float32) by Liger, on any device: on CPU its torch fallback.

    Raises `ImportError` without liger-kernel.
    """
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as operator  # pyright: ignore[reportMissingImports]

    no_target, tiles, with_entropy = -100, 1, True
    loss, entropy = operator.apply(
        hidden, weight, targets, float(temperature), no_target, tiles, with_entropy
    )
    return -loss, entropy.float()
