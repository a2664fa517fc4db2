"""Rotary embeddings and gated activations of a transformers model by megarl's Triton kernels, for
`training.elementwise: triton`. A layer's formula is found by trying it in torch, not by its name,
also without a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megarl.kernels.gated_triton import Activation, gated
from megarl.kernels.rotary_triton import rotary

ROTATE = "apply_rotary_pos_emb"
"""The function in transformers' modules that rotates queries and keys."""
TRIED_TOLERANCE = 1e-6
"""Largest absolute difference in float64, of values around 1."""

FORMULAS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}


def use_triton_elementwise(model: nn.Module) -> tuple[int, int]:
    """Make MLPs with a `down_proj` and attention layers compute by Triton kernels, in place;
    returns their numbers. Raises `ValueError` for a layer with another formula, or a model without
    such layers.
    """
    mlps = [layer for layer in model.modules() if hasattr(layer, "down_proj")]
    attentions = [layer for layer in model.modules() if ROTATE in _names(type(layer))]
    if not mlps or not attentions:
        raise ValueError(
            "training.elementwise is 'triton', but the model has no"
            f" {'attention layer that calls ' + ROTATE if mlps else 'MLP with a down_proj'}; set"
            " training.elementwise to 'model'"
        )
    for mlp in mlps:
        activation = _activation(mlp)
        fused = hasattr(mlp, "gate_up_proj")
        mlp.forward = partial(_stacked_mlp if fused else _mlp, mlp, activation)
    for layer in attentions:
        layer.forward = _rotating(type(layer)).__get__(layer)
    return len(mlps), len(attentions)


def _names(layer_class: type[nn.Module]) -> tuple[str, ...]:
    """Names of the globals that the forward pass uses."""
    code = getattr(layer_class.forward, "__code__", None)
    return code.co_names if code is not None else ()


def _refusal(layer: type[nn.Module], what: str) -> ValueError:
    return ValueError(
        f"training.elementwise is 'triton', but the model's {layer.__name__} {what}; set"
        " training.elementwise to 'model'"
    )


# ---------------------------------------------------------------------------------------- the MLP


def _mlp(layer: Any, activation: Activation, states: torch.Tensor) -> torch.Tensor:
    """The MLP of Llama and others: [..., H] -> [..., H]."""
    return layer.down_proj(gated(layer.gate_proj(states), layer.up_proj(states), activation))


def _stacked_mlp(layer: Any, activation: Activation, states: torch.Tensor) -> torch.Tensor:
    """The MLP of Phi-3, whose gate and up are one projection."""
    gate, up = layer.gate_up_proj(states).chunk(2, dim=-1)
    return layer.down_proj(gated(gate, up, activation))


def _activation(layer: Any) -> Activation:
    """The activation with which an MLP computes down(act(gate) * up)."""
    mlp, draw = type(layer), torch.Generator().manual_seed(0)
    halves = torch.randn(2, 7, 5, generator=draw, dtype=torch.float64)
    tried = copy.copy(layer)
    tried._modules = {
        "gate_proj": _Gives(halves[0]),
        "up_proj": _Gives(halves[1]),
        "gate_up_proj": _Gives(torch.cat(tuple(halves), -1)),
        "down_proj": nn.Identity(),
        **{n: module for n, module in layer._modules.items() if not n.endswith("_proj")},
    }
    try:
        theirs = mlp.forward(tried, halves[0])
    except Exception as error:  # whatever a model's own code raises
        raise _refusal(mlp, f"is not an MLP of a gate, up and down ({error})") from error
    for name, formula in FORMULAS.items():
        ours = formula(halves[0]) * halves[1]
        if theirs.shape == ours.shape and (ours - theirs).abs().max() <= TRIED_TOLERANCE:
            return name
    raise _refusal(mlp, f"does not compute down(act(gate) * up) with an act of {list(FORMULAS)}")


class _Gives(nn.Module):
    """Stands for a projection, with a constant output."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self._output


# ------------------------------------------------------------------------------ rotary embeddings


def _rotary_both(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the place of transformers' `apply_rotary_pos_emb`: the rotated q [B, Hq, T, D] and k
    [B, Hkv, T, D]. cos and sin [B, T, R] rotate the first R of D columns.
    """
    return rotary(q, cos, sin), rotary(k, cos, sin)


def _rotating(layer_class: type[nn.Module]) -> FunctionType:
    """The forward pass of an attention layer with our rotary embedding; other models of its module
    keep theirs.
    """
    forward = layer_class.forward
    assert isinstance(forward, FunctionType)
    if hasattr(forward, "__wrapped__") or not _rotates(forward.__globals__[ROTATE]):
        raise _refusal(layer_class, "does not rotate pairs (j, j + R/2) of its first R columns")
    rotating = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTATE: _rotary_both},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    rotating.__kwdefaults__ = forward.__kwdefaults__
    return rotating


def _rotates(theirs: Callable[..., Any]) -> bool:
    """Whether a function computes the formula of kernels/rotary_triton.py, of whole heads and,
    where it takes fewer columns, of a part of them.
    """
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, 5, 8, generator=draw, dtype=torch.float64) for n in (3, 1))
    for columns in (8, 4):
        cos, sin = torch.randn(2, 1, 5, columns, generator=draw, dtype=torch.float64)
        try:
            rotated = theirs(q, k, cos, sin)
        except Exception:
            if columns == q.shape[-1]:
                return False
            continue  # it rotates whole heads alone
        for x, y in zip((q, k), rotated, strict=True):
            half = columns // 2
            first, second, rest = x.split((half, half, x.shape[-1] - columns), dim=-1)
            turned = torch.cat((-second, first), -1)
            whole = torch.cat((first, second), -1) * cos + turned * sin
            if (torch.cat((whole, rest), -1) - y).abs().max() > TRIED_TOLERANCE:
                return False
    return True
