"""The loss scale of training in float16.

float16 has no numbers between 0 and 6e-8, and most gradients of a step are smaller than that. So
the loss is multiplied by a power of two before the backward pass, and DeepSpeed divides the float32
sums of the gradients by it. A scale that is too large makes gradients infinite: it is halved, and
the step is computed again. After about `WINDOW` steps without that it is doubled.

DeepSpeed keeps the scale; a checkpoint has it beside the optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.accelerator import get_accelerator

INITIAL_POWER = 12
"""The first scale is 2 to this power, at which gradients up to 16 fit. The largest element of
SmolLM2's gradient of a mean log-prob is 2 for 133 tokens of English, and 11 for 64 random tokens.
"""
WINDOW = 200
"""Optimizer steps without an overflow after which the scale is doubled."""
LEAST = 1
"""Smallest scale."""
CHANGING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's `DynamicLossScaler` that change in training."""


def fp16_settings() -> dict[str, object]:
    """The section `fp16` of a DeepSpeed configuration, as a dict: dynamic loss scaling whose first
    scale is 2^12, whose smallest is 1, and which doubles after about 200 steps without an overflow.
    On the CPU the call also makes DeepSpeed accept float16.
    """
    accelerator: Any = get_accelerator()
    if accelerator.device_name() == "cpu":
        # DeepSpeed 0.19 refuses float16 where oneDNN has no products in it. Torch has its own.
        accelerator.is_fp16_supported = lambda: True
    return {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": INITIAL_POWER,
        "loss_scale_window": WINDOW,
        "hysteresis": 1,
        "min_loss_scale": LEAST,
    }


class LossScale:
    """The dynamic loss scale of a DeepSpeed ZeRO optimizer in float16 (`optimizer`, as
    `deepspeed.initialize` makes it). It takes the change of the scale over from DeepSpeed: call
    `lower` after an overflow and `count_step` after each optimizer step. The scale is the same on
    every rank, as long as all ranks make the same calls.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.overflows = 0
        """How often `lower` has halved it since `metrics` was called."""
        # DeepSpeed 0.19 changes the scale before it divides the gradients of a step by it, which
        # then are half as large in the step in which it grows. Here it changes between steps.
        optimizer._update_scale = lambda has_overflow=False: None

    @property
    def value(self) -> float:
        """The number by which the loss is multiplied now, a power of two. It can be set."""
        return self._optimizer.loss_scaler.cur_scale

    @value.setter
    def value(self, scale: float) -> None:
        self._optimizer.loss_scaler.cur_scale = scale

    def lower(self) -> bool:
        """After a gradient has overflowed: halve the scale and return True, so that the caller can
        compute the gradient again. If the scale is 1, the smallest, return False and leave it.
        """
        if self.value <= LEAST:
            return False
        self._optimizer.loss_scaler.update_scale(True)
        self.overflows += 1
        return True

    def count_step(self) -> None:
        """Call after each optimizer step whose gradients did not overflow. After about 200 of them
        in a row the scale is doubled.
        """
        self._optimizer.loss_scaler.update_scale(False)

    def state(self) -> dict[str, float]:
        """{name: number} of the scale and DeepSpeed's counters, for a checkpoint; `restore` takes
        it.
        """
        return {name: getattr(self._optimizer.loss_scaler, name) for name in CHANGING}

    def restore(self, state: Mapping[str, float]) -> None:
        """Set the scale and its counters to `state`, the dict that `LossScale.state` returned."""
        for name in CHANGING:
            setattr(self._optimizer.loss_scaler, name, state[name])

    def metrics(self) -> dict[str, float]:
        """{"loss_scale": the scale of the next optimizer step, "overflows": how often the scale was
        halved since the last call of `metrics`}, both as float.
        """
        found = {"loss_scale": float(self.value), "overflows": float(self.overflows)}
        self.overflows = 0
        return found
