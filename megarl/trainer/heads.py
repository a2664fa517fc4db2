"""Heads: what a model computes from its last hidden states. Today: log-probs of target tokens."""

from __future__ import annotations

import torch
from torch import nn

from megarl.kernels.logprobs import VocabularyShard, linear_logprobs


class LogProbHead(nn.Linear):
    """The output embedding, asked for log-probs of targets. The same weight under the same name as
    the head it replaces.
    """

    shard: VocabularyShard | None = None
    """Which words `weight` is of, where a tensor axis shares them."""
    backend = "chunked"

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_logprobs(hidden, self.weight, targets, temperature, self.shard, self.backend)
