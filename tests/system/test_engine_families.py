"""A real vLLM engine against transformers, for families with something particular: soft caps, windows,
factors, stacked projections.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine_side import BOUND, gap, opened, publish_five_times
from support.tiny import write_model

from megarl.settings.rollout import EngineConfig

LOCAL = dict(tied=True, head_dim=32, sliding_window=16, query_pre_attn_scalar=20)
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": dict(kind="gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=4.0, **LOCAL),
    "gemma3_text": dict(kind="gemma3_text", layer_types=["sliding_attention", "full_attention"],
     **LOCAL),
    "granite": dict(kind="granite", embedding_multiplier=3.0, residual_multiplier=0.5,
     attention_multiplier=0.2, logits_scaling=2.0),
    "phi3": dict(kind="phi3", sliding_window=16),
}  # fmt: skip
"""{family: a small model with what is particular to it}"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [
    pytest.param(one, marks=pytest.mark.nightly if one != "gemma2" else ()) for one in OTHERS
])  # fmt: skip
def test_an_engine_computes_what_other_families_do(kind: str, tmp_path: Path) -> None:
    with opened(write_model(tmp_path / "model", **OTHERS[kind]), EngineConfig()) as side:
        publish_five_times(side, gap, BOUND)
