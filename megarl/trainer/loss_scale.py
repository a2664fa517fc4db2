"""The loss scale of training in float16.

float16 has no numbers between 0 and 6e-8, and most gradients are smaller. So the loss is multiplied
by a power of two, and DeepSpeed divides the sums of the gradients by it. A scale that makes
gradients infinite is halved, and the step is computed again. After about `WINDOW` steps without
that it is doubled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.accelerator import get_accelerator

INITIAL_POWER = 12
"""Of 2: the first scale, at which gradients up to 16 fit. SmolLM2's largest, of a mean log-prob, is
2 for 133 tokens of English, and 11 for 64 random tokens."""
WINDOW = 200
"""Optimizer steps without an overflow, after which it is doubled."""
LEAST = 1
"""Smallest scale."""
CHANGING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's `DynamicLossScaler` that change in training."""


def fp16_settings() -> dict[str, object]:
    """The section `fp16` for DeepSpeed. On the CPU the call makes DeepSpeed accept float16."""
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
    """The loss scale of a DeepSpeed optimizer, changed here instead of by DeepSpeed, alike on all
    ranks.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.overflows = 0
        """Calls of `lower` that have halved it since `metrics`."""
        # DeepSpeed 0.19 changes the scale before it divides the gradients of a step by it, which
        # then are half as large in the step in which it grows. Here it changes between steps.
        optimizer._update_scale = lambda has_overflow=False: None

    @property
    def value(self) -> float:
        return self._optimizer.loss_scaler.cur_scale

    @value.setter
    def value(self, scale: float) -> None:
        self._optimizer.loss_scaler.cur_scale = scale

    def lower(self) -> bool:
        """Halve the scale after an overflow; False if it is the smallest."""
        if self.value <= LEAST:
            return False
        self._optimizer.loss_scaler.update_scale(True)
        self.overflows += 1
        return True

    def count_step(self) -> None:
        """Count an optimizer step without overflow."""
        self._optimizer.loss_scaler.update_scale(False)

    def state(self) -> dict[str, float]:
        """The scale and DeepSpeed's counters, for a checkpoint."""
        return {name: getattr(self._optimizer.loss_scaler, name) for name in CHANGING}

    def restore(self, state: Mapping[str, float]) -> None:
        for name in CHANGING:
            setattr(self._optimizer.loss_scaler, name, state[name])

    def metrics(self) -> dict[str, float]:
        """{"loss_scale": of the next step, "overflows": since the last call}."""
        values = {"loss_scale": float(self.value), "overflows": float(self.overflows)}
        self.overflows = 0
        return values
