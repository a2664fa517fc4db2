"""Per-token estimators of the divergence KL(policy || reference) from sampled tokens.

To add one: write a function of (logp, ref), add a line to `KL_ESTIMATORS`, add its name to `KLName`
in `config.py` and its closed form to `tests/unit/test_algorithms.py`.

With d = log-prob - reference log-prob of a token that the policy sampled
(http://joschu.net/blog/kl-approx.html):

    name  value             mean            mean of its gradient, used as a loss
    k1    d                 KL, unbiased    0: log-probs have mean score 0, so it restrains nothing
    k2    d^2 / 2           biased          that of KL(policy || reference), exactly
    k3    exp(-d) - 1 + d   KL, unbiased    that of KL(reference || policy): the other direction

So k1 is for the reward, k2 and k3 are for the loss. All of it holds for tokens of the policy
itself; after several optimizer steps on the same samples they are approximations.

In the reward, the penalty is charged to the whole sequence (gamma is 1): before advantages,

    rewards_N  <-  rewards_N - coefficient * sum over the sample's response tokens of
    k(logp.detach(), ref)

without gradient; a sample cut over ranks or rows must be summed over all of them first. In the
loss, the per-token values are weighted by the same weights as the policy's loss
(`losses.AGGREGATIONS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

K3_LIMIT = 10.0
"""k3 is exact for d >= -K3_LIMIT and continued by its tangent below, see `k3`."""

KLFunction = Callable[[Tensor, Tensor], Tensor]
"""(logp [T], ref [T]) -> [T], differentiable in logp."""


def k1(logp: Tensor, ref: Tensor) -> Tensor:
    """[T] d = logp - ref. Differentiable, but see the module's table: as a loss it does nothing on
    average.
    """
    return logp - ref.detach()


def k2(logp: Tensor, ref: Tensor) -> Tensor:
    """[T] d^2 / 2. Gradient d."""
    return 0.5 * (logp - ref.detach()).square()


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """[T] exp(-d) - 1 + d >= 0. Gradient 1 - exp(-d).

    `expm1` keeps the digits where d is small (the value is about d^2 / 2, lost in float32 by
    exp(-d) - 1 below 1e-3). Below d = -K3_LIMIT the tangent at that point takes over: value and
    slope stay continuous and finite, and the gradient still pulls the policy back. A clamp of d
    would give those tokens, the farthest from the reference, none.
    """
    d = logp - ref.detach()
    # Clamped so that the branch that is not taken stays finite. The branches are never added up: a
    # tangent's slope of 22,025 # that cancels out would leave its rounding, 1e-3, in the gradient.
    exact = torch.expm1(-d.clamp(min=-K3_LIMIT)) + d
    tangent = math.expm1(K3_LIMIT) - K3_LIMIT - math.expm1(K3_LIMIT) * (d + K3_LIMIT)
    return torch.where(d >= -K3_LIMIT, exact, tangent)


KL_ESTIMATORS: dict[str, KLFunction] = {"k1": k1, "k2": k2, "k3": k3}
