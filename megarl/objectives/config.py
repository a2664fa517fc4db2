"""Configuration of the learning algorithm: advantages, loss, KL penalty, off-policy correction."""

from __future__ import annotations

from typing import Literal

from megarl.schema import config, require, require_range

# tests/unit/test_registries.py keeps these names equal to the keys of ADVANTAGES and
# TOKEN_ADVANTAGES, LOSSES, AGGREGATIONS, KL_ESTIMATORS and CORRECTIONS.
AdvantageName = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "reinforce_plus_plus_tokens",
]
LossName = Literal["ppo_clip", "dual_clip", "gspo", "cispo"]
AggregationName = Literal["token", "sequence", "constant"]
KLName = Literal["k1", "k2", "k3"]
CorrectionName = Literal["none", "tis", "icepop"]


@config
class KLConfig:
    """Penalty on the KL divergence from a frozen reference policy."""

    coefficient: float = 0.0
    """Weight of the penalty; 0 turns it off, and no reference model is loaded."""
    where: Literal["loss", "reward"] = "loss"
    """Add the penalty to the loss, or subtract it from the rewards before advantages."""
    estimator: KLName = "k3"
    """k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d = log-prob - reference log-prob."""

    def __post_init__(self) -> None:
        require_range("algorithm.kl.coefficient", self.coefficient, 0.0)
        require(
            self.coefficient == 0 or self.where == "reward" or self.estimator != "k1",
            "algorithm.kl.estimator k1 has no gradient on average as a loss; set it to 'k2' or"
            " 'k3', or kl.where to 'reward'",
        )


@config
class CorrectionConfig:
    """Per-token weight w = exp(trainer log-prob - engine log-prob), because the engine sampled."""

    kind: CorrectionName = "none"
    """`tis` uses min(w, high); `icepop` uses w inside [low, high] and 0 outside."""
    low: float = 0.5
    """Lower bound of the weight, for `icepop`."""
    high: float = 2.0
    """Upper bound of the weight, for `tis` and `icepop`."""

    def __post_init__(self) -> None:
        require_range("algorithm.correction.low", self.low, 0.0, 1.0)
        require_range("algorithm.correction.high", self.high, 1.0)


@config
class AlgorithmConfig:
    """The policy-gradient algorithm.

    By default DAPO's loss (arXiv:2503.14476) with GRPO's advantages.
    """

    advantage: AdvantageName = "grpo"
    """How rewards become advantages: a name in `ADVANTAGES` (one number a sample) or
    `TOKEN_ADVANTAGES` (one a token) of megarl.objectives.
    """
    loss: LossName = "ppo_clip"
    """The policy loss: a name in megarl.objectives.losses.LOSSES."""
    aggregation: AggregationName = "token"
    """`token`: mean over all tokens of the mini-batch. `sequence`: mean over sequences of their
    token means. `constant`: sum over tokens / (sequences x constant_tokens)."""
    constant_tokens: int = 0
    """Number of tokens by which the sum over a sequence is divided under `aggregation: constant`
    (Dr.GRPO: the token limit)."""
    clip_low: float = 0.2
    """The ratio's lower bound is 1 - clip_low; gspo needs about 3e-4, since its ratio is a mean."""
    clip_high: float = 0.28
    """The ratio's upper bound is 1 + clip_high; gspo needs about 4e-4."""
    dual_clip: float = 3.0
    """Loss `dual_clip` only: for negative advantages the loss is at most dual_clip x |A|."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """Denominator of the ratio: recomputed by the trainer before the step's first update, or
    reported by the engine that sampled."""

    def __post_init__(self) -> None:
        require_range("algorithm.clip_low", self.clip_low, 0.0, 1.0)
        require_range("algorithm.clip_high", self.clip_high, 0.0)
        require(
            self.dual_clip > 1,
            f"algorithm.dual_clip is {self.dual_clip}; set it above 1 (usually 3)",
        )
        require_range("algorithm.entropy_coefficient", self.entropy_coefficient, 0.0)
        require(
            self.aggregation != "constant" or self.constant_tokens > 0,
            "algorithm.aggregation is 'constant' but algorithm.constant_tokens is 0; set it"
            " (Dr.GRPO: rollout.max_new_tokens)",
        )
        require(
            self.correction.kind == "none" or self.old_logprobs == "trainer",
            "algorithm.correction needs the trainer's own log-probs; set algorithm.old_logprobs to"
            " 'trainer'",
        )
