"""How long weights in 16 bit stay as they are while their float32 master weights move.

AdamW moves a master weight by at most about the learning rate in a step. The 16-bit weight, with
which the model computes, changes once that adds up to half the distance to its neighbour: for a
weight that was read from a file of its dtype not before

    steps = 2^(e - 9) / learning rate              in bfloat16,   2^(e - 1) <= |weight| < 2^e
    steps = max(2^(e - 12), 2^-25) / learning rate in float16

At a learning rate of 1e-6 these are about a hundred steps in bfloat16, and ten in float16, for
weights of usual size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

LOOKED_AT = 4096
"""Elements of a tensor that are looked at, evenly spread."""


def steps_until_half_change(parts: Iterable[torch.Tensor], learning_rate: float) -> float:
    """Optimizer steps at `learning_rate` before which less than half of the weights can change; 0
    without weights. `parts`: tensors of one 16-bit dtype and any shape; elements of 0 do not count.
    """
    parts = list(parts)
    chosen = [part.view(-1)[:: max(1, part.numel() // LOOKED_AT)] for part in parts]
    values = torch.cat([part.float().cpu() for part in chosen]) if chosen else torch.zeros(0)
    values = values[values != 0]
    if not len(values):
        return 0.0
    grid = torch.finfo(parts[0].dtype)
    size = torch.ldexp(torch.ones(len(values)), torch.frexp(values).exponent - 1)
    # Below the smallest normal number the distances are those above it.
    half_steps = size.clamp(min=grid.smallest_normal) * (grid.eps / 2)
    return float(half_steps.median()) / learning_rate


def rounding_line(name: str, parts: Iterable[torch.Tensor], learning_rate: float) -> str:
    """The line about a role `name` in 16 bit at the start of a run."""
    parts = list(parts)
    dtype = str(parts[0].dtype).removeprefix("torch.") if parts else "16-bit"
    steps = steps_until_half_change(parts, learning_rate)
    return (
        f"{name}: at learning rate {learning_rate:g}, half of the {dtype} weights cannot change"
        f" before optimizer step {max(1, round(steps)):,}; smaller updates add up in float32 and do"
        " not reach the model until then; training.precision float32 has no such delay"
    )
