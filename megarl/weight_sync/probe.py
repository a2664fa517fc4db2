"""The probe: a fixed random text that trainer and engines both score after a publish.

Digests prove that the bytes arrived. The probe finds engines that compute with them differently,
for example because a repacked layer was rebuilt wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.types import Samples

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""{dtype: largest log-prob difference between trainer and engine that is accepted as rounding}.

The tolerance is far above the usual difference, since a trained model amplifies rounding on random
tokens. Compared with float64, float32 log-probs of transformers differ by up to 1.1e-4 on the quick
start's models (docs/results.md).
"""

PROBE_TOKENS = 48
"""Number of tokens of the probe text."""


@dataclass(frozen=True)
class Probe:
    """A text to score, and the largest log-prob difference that is accepted."""

    samples: Samples
    """The text as one sequence."""
    tolerance: float
    """Largest accepted log-prob difference."""

    @staticmethod
    def random(
        *, dtypes: Sequence[str], vocab_size: int, max_tokens: int, seed: int, tolerance: float
    ) -> Probe:
        """Uniformly random tokens, fewer than `max_tokens`.

        `tolerance` 0 takes the widest of `TOLERANCES` over `dtypes`.
        """
        draw = torch.Generator().manual_seed(seed)
        length = min(PROBE_TOKENS, max_tokens - 1)
        tokens = torch.randint(0, vocab_size, (length,), generator=draw).tolist()
        return Probe(Samples.one(0, tokens), tolerance or max(TOLERANCES[name] for name in dtypes))

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
    ) -> float:
        """Largest difference between the trainer's log-probs and those of any engine.

        Raises `RuntimeError`, naming engine, version and `layouts`, where it exceeds the tolerance.
        """
        worst = 0.0
        if not all(map(math.isfinite, trainer)):
            raise RuntimeError(
                f"the trainer's log-probs of the probe text are not finite at version {version}:"
                " the policy computes NaN or infinite values, although its weights are finite;"
                " lower training.optimizer.learning_rate, or begin with another model"
            )
        for number, scores in enumerate(engines):
            if not all(map(math.isfinite, scores)):
                raise RuntimeError(
                    f"engine {number}'s log-probs of the probe text are not finite at version"
                    f" {version}, although the trainer's are; set rollout.engine.dtype to"
                    " 'bfloat16' or 'float32' if it is 'float16', or look at the engine's log"
                )
            gaps = [abs(a - b) for a, b in zip(trainer, scores, strict=True)]
            gap = max(gaps)
            worst = max(worst, gap)
            if gap > self.tolerance:
                raise RuntimeError(
                    f"engine {number} scores the probe text differently from the trainer at version"
                    f" {version}: log-probs differ by up to {gap:.2e}, more than"
                    f" {self.tolerance:.0e}; the weights it computes with are not those published"
                    f" ({layouts}; raise weight_sync.probe_tolerance only if you know why)"
                )
        return worst
