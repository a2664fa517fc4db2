"""Liger's fused linear log-prob and entropy (`pip install liger-kernel[cutedsl]`): on Hopper,
logits never leave the chip.

An alternative to ours on one GPU, and something to hold it against; chosen by name only. What it
does differently, of
0.8.5: on Hopper it takes bfloat16 only; elsewhere it runs chunks of 512 tokens in torch, and sums
the weight's gradient in the weight's dtype; entropies are rounded to the dtype of `hidden`; a
masked word (logit -inf) makes the entropy NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megarl.kernels.logprobs import VocabularyShard

REFUSED = "log-prob backend 'liger' {}; choose backend 'chunked'"


def liger_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    shard: VocabularyShard | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `megarl.kernels.logprobs.linear_logprobs`; `ValueError` where it cannot run."""
    if shard is not None:
        raise ValueError(REFUSED.format("does not take a vocabulary cut over ranks"))
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
    """Liger's operator in our words, on any device: its torch fallback is an oracle on CPU.
    `ImportError` without it.
    """
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as operator  # pyright: ignore[reportMissingImports]

    no_target, tiles, with_entropy = -100, 1, True
    loss, entropy = operator.apply(
        hidden, weight, targets, float(temperature), no_target, tiles, with_entropy
    )
    return -loss, entropy.float()
