"""How long weights in bfloat16 stay as they are while their float32 master weights move.

AdamW moves a master weight by at most about the learning rate in a step. The bfloat16 weight, with
which the model computes, changes once that adds up to half the distance to its neighbour: for a
weight that was read from a bfloat16 file not before

    steps = 2^(e - 9) / learning rate,    2^(e - 1) <= |weight| < 2^e

At a learning rate of 1e-6 these are about a hundred steps for weights of usual size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

LOOKED_AT = 4096
"""Elements of a tensor that are looked at, evenly spread."""


def steps_until_half_change(parts: Iterable[torch.Tensor], learning_rate: float) -> float:
    """Optimizer steps at `learning_rate` before which less than half of the weights can change; 0
    without weights. `parts`: bfloat16 tensors of any shape; elements of 0 do not count.
    """
    chosen = [part.view(-1)[:: max(1, part.numel() // LOOKED_AT)] for part in parts]
    values = torch.cat([part.float().cpu() for part in chosen]) if chosen else torch.zeros(0)
    values = values[values != 0]
    if not len(values):
        return 0.0
    half_steps = torch.ldexp(torch.ones(len(values)), torch.frexp(values).exponent - 9)
    return float(half_steps.median()) / learning_rate


def rounding_line(name: str, parts: Iterable[torch.Tensor], learning_rate: float) -> str:
    """The line about a role `name` in bfloat16 at the start of a run."""
    steps = steps_until_half_change(parts, learning_rate)
    return (
        f"{name}: at learning rate {learning_rate:g}, half of the bfloat16 weights cannot change"
        f" before optimizer step {max(1, round(steps)):,}; smaller updates add up in float32 and do"
        " not reach the model until then; training.precision float32 has no such delay"
    )
