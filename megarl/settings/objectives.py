"""Settings of the learning algorithm: advantages, loss, KL penalty, off-policy correction."""

import math
from typing import Annotated, Literal

from megarl.settings.limits import MOST_TOKENS
from megarl.settings.presets import PRESETS
from megarl.settings.recipe_paths import IsPath
from megarl.settings.schema import FILE, Config, Of, Range, is_own, require, section

# tests/unit/test_registries.py keeps these names equal to the keys of ADVANTAGES and
# TOKEN_ADVANTAGES, LOSSES, AGGREGATIONS, KL_ESTIMATORS, CORRECTIONS and PRESETS.
_BY_GROUP = ("grpo", "dr_grpo", "gpg", "rloo", "remax")
_BY_STEP = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
ADVANTAGE = IsPath("code", (*_BY_GROUP, *_BY_STEP, "reinforce_plus_plus_tokens", "gae"))
_SomePresets = Literal["dapo", "grpo", "dr_grpo", "rloo", "remax", "reinforce_pp"]
_OtherPresets = Literal["reinforce_pp_baseline", "ppo", "gspo", "cispo", "sapo", "gpg"]
PresetName = Literal["", _SomePresets, _OtherPresets]
COMPARING = ("grpo", "dr_grpo", "gpg", "rloo", "reinforce_plus_plus_baseline")
"""Advantages that compare the samples of a group: one sample, or equal rewards, teach nothing."""
ZERO_IF_EQUAL = ("grpo", "dr_grpo", "gpg", "rloo")
"""Those of these that are exactly 0 in a group of equal rewards, whatever other groups there
are."""
WITH_GREEDY_BASELINE = ("remax",)
"""Advantages that compare each sample with a greedy response, which is not trained on."""

LOSS = IsPath("code", ("ppo_clip", "dual_clip", "gspo", "cispo", "sapo", "reinforce"))
CLIPPED = Of("loss", "ppo_clip", "dual_clip", "gspo", "cispo", FILE)
DUAL_CLIP = Of("loss", "dual_clip", FILE)
OF_A_RATIO = Of(
    *("loss", "ppo_clip", "dual_clip", "gspo", "cispo", "sapo", FILE),
    why="the denominator of a ratio that algorithm.loss 'reinforce' does not have",
    fix="for rollouts of other weights set algorithm.correction.kind",
)
BY_TRAINER = Of("old_logprobs", "trainer")
TruncatedName = Literal["train", "leave_out", "penalise"]
AggregationName = Literal["token", "sequence", "constant"]
KLName = Literal["k1", "k2", "k3"]
ABOVE_1 = "set it above 1 (usually 3), to at most 100"
CORRECTION = IsPath(
    "code", ("none", "decoupled", "tis", "icepop", "sequence_mask", "geometric_mask")
)
METHOD = IsPath("code", ("policy_gradient",))
BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "decoupled": (None, 5.0),
    "tis": (None, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.0, 2.0),
    "geometric_mask": (0.99, 1.01),
}
"""{correction: usual (low, high)}, None where it has no such bound."""


def kinds_with(place: Literal[0, 1]) -> list[str]:
    """Corrections whose weights have a lower bound (`place` 0) or an upper one (1)."""
    return [name for name, bounds in BOUNDS.items() if bounds[place] is not None]


class KLConfig(Config):
    """KL penalty, which keeps the policy close to a frozen reference model."""

    coefficient: Annotated[float, Range(0.0, 100.0)] = 0.0
    """Weight of the penalty; 0: none, and no reference model is loaded."""
    where: Literal["loss", "reward"] = "loss"
    """Add the penalty to the loss, or subtract it from the rewards before advantages: from the
    sample's, or with `reinforce_plus_plus_tokens` and `gae` from each token's."""
    estimator: KLName = "k3"
    """k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d = log-prob - reference log-prob."""
    target: Annotated[float | None, Range(1e-9, 1e3), Of("coefficient")] = None
    """Mean divergence of a token (metric `kl`) to steer the coefficient to: after each step it is
    multiplied by 1 + gain x (kl / target - 1), the last term within 0.2 (arXiv:1909.08593, 2.2).
    null: constant."""
    gain: Annotated[float, Range(1e-6, 1.0), Of("target")] = 0.1
    """How fast the coefficient follows `target`; 0.1 in the paper."""

    def check(self) -> None:
        require(
            self.coefficient == 0 or self.where == "reward" or self.estimator != "k1",
            "algorithm.kl.estimator k1 has no gradient on average as a loss; set it to 'k2' or"
            " 'k3', or kl.where to 'reward'",
        )


class CorrectionConfig(Config):
    """Off-policy correction: each token's loss is multiplied by a weight from w = exp(trainer
    log-prob - log-prob of the engine that sampled it).
    """

    kind: Annotated[str, CORRECTION] = "none"
    """`decoupled`: w up to high, 0 above. `tis`: min(w, high). `icepop`: w inside [low, high], 0
    outside. `sequence_mask`: the product of a sample's w inside [low, high], 0 outside.
    `geometric_mask`: 1 if the geometric mean of a sample's w is inside [low, high], else 0. A
    function of your own: docs/api.md."""
    low: Annotated[float | None, Range(0.0, 1.0), Of("kind", *kinds_with(0), FILE)] = None
    """Lower bound; null: 0.5 for `icepop` (arXiv:2510.18855), 0 for `sequence_mask`, 0.99 for
    `geometric_mask`."""
    high: Annotated[float | None, Range(1.0, 1e4), Of("kind", *kinds_with(1), FILE)] = None
    """Upper bound; null: 5 for `decoupled`, 2 for `tis`, 5 for `icepop`, 2 for `sequence_mask`,
    1.01 for `geometric_mask`."""
    allow_uncorrected: Annotated[bool, Of("kind", "none")] = False
    """Allow `rollout.max_staleness` above 0 with `kind: none` and `algorithm.old_logprobs:
    trainer`: the age of rollouts is ignored, and the first mini-batch's ratio is 1."""

    @property
    def lower(self) -> float:
        """`low`, by default that of `kind`; 0 without one."""
        return self.low if self.low is not None else BOUNDS.get(self.kind, (None, None))[0] or 0.0

    @property
    def upper(self) -> float:
        """`high`, by default that of `kind`; infinity without one."""
        usual = BOUNDS.get(self.kind, (None, None))[1]
        return self.high if self.high is not None else math.inf if usual is None else usual

    def check(self) -> None:
        """Refuse bounds that are equal: with their ranges both are 1, and all else is cut off."""
        require(
            self.lower < self.upper,
            f"algorithm.correction.low is {self.lower:g} and high {self.upper:g}, between which"
            " there is no weight but 1; set low below high",
        )


class GaeConfig(Config):
    """Generalised advantage estimation from a critic's values, for `algorithm.advantage: gae`."""

    gamma: Annotated[float, Range(0.0, 1.0)] = 1.0
    """Discount of the next token's reward."""
    lam: Annotated[float, Range(0.0, 1.0)] = 0.95
    """Lambda of the policy's advantages: 1 for the whole return minus the value, 0 for one step."""
    value_lam: Annotated[float, Range(0.0, 1.0)] = 1.0
    """Lambda of the returns that the critic learns. 1: the rewards to the end, without bias; over
    thousands of tokens a smaller one loses a reward at the end (VAPO, arXiv:2504.05118, 4.1)."""
    whiten: bool = True
    """Bring a step's advantages to mean 0 and variance 1 over all response tokens."""


class AlgorithmConfig(Config):
    """How rewards become advantages and the loss of each token. By default DAPO's loss
    (arXiv:2503.14476) with GRPO's advantages.
    """

    preset: PresetName = ""
    """An algorithm whose settings are filled in (docs/reference_algorithms.md); short: `algorithm:
    NAME`."""
    method: Annotated[str, METHOD] = "policy_gradient"
    """What is done with the rollouts of a step: a name in `METHODS` of megarl.run.loop, or a
    function of your own (docs/api.md)."""
    advantage: Annotated[str, ADVANTAGE] = "grpo"
    """How rewards become advantages: a name in `ADVANTAGES` (one number a sample) or
    `TOKEN_ADVANTAGES` (one a token) of megarl.objectives, or a function of your own
    (docs/api.md). KL in the reward is of the whole sequence in
    `reinforce_plus_plus`, from the token on in `reinforce_plus_plus_tokens` (arXiv:2501.03262, eq.
    8)."""
    credit: Annotated[Literal["response", "turn"], Of("advantage", *COMPARING, FILE)] = "response"
    """What an advantage is of, in rollouts of several turns: `response`, all tokens by the total
    reward; `turn`, each turn by the rewards from it on, compared with the same turn of the group's
    other rollouts."""
    turn_discount: Annotated[float, Range(0.0, 1.0), Of("credit", "turn")] = 1.0
    """With `credit: turn`: how much a turn's reward counts for the turn before it, squared for the
    one before that, and so on. 0: each turn is judged by its own reward."""
    loss: Annotated[str, LOSS] = "ppo_clip"
    """A name in megarl.objectives.losses.LOSSES, or a function of your own
    (docs/api.md)."""
    aggregation: AggregationName = "token"
    """`token`: mean over all tokens of the mini-batch. `sequence`: mean over sequences of their
    token means. `constant`: sum over tokens / (sequences x constant_tokens)."""
    constant_tokens: Annotated[int, Range(0, MOST_TOKENS), Of("aggregation", "constant")] = 0
    """Divisor of a sequence's sum with `aggregation: constant` (Dr.GRPO: the token limit)."""
    clip_low: Annotated[float, Range(0.0, 1.0), CLIPPED] = 0.2
    """A token's ratio (new / old probability) is at least 1 - clip_low; gspo, whose ratio is a
    mean, needs about 3e-4."""
    clip_high: Annotated[float, Range(0.0, 100.0), CLIPPED] = 0.28
    """A token's ratio is at most 1 + clip_high; gspo needs about 4e-4."""
    dual_clip: Annotated[float, Range(1.000001, 100, fix=ABOVE_1), DUAL_CLIP] = 3.0
    """Loss `dual_clip`: for negative advantages the loss is at most dual_clip x |A|."""
    sapo_positive: Annotated[float, Range(1e-3, 1e3), Of("loss", "sapo", FILE)] = 1.0
    """Loss `sapo`: how fast the gradient fades with the ratio, for positive advantages."""
    sapo_negative: Annotated[float, Range(1e-3, 1e3), Of("loss", "sapo", FILE)] = 1.05
    """Loss `sapo`: the same for advantages of 0 or less."""
    entropy_coefficient: Annotated[float, Range(0.0, 100.0)] = 0.0
    """Weight of the entropy bonus."""
    gae: Annotated[GaeConfig, Of("advantage", "gae", FILE)] = section(GaeConfig)
    kl: KLConfig = section(KLConfig)
    correction: Annotated[CorrectionConfig, BY_TRAINER] = section(CorrectionConfig)
    truncated: TruncatedName = "train"
    """What becomes of a rollout that was cut off: `train`, as any other; `leave_out`, its tokens
    are neither trained on nor counted, but its reward counts in its group (DAPO's overlong
    filtering, arXiv:2503.14476, 3.4); `penalise`, its reward has DAPO's length penalty -1, which
    may begin before (`environment.overlong`)."""
    old_logprobs: Annotated[Literal["trainer", "engine"], OF_A_RATIO] = "trainer"
    """Denominator of the ratio: log-probs that the trainer computes before the step's first update,
    or those of the engine that sampled."""
    router_replay: Literal["off", "rollout", "trainer"] = "off"
    """In mixtures of experts, the experts that a token goes to in training. `off`: those that the
    router chooses each time. `rollout`: those that the engine chose for each token of prompt and
    response (arXiv:2510.11370). `trainer`: those that the trainer chose as it computed the step's
    old log-probs, again in each training pass (arXiv:2507.18071)."""
    own: dict[str, bool | int | float | str] = {}
    """{name: value} for functions of your own: `config.own["name"]`, in a method
    `parts.config.algorithm.own`."""

    def check(self) -> None:
        require(
            not self.own or any(map(is_own, (self.method, self.advantage, self.loss))),
            "algorithm.own is for functions of your own, but algorithm.method, algorithm.advantage"
            f" and algorithm.loss name none; leave it out, or set one of these to {FILE}",
        )
        require(
            self.router_replay != "trainer" or self.old_logprobs == "trainer",
            "algorithm.router_replay is 'trainer', but with algorithm.old_logprobs 'engine' the"
            " trainer computes no old log-probs; set router_replay to 'rollout' or 'off'",
        )
        for key, value in PRESETS.get(self.preset, {}).items():
            require(
                getattr(self, key) == value,
                f"algorithm.preset is '{self.preset}', which means algorithm.{key} {value}, but"
                f" algorithm.{key} is {getattr(self, key)}; leave one of the two out",
            )
        require(
            self.aggregation != "constant" or self.constant_tokens > 0,
            "algorithm.aggregation is 'constant' but algorithm.constant_tokens is 0; set it"
            " (Dr.GRPO: rollout.max_new_tokens)",
        )


PreferenceMethod = Literal["dpo", "cdpo", "robust_dpo", "ipo", "simpo", "orpo", "kto"]
SMOOTHING = ("cdpo", "robust_dpo")
WITHOUT_REFERENCE = ("simpo", "orpo")
"""Preference methods without a reference model."""
USUAL_BETA = {"simpo": 2.0}
"""{preference method: usual `beta`}; 0.1 for all others."""


class PreferenceLossConfig(Config):
    """The loss of `task: preference`; formulae are in megarl/apps/tune/pairwise.py."""

    method: PreferenceMethod = "dpo"
    """`dpo`; `cdpo` and `robust_dpo`, for labels of which a share is wrong; `ipo`; `simpo` and
    `orpo`, without a reference; `kto`, without pairs."""
    beta: Annotated[float | None, Range(1e-6, 1e6)] = None
    """Scale of log-probs: the paper's beta, tau (ipo) or lambda (orpo). null: 2.0 for simpo, else
    0.1."""
    label_smoothing: Annotated[float, Range(0.0, 0.499), Of("method", *SMOOTHING)] = 0.0
    """Of `cdpo` and `robust_dpo`: the share of wrong labels, above 0."""
    target_margin: Annotated[float, Range(0.0, 1e6), Of("method", "simpo")] = 0.0
    """Of `simpo`: gamma, by which the chosen reward is to exceed the rejected one (the paper: 0.3
    to 1.6)."""
    length_average: Annotated[bool, Of("method", "ipo")] = False
    """Of `ipo`: divide log-probs by the number of response tokens, as TRL does and the paper
    (arXiv:2310.12036) does not."""
    desirable_weight: Annotated[float, Range(0.0, 1e6), Of("method", "kto")] = 1.0
    """Of `kto`: weight of desirable responses."""
    undesirable_weight: Annotated[float, Range(0.0, 1e6), Of("method", "kto")] = 1.0
    """Of `kto`: weight of undesirable responses. In the paper (arXiv:2402.01306) weight x number of
    responses is about the same for both, within a factor of 4/3."""
    sft_coefficient: Annotated[
        float, Range(0.0, 1e6), Of("method", *SMOOTHING, "dpo", "ipo", "simpo")
    ] = 0.0
    """Weight of a further term, the mean over pairs of -log-prob per token of the chosen response;
    not for `kto`, and `orpo` has it with weight 1."""

    @property
    def scale(self) -> float:
        """`beta`, by default that of the method."""
        return USUAL_BETA.get(self.method, 0.1) if self.beta is None else self.beta

    @property
    def has_reference(self) -> bool:
        """Whether the method compares with a frozen reference model."""
        return self.method not in WITHOUT_REFERENCE

    def check(self) -> None:
        require(
            self.method not in SMOOTHING or self.label_smoothing > 0,
            f"loss.method is '{self.method}' but loss.label_smoothing is 0, which is 'dpo'; set the"
            " share of wrong labels, for example 0.1",
        )
        require(
            self.desirable_weight + self.undesirable_weight > 0,
            "loss.desirable_weight and loss.undesirable_weight are 0, so that nothing is learnt;"
            " set one above 0",
        )


class RewardLossConfig(Config):
    """The loss of `task: reward_model`: Bradley-Terry, -log sigmoid(chosen score - rejected score -
    margin of the pair).
    """

    centering: Annotated[float, Range(0.0, 1e6)] = 0.0
    """Weight of a term that keeps the scores around 0, (chosen + rejected)^2; Bradley-Terry
    determines them only up to a constant for each prompt (arXiv:2312.09244, 4.1 uses 0.01)."""


DivergenceName = Literal["forward_kl", "reverse_kl", "jensen_shannon"]


class DistillationConfig(Config):
    """The loss of `task: distill`, which gives the policy the teacher's next-token probabilities;
    formulae are in kernels/divergence.py.
    """

    divergence: DivergenceName = "reverse_kl"
    """`forward_kl`: KL(teacher || policy), which covers all that the teacher may say; `reverse_kl`:
    KL(policy || teacher), which keeps to what the teacher finds likely; `jensen_shannon`: GKD's
    mixture (arXiv:2306.13649, eq. 2)."""
    beta: Annotated[float, Range(1e-6, 0.999999), Of("divergence", "jensen_shannon")] = 0.5
    """Weight of the teacher in `jensen_shannon`: towards 0 like forward KL, towards 1 like reverse
    KL."""
    top_k: Annotated[int, Range(0, 2**20)] = 0
    """Compare the teacher's k likeliest tokens one by one and all others as one; 0: every token by
    itself."""
    temperature: Annotated[float, Range(0.01, 100.0)] = 1.0
    """Divisor of both models' logits in the divergence."""
    aggregation: Literal["token", "sequence"] = "token"
    """`token`: mean over all tokens of the mini-batch. `sequence`: mean over sequences of their
    token means, as in GKD."""
