"""Numbers of a model's config.json that are no model's."""

from __future__ import annotations

import pytest
import transformers

from megarl.trainer.model_config import config_problem


@pytest.mark.parametrize("cap", [0.0, -1.0])
def test_a_soft_cap_is_above_zero_or_none(cap: float) -> None:
    """A cap of 0 would make all scores 0 or NaN."""
    config = transformers.Gemma2Config(attn_logit_softcapping=cap)
    assert config_problem(config) == f"attn_logit_softcapping is {cap:g}, not above 0"
    config.attn_logit_softcapping = None
    assert not config_problem(config)
