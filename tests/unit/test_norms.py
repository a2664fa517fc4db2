"""RMSNorm by torch's function equals the model's own, and what it does not compute is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_families import small_model
from torch import nn

from megarl.trainer.norms import use_torch_norms

KINDS = {
    "qwen2": 5, "qwen3": 9, "llama": 5, "mistral": 5, "phi3": 5, "granite": 5, "olmo2": 9,
    "gemma2": 9, "gemma3_text": 13,
}  # fmt: skip
"""Model type -> its norms with two layers."""


def results(model: Any) -> dict[str, torch.Tensor]:
    """Logits, and the gradient of every parameter."""
    tokens = torch.arange(14).view(2, 7) * 3
    logits = model(input_ids=tokens).logits
    model.zero_grad()
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    grads = {name: one.grad for name, one in model.named_parameters()}
    return {"logits": logits.detach()} | grads


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_computes_the_same(kind: str) -> None:
    model = small_model(kind)
    before = results(model)
    names = list(dict(model.named_parameters()))
    assert use_torch_norms(model) == KINDS[kind]
    assert list(dict(model.named_parameters())) == names
    after = results(model)
    for name, wanted in before.items():
        error = (after[name] - wanted).abs().max() / wanted.abs().max()
        assert error < 2e-5, (name, error)


def test_a_model_without_storage_is_proved_too() -> None:
    with torch.device("meta"):
        model = small_model("gemma2")
    assert use_torch_norms(model) == KINDS["gemma2"]


def test_bfloat16_keeps_small_weights_of_one_plus_weight() -> None:
    model = small_model("gemma2").bfloat16()
    use_torch_norms(model)
    norm: Any = next(one for one in model.modules() if type(one).__name__ == "Gemma2RMSNorm")
    norm.weight.data.fill_(0.001)  # 1 + 0.001 is 1 in bfloat16
    states = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    scaled = norm(states).double()
    exact = states.double() / (states.double().pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    assert scaled.dtype == torch.float64 and norm(states).dtype == torch.bfloat16
    assert abs((scaled / exact).mean() - 1.001) < 3e-4


class MeanRMSNorm(nn.Module):
    """Subtracts the mean, as RMSNorm does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states - states.mean(-1, keepdim=True)
        return self.weight * states * (states.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()


class OtherEpsRMSNorm(MeanRMSNorm):
    """Does not use the epsilon that it has."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.weight * states * (states.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()


class GatedRMSNorm(MeanRMSNorm):
    def forward(self, states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(states) * gate


@pytest.mark.parametrize("kind", [MeanRMSNorm, OtherEpsRMSNorm, GatedRMSNorm])
def test_what_is_no_rmsnorm_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}.*set training.norms to 'model'"):
        use_torch_norms(nn.Sequential(kind()))
