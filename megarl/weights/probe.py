"""The probe: a fixed random text that trainer and engines both score after each new weight version.

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

from megarl.system.console import say
from megarl.types import Samples

TOLERANCE = 1e-3
"""Largest log-prob difference between trainer and engine in float32 that is accepted as rounding.

It is far above the usual difference, since a trained model amplifies rounding on random tokens.
Compared with float64, float32 log-probs of transformers differ by up to 1.1e-4 on the quick start's
models (docs/results/learning.md).
"""


@dataclass(frozen=True)
class Rounding:
    """Limits of the absolute differences between the trainer's and an engine's log-probs of a text,
    for 16-bit dtypes. Rounding alone can move the log-prob of one token by more than 1, so not
    single tokens are judged but the mean and the ninth decile (90th percentile) over the text.
    Above two of the limits a warning is given, above the third the run ends.
    """

    mean: float
    """Mean difference above which a warning is given."""
    decile: float
    """Ninth decile of the differences above which a warning is given."""
    wrong_mean: float
    """Mean difference that rounding does not reach; the run ends."""


ROUNDINGS = {"bfloat16": Rounding(0.15, 0.3, 0.5), "float16": Rounding(0.02, 0.04, 0.07)}
"""{dtype: accepted differences}. bfloat16 was measured on the quick start's models
(docs/results/learning.md), float16 has 8 times its precision."""

PROBE_TOKENS = 48
"""Number of tokens of the probe text."""


BASE_GAPS = 4.0
"""How far the change of log-probs by adapters may differ between trainer and engine, as a multiple
of the mean difference of the base model's log-probs, which the same kernels compute of the same
text. The expected value for equal adapters is at most the square root of 2: both are rounding."""
SHARES = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.1}
"""{dtype: fraction of the adapters' mean change by which it may differ besides}, since a model that
adapters have changed rounds otherwise than its base."""


class Effect(NamedTuple):
    """Log-probs of the probe text, a fixed text of T tokens, by one model with LoRA adapters and
    without: T - 1 values each.
    """

    adapted: Sequence[float]
    base: Sequence[float]

    @property
    def change(self) -> list[float]:
        """For each token of the probe text but the first, its log-prob with LoRA adapters less that
        without.
        """
        return [a - b for a, b in zip(self.adapted, self.base, strict=True)]


@dataclass(frozen=True)
class Probe:
    """A fixed text that trainer and engines score, and the log-prob differences between them that
    are accepted. Make one by `Probe.random`.
    """

    samples: Samples
    """The text as a single sample."""
    tolerance: float
    """Largest accepted log-prob difference of a token; 0 judges by `rounding` instead."""
    rounding: Rounding | None = None
    dtypes: Sequence[str] = ("float32",)
    """Dtypes of trainer and engines, by name."""
    warned: list[int] = dataclasses.field(default_factory=list)
    """Numbers of the engines of which a warning was given."""

    @staticmethod
    def random(
        *, dtypes: Sequence[str], vocab_size: int, max_tokens: int, seed: int, tolerance: float
    ) -> Probe:
        """A probe of uniformly random tokens, 48 or `max_tokens` - 1 if that is less. `dtypes`: of
        trainer and engines, such as "bfloat16".

        `tolerance`: largest accepted absolute log-prob difference of a token. 0 means 1e-3 if all
        dtypes are float32. With a 16-bit dtype, 0 means limits of the mean and the ninth decile
        over the text instead (`Rounding`), those of the least precise dtype.
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
        """Token ids of the probe, the fixed text that trainer and engines score."""
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
        """Judge whether the engines score the probe text like the trainer; returns the largest
        absolute difference of a token's log-prob. `trainer`: log-probs of the tokens but the first.
        `engines`: the same by each engine. For messages: `numbers` of the engines, in the order of
        `engines` (default: from 0), the weights' `version`, and `layouts`, the parallelism of
        trainer and engines as text.

        Raises `RuntimeError` where log-probs are not finite or differ by more than rounding
        explains. In 16 bit, writes a warning to the console, once for each engine, where they
        differ unusually.
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
        """Judge whether the engines compute with the trainer's LoRA adapters, by how much the
        adapters change the log-probs of the probe text. `engines`: log-probs by each engine.
        `numbers`: the engines' numbers, and `version`, for messages. Returns the largest mean
        difference, of any engine, between its changes and the trainer's. `compare` is too coarse
        here: new adapters change log-probs by less than the rounding that it accepts. The limit
        here is a multiple of the engine's rounding without adapters.

        Raises `RuntimeError` where an engine computes without adapters, or with others.
        """
        own, worst = trainer.change, 0.0
        size = _mean_size(own)
        eps = max(torch.finfo(getattr(torch, one)).eps for one in self.dtypes)
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
