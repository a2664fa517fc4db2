"""Models that load, but with which the run would not be what its recipe says, and
numbers of a model's config.json that are no model's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from support.tiny import write_model
from transformers import (
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from megarl.engines.plan import check_engine_model
from megarl.settings.training import ModelConfig
from megarl.trainer.model_config import config_problem
from megarl.trainer.plan import plan_model


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, LlamaConfig, MistralConfig])
def test_models_that_the_engine_refuses(kind: type[Qwen2Config]) -> None:
    check_engine_model(kind())
    name = kind.__name__.removesuffix("Config")
    check_engine_model(kind(architectures=[f"{name}ForCausalLM"]))
    with pytest.raises(ValueError, match=rf"architectures \['{name}ForSeq.*; set model\.path to"):
        check_engine_model(kind(architectures=[f"{name}ForSequenceClassification"]))


def test_a_causal_model_of_another_family_is_not_refused() -> None:
    check_engine_model(GemmaConfig(architectures=["GemmaForCausalLM"]))
    # Published Gemma 2 checkpoints name it twice.
    check_engine_model(Gemma2Config(hidden_act="gelu_pytorch_tanh"))


def test_weights_that_are_not_used_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_model(tmp_path / "model"))
    plan_model(ModelConfig(path=path))
    assert "are not used" not in capsys.readouterr().err
    plan_model(ModelConfig(path=path, from_scratch=True))
    assert "are not used" in capsys.readouterr().err
    (tmp_path / "model" / "model.safetensors").unlink()
    plan_model(ModelConfig(path=path, from_scratch=True))
    assert "are not used" not in capsys.readouterr().err


@pytest.mark.parametrize("cap", [0.0, -1.0])
def test_a_soft_cap_is_above_zero_or_none(cap: float) -> None:
    """A cap of 0 would make all scores 0 or NaN."""
    config = transformers.Gemma2Config(attn_logit_softcapping=cap)
    assert config_problem(config) == f"attn_logit_softcapping is {cap:g}, not above 0"
    config.attn_logit_softcapping = None
    assert not config_problem(config)
