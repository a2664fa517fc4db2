"""The probe: a fixed random text that trainer and engines both score after a publish.

Digests prove that the bytes arrived. The probe finds engines that compute with them differently,
for example because a repacked layer was rebuilt wrongly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


BASE_GAPS = 4.0
"""How far the effect of adapters may differ between trainer and engine, in mean gaps of the base
model, which computes the same text with the same kernels. The expected value for equal adapters is
at most the square root of 2: both gaps are rounding."""
SHARES = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.1}
"""By dtype: by which share of the effect it may differ besides, since a model that adapters have
changed rounds otherwise than its base."""


class Effect(NamedTuple):
    """Log-probs of the probe text with adapters and without."""

    adapted: Sequence[float]
    base: Sequence[float]

    @property
    def change(self) -> list[float]:
        """What the adapters add to the log-prob of each token."""
        return [a - b for a, b in zip(self.adapted, self.base, strict=True)]


@dataclass(frozen=True)
class Probe:
    """A text to score, and the log-prob differences that are accepted."""

    samples: Samples
    """The text as one sequence."""
    tolerance: float
    """Largest accepted log-prob difference of a token; 0 judges by `rounding` instead."""
    rounding: Rounding | None = None
    dtypes: Sequence[str] = ("float32",)
    """Those of trainer and engines."""
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
        tolerance = 0.0 if rounding else tolerance or TOLERANCE
        return Probe(Samples.one(0, tokens), tolerance, rounding, tuple(dtypes))

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

    def compare_effects(
        self, trainer: Effect, engines: Sequence[Effect], *, version: int, numbers: Sequence[int]
    ) -> float:
        """Largest mean difference between what adapters change in the trainer's log-probs and in
        those of any engine. New adapters change less than `compare` accepts as rounding, but
        rounding is nearly the same with and without them, and is measured without them.

        Raises `RuntimeError`, naming engine and version, where an engine computes without adapters,
        or with others.
        """
        own, worst = trainer.change, 0.0
        size, eps = (
            _mean_size(own),
            max(torch.finfo(getattr(torch, one)).eps for one in self.dtypes),
        )
        share = max(SHARES[name] for name in self.dtypes)
        for number, engine in zip(numbers, engines, strict=True):
            change = engine.change
            gap = _mean_size([a - b for a, b in zip(change, own, strict=True)])
            base = _mean_size([a - b for a, b in zip(trainer.base, engine.base, strict=True)])
            worst = max(worst, gap)
            found = (
                f"engine {number} does not compute with the adapters of version {version}: they"
                f" change the trainer's log-probs of the probe text by {size:.2e} in the mean"
            )
            if size > eps and not any(change):
                raise RuntimeError(f"{found}, and the engine's not at all")
            if gap > max(BASE_GAPS * base + share * size, 4 * eps):
                raise RuntimeError(
                    f"{found}, and the engine's by {_mean_size(change):.2e}; the changes differ by"
                    f" {gap:.2e} in the mean, those of the base model alone by {base:.2e}"
                )
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


def _mean_size(values: Sequence[float]) -> float:
    """Mean of absolute values."""
    return sum(map(abs, values)) / len(values)
