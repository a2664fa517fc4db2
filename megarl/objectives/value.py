"""The critic's loss, and how well its predictions explain the returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """The critic's loss of T tokens, before the mean."""

    per_token: Tensor
    """[T] with gradient."""
    clipped: Tensor
    """[T] bool, where clipping changed the token's loss."""


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> ValueTerms:
    """(value - return)^2 / 2, differentiable in `values` only. With `clip` above 0, the larger of
    this and the error of the value clipped to `old` +- `clip`: PPO's value clipping,
    https://github.com/openai/baselines, arXiv:2005.12729, 3.

    `old`: [T] predictions before the step's first update.
    """
    old, returns = old.detach(), returns.detach()
    plain = 0.5 * (values - returns).square()
    if clip is None:
        return ValueTerms(plain, torch.zeros_like(plain, dtype=torch.bool))
    moved = (values - old).detach()
    # Within the clip it is the value itself: old + (value - old) would differ by rounding.
    near = torch.where(moved.abs() <= clip, values, old + clip * moved.sign())
    bounded = 0.5 * (near - returns).square()
    return ValueTerms(torch.maximum(plain, bounded), (bounded > plain).detach())


MOMENTS = ("count", "sum_return", "sum_return_2", "sum_error", "sum_error_2")
"""Keys of `moments`, which are summed over micro-batches and ranks."""


def moments(values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    """Float64 scalars; an error is return - value."""
    returns = returns.double()
    errors = returns - values.detach().double()
    counted = torch.tensor(float(returns.numel()), dtype=torch.float64, device=returns.device)
    parts = (counted, returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum())
    return dict(zip(MOMENTS, parts, strict=True))


def explained_variance(sums: dict[str, float]) -> float:
    """1 - Var(return - value) / Var(return): 1 for a perfect critic, 0 for a constant one, negative
    for a worse one. 0 if all returns are equal.
    """
    count = max(sums["count"], 1.0)
    of_returns = sums["sum_return_2"] / count - (sums["sum_return"] / count) ** 2
    of_errors = sums["sum_error_2"] / count - (sums["sum_error"] / count) ** 2
    # Below the rounding of the two sums, the difference says nothing.
    if of_returns <= 1e-12 * sums["sum_return_2"] / count:
        return 0.0
    return 1.0 - of_errors / of_returns
