"""Triton's gated activations and rotary embeddings against float64 and against models' own code: in
Triton's interpreter, in the process that test_triton.py starts, and on a GPU if there is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny_families import small_model
from torch import nn

from megarl.kernels.gated_triton import ACTIVATIONS, Activation, gated
from megarl.kernels.rotary_triton import rotary
from megarl.trainer.elementwise import FORMULAS, use_triton_elementwise

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
BOUND = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of the largest value: a rounding of each dtype to nearest is 6e-8, 5e-4 and 4e-3."""
DTYPES = [torch.float32] if INTERPRETED else list(BOUND)
FAMILIES = {"qwen2": 2, "qwen3": 2, "phi3": 2, "olmo2": 2, "gemma2": 2, "gemma3_text": 2}


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    return test if INTERPRETED else pytest.mark.gpu(test)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=draw)).to(dtype).to(DEVICE)


def close(found: torch.Tensor, exact: torch.Tensor, bound: float) -> None:
    assert found.shape == exact.shape
    assert (found.double() - exact).abs().max() <= bound * exact.abs().max()


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 1030), (5, 64), (0, 8)])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated(name: Activation, stacked: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """`stacked`: gate and up are halves of one tensor, as in Phi-3, so their rows lie apart."""
    whole = drawn(*shape[:-1], 2 * shape[-1], dtype=dtype).requires_grad_()
    exact = whole.detach().double().requires_grad_()
    weight = drawn(*shape, dtype=dtype, seed=1)
    halves = [one.chunk(2, -1) for one in (whole, exact)]
    gate, up = halves[0] if stacked else [one.contiguous() for one in halves[0]]
    found = gated(gate, up, name)
    wanted = FORMULAS[name](halves[1][0]) * halves[1][1]
    assert found.dtype == dtype
    (found * weight).sum().backward()
    (wanted * weight.double()).sum().backward()
    assert whole.grad is not None and exact.grad is not None
    if found.numel():
        close(found, wanted, BOUND[dtype])
        close(whole.grad, exact.grad, BOUND[dtype])
    assert torch.equal(found, gated(gate, up, name))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The formula of the kernel, in x's dtype."""
    half = cos.shape[-1] // 2
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    one = first * cos[..., :half] - second * sin[..., :half]
    other = second * cos[..., half:] + first * sin[..., half:]
    return torch.cat((one, other, rest), -1)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("heads", "width", "columns"), [(18, 24, 24), (3, 80, 40), (2, 6, 2)])
def test_rotary(heads: int, width: int, columns: int, batch: int, dtype: torch.dtype) -> None:
    """Queries as a projection gives them, [B, T, H * D]; the cosine is the same for every b, and
    its halves differ, as no model's do, so that a half that is used twice shows.
    """
    states = drawn(batch, 5, heads * width, dtype=dtype).requires_grad_()
    exact = states.detach().double().requires_grad_()
    cos, sin = drawn(2, 1, 5, columns, dtype=torch.float32)
    shape = (batch, 5, heads, width)
    found = rotary(states.view(shape).transpose(1, 2), cos, sin)
    wanted = rotated(exact.view(shape).transpose(1, 2), cos.double()[None], sin.double()[None])
    weight = drawn(*found.shape, dtype=dtype, seed=1)
    assert found.dtype == dtype
    (found * weight).sum().backward()
    (wanted * weight.double()).sum().backward()
    assert states.grad is not None and exact.grad is not None
    close(found, wanted, BOUND[dtype])
    close(states.grad, exact.grad, BOUND[dtype])


@on_device
def test_rotary_of_heads_that_lie_far_apart() -> None:
    """Farther than 32 bits count. The memory between them is not touched."""
    x = drawn(1, 3, 2, 8, dtype=torch.float16)
    cos, sin = drawn(2, 1, 2, 8, dtype=torch.float32)
    memory = torch.empty(2 * 2**30 + x.numel(), dtype=x.dtype, device=DEVICE)
    apart = memory.as_strided(x.shape, (0, 2**30, 8, 1))
    apart.copy_(x)
    assert torch.equal(rotary(apart, cos, sin), rotary(x, cos, sin))


@on_device
@pytest.mark.parametrize("kind", [
    "phi3", "gemma2",
    *(pytest.param(one, marks=pytest.mark.nightly if INTERPRETED else ())
      for one in sorted(FAMILIES.keys() - {"phi3", "gemma2"})),
])  # fmt: skip
def test_a_model_computes_the_same(kind: str) -> None:
    model: Any = small_model(kind).to(DEVICE)
    tokens = (torch.arange(14).view(2, 7) * 3).to(DEVICE)
    found = []
    for _ in range(2):
        model.zero_grad()
        logits = model(input_ids=tokens).logits
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits).to(DEVICE)).sum().backward()
        found.append({"logits": logits.detach()})
        found[-1] |= {name: one.grad for name, one in model.named_parameters()}
        if len(found) == 1:
            assert use_triton_elementwise(model) == (2, FAMILIES[kind])
    for name, wanted in found[0].items():
        close(found[1][name], wanted.double(), 2e-5)


def test_every_family_is_recognised_without_a_gpu() -> None:
    """Its weights need no storage, and another model of the same module keeps its own code."""
    for kind in FAMILIES:
        other = small_model(kind)
        with torch.device("meta"):
            model = small_model(kind)
        assert use_triton_elementwise(model) == (2, 2)
        if not INTERPRETED:
            other(input_ids=torch.tensor([[1, 2, 3]]))  # the kernels would ask for a GPU


class Relu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = self.up_proj = self.down_proj = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x).relu() * self.up_proj(x))


def test_other_formulas_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = small_model("qwen2")
    model.model.layers[1].mlp = Relu()
    with pytest.raises(ValueError, match=r"Relu does not compute .*elementwise to 'model'"):
        use_triton_elementwise(model)
    monkeypatch.setattr(
        "transformers.models.qwen2.modeling_qwen2.apply_rotary_pos_emb",
        lambda q, k, cos, sin: (q * cos, k * cos),
    )
    with pytest.raises(ValueError, match=r"Qwen2Attention does not rotate .*to 'model'"):
        use_triton_elementwise(small_model("qwen2"))
    with pytest.raises(ValueError, match=r"no MLP with a down_proj; set"):
        use_triton_elementwise(nn.Linear(2, 2))


def test_float64_is_refused() -> None:
    x = torch.zeros(1, 2, 3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        gated(x, x, "silu")
    with pytest.raises(ValueError, match="float64"):
        rotary(x, x[:, 0], x[:, 0])
