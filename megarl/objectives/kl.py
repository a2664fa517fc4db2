"""Per-token estimators of the divergence KL(policy || reference) from sampled tokens.

To add one, write a function of (logp, ref), add it to `KL_ESTIMATORS` and to `KLName` in
`settings/objectives.py`, and its closed form to `tests/unit/test_algorithms.py`.

With d = log-prob - reference log-prob of a token sampled from the policy
(http://joschu.net/blog/kl-approx.html):

    name  value             mean            mean of its gradient as a loss
    k1    d                 KL, unbiased    0: it restrains nothing
    k2    d^2 / 2           biased          that of KL(policy || reference), exactly
    k3    exp(-d) - 1 + d   KL, unbiased    that of KL(reference || policy), the other direction

So k1 is for the reward, and k2 and k3 are for the loss.

In the reward, the penalty counts for the whole sequence, without gradient and before advantages:

    rewards_N <- rewards_N - coefficient * sum over the sample's response tokens of k(logp, ref)

Advantages per token charge it to each token instead, so that the return of token t has the
penalties from t on: REINFORCE++, arXiv:2501.03262, eq. 8. In the loss, values get the weights of
the policy's loss (`losses.AGGREGATIONS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.settings.objectives import KLConfig

K3_LIMIT = 10.0
"""`k3` is exact for d = logp - ref >= -K3_LIMIT; below, it continues as its tangent."""

KLFunction = Callable[[Tensor, Tensor], Tensor]
"""(logp [T] by the policy, ref [T] by the reference) -> [T], differentiable in logp."""


def k1(logp: Tensor, ref: Tensor) -> Tensor:
    """d, for rewards only: as a loss its gradient is 0 on average."""
    return logp - ref.detach()


def k2(logp: Tensor, ref: Tensor) -> Tensor:
    """d^2 / 2; its gradient is d."""
    return 0.5 * (logp - ref.detach()).square()


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """exp(-d) - 1 + d >= 0; its gradient is 1 - exp(-d).

    `expm1` keeps the digits of small d. Below d = -10 the tangent at -10 keeps value and gradient
    continuous and finite, and still pulls the policy back.
    """
    d = logp - ref.detach()
    # Clamped, so that the branch that is not taken is finite. The branches are selected, not added:
    # the tangent's slope of 22,025 would leave a rounding error of 1e-3 in the gradient.
    exact = torch.expm1(-d.clamp(min=-K3_LIMIT)) + d
    tangent = math.expm1(K3_LIMIT) - K3_LIMIT - math.expm1(K3_LIMIT) * (d + K3_LIMIT)
    return torch.where(d >= -K3_LIMIT, exact, tangent)


KL_ESTIMATORS: dict[str, KLFunction] = {"k1": k1, "k2": k2, "k3": k3}
"""{`algorithm.kl.estimator`: function}"""


LARGEST_ERROR = 0.2
"""Bound of the relative error that `KLControl` acts on in one step, as in the paper."""


class KLControl:
    """The coefficient of the KL penalty. With `algorithm.kl.target`, a proportional controller in
    log-space changes it after each step, arXiv:1909.08593, 2.2:

        error = clip(kl / target - 1, -0.2, 0.2)        coefficient <- coefficient (1 + gain error)
    """

    def __init__(self, config: KLConfig) -> None:
        self._config = config
        self.coefficient = config.coefficient

    @property
    def is_adaptive(self) -> bool:
        return self._config.target is not None

    def update(self, divergence: float) -> None:
        """`divergence`: mean KL of a token in this step, in nats."""
        if self._config.target is not None:
            error = divergence / self._config.target - 1.0
            error = max(-LARGEST_ERROR, min(LARGEST_ERROR, error))
            self.coefficient *= 1.0 + self._config.gain * error

    def restore(self, coefficient: float) -> None:
        """From a checkpoint, unless the recipe fixes the coefficient."""
        if self.is_adaptive:
            self.coefficient = coefficient
