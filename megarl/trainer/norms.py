"""RMSNorm of a transformers model by torch's own function, for `training.norms: torch`: one kernel,
which rounds once, instead of five operations. A layer's formula is found by trying: some models
scale by `weight`, others by `1 + weight`.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

EPSILONS = ("variance_epsilon", "eps")
"""Names of the epsilon in transformers' classes."""
TRIED_SCALE = 1e-3
"""Size of the tried states: their mean square is as small as an epsilon, so that another one
shows."""
TRIED_TOLERANCE = 1e-5
"""Largest relative difference in float32."""


def use_torch_norms(model: nn.Module) -> int:
    """Make every layer whose class is named ...RMSNorm call `F.rms_norm`, in place; returns their
    number. `model` may be on the meta device. Raises `ValueError` for a layer with another formula
    than RMSNorm scaled by `weight` or `1 + weight`.
    """
    layers = [layer for layer in model.modules() if type(layer).__name__.endswith("RMSNorm")]
    for layer in layers:
        layer.forward = partial(_norm, layer, *_formula(layer))
    return len(layers)


def _norm(layer: nn.Module, eps: float, offset: float, states: torch.Tensor) -> torch.Tensor:
    """[..., H] divided by their root mean square, and scaled by `offset + weight`."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    if not offset:
        return F.rms_norm(states, weight.shape, weight, eps)
    # As in transformers in float32: 1 + weight in 16 bit would lose small weights.
    return F.rms_norm(states.float(), weight.shape, offset + weight.float(), eps).to(states.dtype)


def _formula(layer: nn.Module) -> tuple[float, float]:
    """(epsilon, offset) with which `_norm` computes what `layer` does."""
    eps = next((float(getattr(layer, name)) for name in EPSILONS if hasattr(layer, name)), None)
    if eps is not None and [name for name, _ in layer.named_parameters()] == ["weight"]:
        for offset in (0.0, 1.0):
            if _computes(layer, eps, offset):
                return eps, offset
    raise ValueError(
        f"training.norms is 'torch', but the model's {type(layer).__name__} is not the RMSNorm that"
        " torch computes; set training.norms to 'model'"
    )


@torch.no_grad()
def _computes(layer: nn.Module, eps: float, offset: float) -> bool:
    """Whether `layer` computes what `_norm` does."""
    draw = torch.Generator().manual_seed(0)
    tried = copy.copy(layer)
    size = layer.weight.shape
    assert isinstance(size, torch.Size)
    tried._parameters = {"weight": nn.Parameter(torch.randn(size, generator=draw))}
    states = torch.randn(4, *size, generator=draw) * TRIED_SCALE
    try:
        theirs = type(layer).forward(tried, states)  # without the hooks of this layer
    except (TypeError, RuntimeError):  # it takes a gate too, or other shapes
        return False
    ours = _norm(tried, eps, offset, states)
    return bool((ours - theirs).abs().max() <= TRIED_TOLERANCE * theirs.abs().max())
