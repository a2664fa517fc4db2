"""The critic's loss, and how well its predictions explain the returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """What `value_loss` returns for T tokens, before the mean over tokens, [T] each: the critic's
    loss with gradient (`per_token`), and whether clipping changed it (`clipped`, bool).
    """

    per_token: Tensor
    """[T] loss of each token, with gradient."""
    clipped: Tensor
    """[T] bool, True where clipping changed the token's loss."""


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> ValueTerms:
    """The critic's loss of each token, (value - return)^2 / 2. With `clip` it is the larger one of
    this error and of the error of the value clipped to `old` +- `clip`: PPO's value clipping,
    https://github.com/openai/baselines, arXiv:2005.12729, 3.

    `values`: [T] the critic's predictions. `old`: [T] its predictions before the step's first
    update. `returns`: [T] what it is to predict. `clip`: above 0, or None for no clipping. Returns
    each token's loss, differentiable in `values` only, and whether clipping changed it.
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
"""Keys of the result of `moments`, which are all summed over micro-batches and ranks."""


def moments(values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    """The sums over T tokens from which `explained_variance` follows, as a dict of float64 scalars:
    `count` of tokens, `sum_return` and `sum_return_2` of the returns and their squares, `sum_error`
    and `sum_error_2` of return - value and its square. `values`: [T] the critic's predictions;
    `returns`: [T] what it was to predict.
    """
    returns = returns.double()
    errors = returns - values.detach().double()
    counted = torch.tensor(float(returns.numel()), dtype=torch.float64, device=returns.device)
    parts = (counted, returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum())
    return dict(zip(MOMENTS, parts, strict=True))


def explained_variance(sums: dict[str, float]) -> float:
    """How well the critic predicts: 1 - Var(return - value) / Var(return), which is 1 for a perfect
    critic, 0 for a constant one, negative for a worse one. 0 if all returns are equal. `sums`: the
    dict that `moments` returns, summed key by key over micro-batches and ranks, as floats.
    """
    count = max(sums["count"], 1.0)
    of_returns = sums["sum_return_2"] / count - (sums["sum_return"] / count) ** 2
    of_errors = sums["sum_error_2"] / count - (sums["sum_error"] / count) ** 2
    # Below the rounding of the two sums, the difference says nothing.
    if of_returns <= 1e-12 * sums["sum_return_2"] / count:
        return 0.0
    return 1.0 - of_errors / of_returns
