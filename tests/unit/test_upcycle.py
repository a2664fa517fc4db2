"""A dense model as a mixture: the same log-probs at first, in the code of transformers and in ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support.tiny import write_model
from transformers import AutoModelForCausalLM

from megarl.trainer.experts import EXPERTS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import upcycle


@pytest.mark.parametrize("kind", upcycle.KINDS)
def test_a_mixture_begins_as_the_dense_model(kind: str, tmp_path: Path) -> None:
    dense = write_model(tmp_path / "dense", kind=kind, head_dim=32)
    assert upcycle.main([str(dense), str(tmp_path / "mixture"), "--experts", "3"]) == 0
    ids = torch.arange(2, 22)[None]
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for folder in (dense, tmp_path / "mixture", tmp_path / "mixture")
    ]
    models[1].set_experts_implementation("eager")  # torch's grouped product has no float64
    models[2].set_experts_implementation(EXPERTS)
    with torch.no_grad():
        logprobs = [model(ids).logits.log_softmax(-1) for model in models]
    for found in logprobs[1:]:
        assert (found - logprobs[0]).abs().max() <= 1e-6  # transformers' norms are in float32


def test_what_cannot_be_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = write_model(tmp_path / "dense", kind="qwen2")
    assert upcycle.main([str(dense), str(tmp_path / "mixture")]) == 1
    assert "model type qwen2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        upcycle.main([str(dense), str(tmp_path / "mixture"), "--top-k", "5"])
