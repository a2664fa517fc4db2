"""How evenly routers use the experts of a mixture: losses that even it out, and metrics.

    balance loss   E sum_e f_e P_e             Switch Transformer, arXiv:2101.03961, eq. 4-6
    z loss         mean of log(sum(exp))^2     of the router's logits; ST-MoE, arXiv:2202.08906
    bias           + rate sign(mean - load)    of sigmoid routers; DeepSeek-V3, arXiv:2412.19437

f_e: tokens that choose expert e, divided by all tokens, so that the f_e add up to K. P_e: mean
probability of e. Both are over the whole mini-batch on all ranks, and losses are means over layers.
A shared prefix counts for each sequence that it begins, padding does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megarl.parallel.collectives import all_reduce
from megarl.parallel.mesh import Axis
from megarl.settings.training import ExpertsConfig
from megarl.types import MicroBatch

BIAS = "e_score_correction_bias"
"""Buffer [E] float32 of sigmoid routers, added to scores where experts are chosen."""

NAMES = ("largest_share", "largest_share_max", "entropy", "unused", "balance_loss", "z_loss")


class ExpertLoad:
    """Loads of a model's experts in a mini-batch. Of a dense model nothing is computed."""

    def __init__(self, settings: ExpertsConfig) -> None:
        self.settings = settings
        self.routers: list[Any] = []
        """By layer of experts."""
        self.num_experts = 0
        self._multiplicity: torch.Tensor | None = None
        self._records = False
        self._num_tokens = self._choices = torch.tensor(0.0)
        self._sums = torch.tensor(0.0)
        """[layers, 2 E + 2] float64 sums over tokens: choices and probabilities of each expert,
        entropy, and squares of the z loss."""
        self._losses: list[torch.Tensor] = []
        self._metrics: list[torch.Tensor] = []

    @property
    def needs_counts(self) -> bool:
        """Whether `count` must be called before the backward passes of a mini-batch."""
        return bool(self.routers) and self.settings.balance_coefficient > 0

    def begin(self, micro_batches: Sequence[MicroBatch], axis: Axis) -> None:
        """Begin a mini-batch of this rank's packed sequences. Collective over `axis`."""
        if self.routers:
            parts = [micro.multiplicity.sum(dtype=torch.float64) for micro in micro_batches]
            self._num_tokens = all_reduce(torch.stack(parts).sum(), axis).clamp_min(1)
            self.clear()

    def clear(self) -> None:
        """Forget what forward passes have added."""
        self._losses = []
        if self.routers:
            width = 2 * self.num_experts + 2
            self._sums = self._num_tokens.new_zeros(len(self.routers), width)

    def count(self, axis: Axis) -> None:
        """Take the choices of the passes so far, which were of the whole mini-batch, as the f of
        the balance loss. Collective.
        """
        choices, _, _, _ = self._split(all_reduce(self._sums, axis))
        self._choices = choices / self._num_tokens
        self.clear()

    @contextmanager
    def of(self, micro: MicroBatch) -> Iterator[None]:
        """A context for forward and backward pass of a micro-batch."""
        self._multiplicity, self._records = micro.multiplicity, True
        try:
            yield
        finally:
            self._multiplicity, self._records = None, False

    def add(self, layer: int, logits: torch.Tensor, index: torch.Tensor) -> None:
        """Add a router's logits [T, E] and choices [T, K]. Layers that are computed again in the
        backward pass add nothing.
        """
        if self._multiplicity is None:
            return
        probabilities = logits.softmax(-1)
        if hasattr(self.routers[layer], BIAS):
            scores = logits.sigmoid()
            probabilities = scores / scores.sum(-1, keepdim=True)
        weights = self._multiplicity.to(logits.dtype)
        scale = (weights / self._num_tokens / len(self.routers)).to(logits.dtype)
        losses = []
        if self.settings.balance_coefficient > 0 and torch.is_grad_enabled():
            factors = self.settings.balance_coefficient * self.num_experts * self._choices[layer]
            losses.append(scale @ (probabilities @ factors.to(logits.dtype)))
        if self.settings.z_coefficient > 0 and torch.is_grad_enabled():
            squares = logits.logsumexp(-1).square()
            losses.append(self.settings.z_coefficient * (scale @ squares))
        if self._records:
            self._losses += losses
            self._record(layer, logits.detach(), probabilities.detach(), index)

    def _record(
        self, layer: int, logits: torch.Tensor, probabilities: torch.Tensor, index: torch.Tensor
    ) -> None:
        assert self._multiplicity is not None
        weights = self._multiplicity.double()
        choices, mass, entropy, squares = self._split(self._sums[layer])
        choices.index_add_(0, index.flatten(), weights.repeat_interleave(index.shape[1]))
        mass += weights @ probabilities.double()
        entropy += weights @ torch.special.entr(probabilities).sum(-1).double()
        squares += weights @ logits.logsumexp(-1).square().double()

    def _split(self, sums: torch.Tensor) -> tuple[torch.Tensor, ...]:
        choices, mass, others = sums.split([self.num_experts, self.num_experts, 2], dim=-1)
        return choices, mass, others[..., 0], others[..., 1]

    def take_losses(self) -> torch.Tensor | int:
        """This micro-batch's part of both losses times their coefficients, after its forward
        pass.
        """
        self._records = False
        losses, self._losses = self._losses, []
        return sum(losses)

    def finish(self, axis: Axis) -> None:
        """After an optimizer step, step the biases and note the metrics. Collective."""
        if not self.routers:
            return
        choices, mass, entropy, squares = self._split(all_reduce(self._sums, axis))
        mean = choices.mean(-1, keepdim=True)
        if self.settings.bias_rate > 0:
            for router, change in zip(self.routers, (mean - choices).sign(), strict=True):
                getattr(router, BIAS).add_(self.settings.bias_rate * change.float())
        largest = choices.amax(-1) / mean[:, 0].clamp_min(1e-9)
        products = (choices * mass).sum(-1) * self.num_experts / self._num_tokens**2
        values = (
            *(largest.mean(), largest.max()),
            entropy.mean() / self._num_tokens,
            (choices == 0).sum().double(),
            *(products.mean(), squares.mean() / self._num_tokens),
        )
        self._metrics.append(torch.stack(values))

    def take_metrics(self) -> dict[str, float]:
        """{"experts/NAME": mean over the optimizer steps since the last call}; {} of a dense
        model.
        """
        if not self._metrics:
            return {}
        values = torch.stack(self._metrics).mean(0).tolist()
        self._metrics = []
        metrics = {f"experts/{name}": value for name, value in zip(NAMES, values, strict=True)}
        if self.settings.balance_coefficient == 0:
            del metrics["experts/balance_loss"]
        if self.settings.z_coefficient == 0:
            del metrics["experts/z_loss"]
        return metrics
