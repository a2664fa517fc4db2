"""Heads: what a role computes from its backbone's last hidden states.

    name       computes                                       for
    logprobs   log-prob and entropy of each trained token     policy, reference
    value      one number for each trained token              critic: value of the state before it
    scalar     one number for each sample, at its last token  reward model

To add one, write a module, add its name to `HeadName` and a branch to `RoleModel.forward`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from megarl.kernels.logprobs import VocabularyShard, linear_logprobs

HeadName = Literal["logprobs", "value", "scalar"]


class LogProbHead(nn.Linear):
    """The output head (unembedding): computes log-probs of given targets instead of returning
    logits.

    The weight keeps the name and the shape of the Hugging Face head that it replaces.
    """

    shard: VocabularyShard | None = None
    """The part of the vocabulary that `weight` holds under tensor parallelism."""
    backend = "chunked"

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [M, H], targets [M] -> log-probs [M], entropies [M], both float32."""
        return linear_logprobs(hidden, self.weight, targets, temperature, self.shard, self.backend)


class ScoreHead(nn.Linear):
    """A linear head with one output for each hidden state, for values or rewards. It is initialised
    to 0, so a new critic predicts 0.

    Every tensor-parallel rank holds the whole weight and computes the same output.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, bias=False, dtype=dtype)
        nn.init.zeros_(self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [M, H] -> [M] float32."""
        return super().forward(hidden)[:, 0].float()
