"""The nouns. Read them once and every room's code is readable.

Letters in shapes: T tokens of a row, P prompt tokens, N samples of a step, G samples of a group, V
vocabulary.

    Prompt --collect--> Rollout --score--> reward --advantages--> Group --pack--> MicroBatch
    --step--> StepReport
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task. Filled by `megarl.data`."""

    index: int
    """Row in the source, from 0."""
    text: str
    """As the model sees it, chat template applied."""
    token_ids: list[int]
    """[P] tokens of `text`."""
    answer: str
    """What the verifier compares with."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The row itself, for verifiers that need more."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt with the response to imitate. Filled by `megarl.data`."""

    index: int
    prompt_ids: list[int]
    """[P]"""
    response_ids: list[int]
    """[T] the end-of-sequence token included."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model reply, exactly as sampled. Filled by an engine."""

    token_ids: list[int]
    """[T] sampled tokens, the end-of-sequence token included where there is one. Never
    re-tokenised.
    """
    logprobs: list[float]
    """[T] the engine's log-prob of each token under the law it was sampled from."""
    versions: list[tuple[int, int]]
    """Spans (version, number of tokens) of the weights that made them; sums to T."""
    finish: Literal["stop", "length"]
    text: str = ""
    """Decoded without special tokens. Filled by the rollout service."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier said of a rollout. Filled by `megarl.environments`."""

    reward: float
    """After length penalty: what the learner sees. Finite."""
    correct: bool
    failure: Literal["", "error", "timeout", "nan"] = ""
    """Why there is no honest verdict; the reward is then that of a wrong answer."""
    detail: str = ""
    """The error's own words."""
    penalty: float = 0.0
    """Length penalty contained in `reward`, at most 0."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """All turns of one attempt at a prompt."""

    sample: int
    """Number in its group, 0 .. G-1."""
    seed: int
    turns: list[Turn]
    verdict: Verdict
    dispatched_at: int
    """Trainer version when the rollout started."""

    @property
    def num_tokens(self) -> int:
        """Tokens the model generated, over all turns."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """Cut off at the token limit."""
        return self.turns[-1].finish == "length"


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt."""

    ordinal: int
    """Position in the order in which prompts are trained, from 0, over the whole run."""
    prompt: Prompt
    rollouts: list[Rollout]
    """[G]"""


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of tokens to train on."""

    row: int
    """Its number in the step's batch, 0 .. N-1; the same on every rank."""
    token_ids: list[int]
    """[T] prompt and turns."""
    mask: list[bool]
    """[T] True where the policy chose the token."""
    engine_logprobs: list[float]
    """[T] 0 where `mask` is False."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One rank's share of a step, with the whole step's bookkeeping. Filled by the rollout
    service.
    """

    step: int
    samples: list[list[Sample]]
    """Per mini-batch, this rank's samples."""
    micro_batches: list[list[list[int]]]
    """Per mini-batch, the packed rows as lists of positions in `samples`; the same number of rows
    on every rank.
    """
    rewards: list[float]
    """[N] of every sample of the step, on every rank."""
    groups: list[int]
    """[N] which group (numbered 0 .. in this step) a sample belongs to."""
    response_tokens: list[int]
    """[N] tokens the policy chose."""
    mini_batch_of: list[int]
    """[N] mini-batch in which a sample is trained."""
    metrics: dict[str, float]
    """Statistics of the whole step's rollouts."""
    transcripts: list[dict[str, Any]] = field(default_factory=list)
    """Some groups in words, on rank 0 only."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples packed into one row without padding, next-token labels already shifted. Filled by
    `megarl.trainer.packing`.

    Where sequence ranks share the row, T are this rank's tokens of it; `starts`, `indices` and
    `members` are of the whole row.
    """

    token_ids: torch.Tensor
    """[T] int64"""
    position_ids: torch.Tensor
    """[T] int64, from 0 in each document."""
    targets: torch.Tensor
    """[T] int64, the token that follows; the last of a document has an arbitrary target and mask
    False.
    """
    mask: torch.Tensor
    """[T] bool, True where the *target* is trained on."""
    starts: torch.Tensor
    """[D + 1] int32, first position of each of D documents, then T."""
    rows: torch.Tensor
    """[T] int64, `Sample.row` of each position."""
    engine_logprobs: torch.Tensor
    """[T] float32, of the target; 0 where mask is False."""
    members: torch.Tensor
    """[S] int64, each `Sample.row` in the whole row once, ascending."""
    indices: tuple[torch.Tensor, ...] = ()
    """Per sequence rank [L_r] int64 on the CPU: positions in the whole row of the tokens it holds.
    Empty: the row is not cut.
    """


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did. Filled by `megarl.trainer`, the same on every rank."""

    step: int
    metrics: dict[str, float]
