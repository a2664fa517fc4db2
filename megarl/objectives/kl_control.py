"""The weight of the KL penalty over a run: constant, or steered so that the divergence from the
reference stays near a target.
"""

from __future__ import annotations

from megarl.objectives.config import KLConfig

LARGEST_ERROR = 0.2
"""Bound of the relative error that a single step acts on, as in the paper."""


class KLControl:
    """Coefficient of the KL penalty; with `algorithm.kl.target` a proportional controller in
    log-space, arXiv:1909.08593, 2.2:

        error = clip(kl / target - 1, -0.2, 0.2)        coefficient <- coefficient (1 + gain error)

    Example: target 0.01, gain 0.1, measured 0.02: error 0.2, the coefficient grows by 2 %.
    """

    def __init__(self, config: KLConfig) -> None:
        self._config = config
        self.coefficient = config.coefficient
        """Weight of the penalty in the present step."""

    @property
    def is_adaptive(self) -> bool:
        """Whether the coefficient follows the divergence."""
        return self._config.target is not None

    def update(self, divergence: float) -> None:
        """Take in the mean divergence of a token in a step, in nats; the new coefficient counts
        from the next step on. Without a target nothing changes.
        """
        if self._config.target is not None:
            error = divergence / self._config.target - 1.0
            error = max(-LARGEST_ERROR, min(LARGEST_ERROR, error))
            self.coefficient *= 1.0 + self._config.gain * error

    def restore(self, coefficient: float) -> None:
        """Take the coefficient over from a checkpoint. With a fixed coefficient (no target in the
        recipe) nothing changes: the recipe's is used.
        """
        if self.is_adaptive:
            self.coefficient = coefficient
