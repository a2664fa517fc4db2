"""The probe: a fixed random text that trainer and engines both score after a publish.

Digests prove that the bytes arrived. The probe finds engines that compute with them differently,
for example because a repacked layer was rebuilt wrongly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.console import say
from megarl.types import Samples

TOLERANCE = 1e-3
"""Largest log-prob difference between trainer and engine in float32 that is accepted as rounding.

It is far above the usual difference, since a trained model amplifies rounding on random tokens.
Compared with float64, float32 log-probs of transformers differ by up to 1.1e-4 on the quick start's
models (docs/results.md).
"""


@dataclass(frozen=True)
class Rounding:
    """What is accepted in 16 bit. Single tokens say nothing there: another kernel with the same
    weights moves one by more than 1. The mean and the ninth decile tell rounding from other
    weights.
    """

    mean: float
    """Mean difference above which there is a warning."""
    decile: float
    """Ninth decile above which there is a warning."""
    wrong_mean: float
    """Mean difference that rounding does not reach; the run ends."""


ROUNDINGS = {"bfloat16": Rounding(0.15, 0.3, 0.5), "float16": Rounding(0.02, 0.04, 0.07)}
"""By dtype. bfloat16 was measured on the quick start's models (docs/results.md), float16 has 8
times its precision."""

PROBE_TOKENS = 48
"""Number of tokens of the probe text."""


@dataclass(frozen=True)
class Probe:
    """A text to score, and the log-prob differences that are accepted."""

    samples: Samples
    """The text as one sequence."""
    tolerance: float
    """Largest accepted log-prob difference of a token; 0 judges by `rounding` instead."""
    rounding: Rounding | None = None
    warned: list[int] = dataclasses.field(default_factory=list)
    """Engines of which a warning was said."""

    @staticmethod
    def random(
        *, dtypes: Sequence[str], vocab_size: int, max_tokens: int, seed: int, tolerance: float
    ) -> Probe:
        """Uniformly random tokens, fewer than `max_tokens`.

        `tolerance` 0 takes that of float32, or the widest of `ROUNDINGS` over `dtypes`.
        """
        draw = torch.Generator().manual_seed(seed)
        length = min(PROBE_TOKENS, max_tokens - 1)
        tokens = torch.randint(0, vocab_size, (length,), generator=draw).tolist()
        known = [ROUNDINGS[name] for name in dtypes if name in ROUNDINGS]
        rounding = max(known, key=lambda one: one.mean) if known and not tolerance else None
        return Probe(Samples.one(0, tokens), 0.0 if rounding else tolerance or TOLERANCE, rounding)

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the text."""
        return self.samples.token_ids.tolist()

    def compare(
        self,
        trainer: Sequence[float],
        engines: Sequence[Sequence[float]],
        *,
        version: int,
        layouts: str,
        numbers: Sequence[int] = (),
    ) -> float:
        """Largest difference between the trainer's log-probs and those of any engine. `numbers`:
        the engines' own; from 0 by default.

        Raises `RuntimeError`, naming engine, version and `layouts`, where the differences are not
        rounding, and says a warning, once for each engine, where they are large for it.
        """
        worst = 0.0
        if not all(map(math.isfinite, trainer)):
            raise RuntimeError(
                f"the trainer's log-probs of the probe text are not finite at version {version}:"
                " the policy computes NaN or infinite values, although its weights are finite;"
                " lower training.optimizer.learning_rate, or begin with another model"
            )
        for number, scores in zip(numbers or range(len(engines)), engines, strict=True):
            if not all(map(math.isfinite, scores)):
                raise RuntimeError(
                    f"engine {number}'s log-probs of the probe text are not finite at version"
                    f" {version}, although the trainer's are; set rollout.engine.dtype to"
                    " 'bfloat16' or 'float32' if it is 'float16', or look at the engine's log"
                )
            gaps = [abs(a - b) for a, b in zip(trainer, scores, strict=True)]
            gap = max(gaps)
            worst = max(worst, gap)
            self._judge(number, gaps, version, layouts)
        return worst

    def _judge(self, engine: int, gaps: Sequence[float], version: int, layouts: str) -> None:
        """Raise `RuntimeError` or warn, as `compare` does, for the differences of one engine."""
        mean, largest = sum(gaps) / len(gaps), max(gaps)
        decile = sorted(gaps)[int(0.9 * (len(gaps) - 1))]
        found = (
            f"engine {engine} scores the probe text differently from the trainer at version"
            f" {version}: log-probs differ by {mean:.2e} in the mean and by up to {largest:.2e}"
        )
        if self.rounding is None:
            limit, is_wrong = f"{self.tolerance:.0e} in a token", largest > self.tolerance
        else:
            limit = f"{self.rounding.wrong_mean:g} in the mean"
            is_wrong = mean > self.rounding.wrong_mean
        if is_wrong:
            raise RuntimeError(
                f"{found}, more than {limit}; the weights it computes with are not those published"
                f" ({layouts}; raise weight_sync.probe_tolerance only if you know why)"
            )
        if self.rounding is None or engine in self.warned:
            return
        if mean > self.rounding.mean or decile > self.rounding.decile:
            self.warned.append(engine)
            say(
                f"megarl: warning: {found}, which is much for 16 bit; the digests of the weights"
                " are equal. Compare mismatch/mean_abs, or set rollout.engine.dtype and"
                " training.precision alike"
            )
