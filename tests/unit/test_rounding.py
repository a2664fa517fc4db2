"""When 16-bit weights change that come from a file of their dtype: by torch's own rounding."""

from __future__ import annotations

import pytest
import torch

from megarl.trainer.context import rounding_line, steps_until_half_change


def changed(weights: torch.Tensor, moved: float) -> float:
    """Share of 16-bit weights that differ once their float32 copies have moved away from 0."""
    master = weights.float()
    return float(((master + moved * master.sign()).to(weights.dtype) != weights).float().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [2e-5, 0.02, 1.0, 37.0])
def test_half_of_the_weights_change_at_that_step_and_not_before(
    scale: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weights = (scale * torch.randn(300, 101)).to(dtype)
    steps = steps_until_half_change([weights[:200], weights[200:]], 1e-6)
    assert changed(weights, 0.99e-6 * steps) < 0.5 <= changed(weights, 1.01e-6 * steps)


def test_zeros_and_ranks_without_weights_count_for_nothing() -> None:
    assert steps_until_half_change([], 1e-6) == 0.0
    assert steps_until_half_change([torch.zeros(4).bfloat16()], 1e-6) == 0.0
    weights = torch.tensor([0.0, 0.0, 0.0, 0.05]).bfloat16()
    assert steps_until_half_change([weights], 1e-6) == pytest.approx(122.07, rel=1e-3)
    assert "before optimizer step 122;" in rounding_line("policy", [weights], 1e-6)
