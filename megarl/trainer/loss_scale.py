"""The loss scale of training in float16.

float16 has no numbers between 0 and 6e-8, and most gradients of a step are smaller than that. So
the loss is multiplied by a power of two before the backward pass, and DeepSpeed divides the float32
sums of the gradients by it. A scale that is too large makes gradients infinite: it is halved, and
the step is computed again. After about `WINDOW` steps without that it is doubled.

DeepSpeed keeps the scale and saves it with the optimizer state.
"""

from __future__ import annotations

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


def fp16_settings() -> dict[str, object]:
    """The section `fp16` of DeepSpeed's configuration."""
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
    """The loss scale of one of DeepSpeed's ZeRO optimizers in float16, which multiplies the loss by
    it. It is the same on every rank, as long as they call the methods together.
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
        """The present scale."""
        return self._optimizer.loss_scaler.cur_scale

    @value.setter
    def value(self, scale: float) -> None:
        self._optimizer.loss_scaler.cur_scale = scale

    def lower(self) -> bool:
        """Halve the scale; False, and nothing changes, if it is the smallest."""
        if self.value <= LEAST:
            return False
        self._optimizer.loss_scaler.update_scale(True)
        self.overflows += 1
        return True

    def count_step(self) -> None:
        """Count an optimizer step without overflow; every `WINDOW` of them double the scale."""
        self._optimizer.loss_scaler.update_scale(False)

    def metrics(self) -> dict[str, float]:
        """See `megarl.trainer.step.scale_metrics`."""
        found = {"loss_scale": float(self.value), "overflows": float(self.overflows)}
        self.overflows = 0
        return found
