"""The probe: a fixed random text that trainer and engines score after each weight version.

Digests prove that the bytes arrived; the probe finds engines that compute with them differently.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megarl.system.console import say
from megarl.types import Samples

TOLERANCE = 1e-3
"""Largest float32 log-prob difference that counts as rounding.

Transformers' float32 log-probs differ from float64's by up to 1.1e-4 on the quick start's models
(docs/results/learning.md).
"""


@dataclass(frozen=True)
class Rounding:
    """Limits of log-prob differences in 16 bit, where rounding can move one token by more than
    1.
    """

    mean: float
    """Mean above which a warning is given."""
    decile: float
    """Ninth decile (90th percentile) above which a warning is given."""
    wrong_mean: float
    """Mean above which the run ends."""


ROUNDINGS = {"bfloat16": Rounding(0.15, 0.3, 0.5), "float16": Rounding(0.02, 0.04, 0.07)}
"""bfloat16 was measured (docs/results/learning.md); float16 has 8 times its precision."""

PROBE_TOKENS = 48


BASE_GAPS = 4.0
"""How far the change by adapters may differ between trainer and engine, in mean differences of the
base model. For equal adapters at most the square root of 2 is expected.
"""
SHARES = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.1}
"""{dtype: fraction of the mean change by which it may differ besides}: adapted models round
otherwise.
"""


class Effect(NamedTuple):
    """Log-probs of the probe with LoRA adapters and without, T - 1 values each."""

    adapted: Sequence[float]
    base: Sequence[float]

    @property
    def change(self) -> list[float]:
        return [a - b for a, b in zip(self.adapted, self.base, strict=True)]


@dataclass(frozen=True)
class Probe:
    """The fixed text, and the differences between trainer and engines that are accepted."""

    samples: Samples
    tolerance: float
    """Largest accepted difference of a token; 0: judge by `rounding`."""
    rounding: Rounding | None = None
    dtypes: Sequence[str] = ("float32",)
    warned: list[int] = dataclasses.field(default_factory=list)
    """Numbers of the engines of which a warning was given."""

    @staticmethod
    def random(
        *, dtypes: Sequence[str], vocab_size: int, max_tokens: int, seed: int, tolerance: float
    ) -> Probe:
        """A probe of at most 48 uniformly random tokens.

        `dtypes`: of trainer and engines. `tolerance` 0: 1e-3, or `Rounding` of the least precise
        dtype if one has 16 bit.
        """
        draw = torch.Generator().manual_seed(seed)
        length = min(PROBE_TOKENS, max_tokens - 1)
        tokens = torch.randint(0, vocab_size, (length,), generator=draw).tolist()
        known = [ROUNDINGS[name] for name in dtypes if name in ROUNDINGS]
        rounding = max(known, key=lambda limits: limits.mean) if known and not tolerance else None
        tolerance = 0.0 if rounding else tolerance or TOLERANCE
        return Probe(Samples.one(0, tokens), tolerance, rounding, tuple(dtypes))

    @property
    def token_ids(self) -> list[int]:
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
        """Largest absolute log-prob difference of a token.

        `trainer`, and each of `engines`: log-probs of all tokens but the first. For messages:
        `numbers` of the engines (default: from 0), `version`, and `layouts`. Warns of each engine
        at most once. Raises `RuntimeError` if values are not finite or differ by more than
        rounding.
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
        """Largest mean difference between the adapters' changes at an engine and at the trainer.

        New adapters change log-probs by less than `compare` accepts, so the limit is a multiple of
        the base model's rounding. Raises `RuntimeError` where an engine computes without adapters,
        or with others.
        """
        expected, worst = trainer.change, 0.0
        size = _mean_size(expected)
        eps = max(torch.finfo(getattr(torch, dtype)).eps for dtype in self.dtypes)
        share = max(SHARES[name] for name in self.dtypes)
        for number, engine in zip(numbers, engines, strict=True):
            change = engine.change
            gap = _mean_size([a - b for a, b in zip(change, expected, strict=True)])
            base = _mean_size([a - b for a, b in zip(trainer.base, engine.base, strict=True)])
            worst = max(worst, gap)
            message = (
                f"engine {number} does not compute with the adapters of version {version}: they"
                f" change the trainer's log-probs of the probe text by {size:.2e} in the mean"
            )
            if size > eps and not any(change):
                raise RuntimeError(f"{message}, and the engine's not at all")
            if gap > max(BASE_GAPS * base + share * size, 4 * eps):
                raise RuntimeError(
                    f"{message}, and the engine's by {_mean_size(change):.2e}; the changes differ"
                    f" by {gap:.2e} in the mean, those of the base model alone by {base:.2e}"
                )
        return worst

    def _judge(self, engine: int, gaps: Sequence[float], version: int, layouts: str) -> None:
        mean, largest = sum(gaps) / len(gaps), max(gaps)
        decile = sorted(gaps)[int(0.9 * (len(gaps) - 1))]
        message = (
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
                f"{message}, more than {limit}; the weights it computes with are not those"
                f" published ({layouts}; raise weight_sync.probe_tolerance only if you know why)"
            )
        if self.rounding is None or engine in self.warned:
            return
        if mean > self.rounding.mean or decile > self.rounding.decile:
            self.warned.append(engine)
            say(
                f"megarl: warning: {message}, which is much for 16 bit; the digests of the weights"
                " are equal. Compare mismatch/mean_abs, or set rollout.engine.dtype and"
                " training.precision alike"
            )


def _mean_size(values: Sequence[float]) -> float:
    return sum(map(abs, values)) / len(values)
