"""The data types that packages exchange, in the order in which a run makes them.

    Prompt -> Segment -> Rollout -> Group -> StepBatch of Samples -> MicroBatch -> StepReport

Letters in shapes: T tokens of a sequence, P tokens of a prompt, N samples of a step, S samples of a
column, G samples of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

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


class TokenArrays(NamedTuple):
    """The tokens of a segment, with their log-probs."""

    token_ids: np.ndarray
    """[T] int32. Model: as sampled, the end-of-sequence token included, never tokenised again."""
    logprobs: np.ndarray
    """[T] float32 log-prob of each token under the engine's sampling distribution (temperature
    applied); 0 in environment segments.
    """


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of a rollout that one side wrote: the model, or its environment.

    A single-turn rollout is one model segment. A rollout with tools alternates model and
    environment segments; all are attended to, only model segments are trained on.
    """

    kind: Literal["model", "environment"]
    num_tokens: int
    """T, 0 only in environment segments."""
    arrays: Any
    """The `TokenArrays`, or a reference to them where they stay in the process or store that
    holds them (`megarl.cluster.mailbox.StoredArrays`).
    """
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Spans (weight version, number of tokens) that sum to T; empty in environment segments."""
    finish: Literal["stop", "length", ""] = ""
    """Why the model stopped; empty in environment segments."""


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
    """One attempt at a prompt, scored."""

    sample: int
    """Number in its group, 0 .. G-1."""
    seed: int
    segments: list[Segment]
    """In order; the last one is the model's."""
    verdict: Verdict
    dispatched_at: int
    """Trainer version when the rollout started."""

    @property
    def num_tokens(self) -> int:
        """Tokens the model generated, over all its segments."""
        return sum(part.num_tokens for part in self.segments if part.kind == "model")

    @property
    def truncated(self) -> bool:
        """Whether the response was cut off at the token limit."""
        return self.segments[-1].finish == "length"

    @property
    def oldest_version(self) -> int:
        """The oldest weights that generated a token of it."""
        return min(version for part in self.segments for version, _ in part.versions)


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt."""

    ordinal: int
    """Position in the order in which prompts are trained, from 0, over the whole run."""
    prompt: Prompt
    rollouts: list[Rollout]
    """[G]"""


@dataclass(frozen=True, slots=True)
class Samples:
    """Token sequences to train on, as columns: sequence i is `[offsets[i]:offsets[i + 1]]` of each.

    Example: prompt tokens 5 6, response tokens 7 1, reward 0.5 for the whole response:

        ids [0]   offsets [0 4]   token_ids [5 6 7 1]   mask [0 0 1 1]
        engine_logprobs [0 0 -0.3 -0.1]   rewards [0 0 0 0.5]
    """

    ids: np.ndarray
    """[S] int64 number of each sample in the step, 0 .. N-1; the same on every rank."""
    offsets: np.ndarray
    """[S + 1] int64 first token of each sample, then T."""
    token_ids: np.ndarray
    """[T] int32 prompts and responses."""
    mask: np.ndarray
    """[T] bool, True where the policy chose the token."""
    engine_logprobs: np.ndarray
    """[T] float32 log-prob under the engine's sampling distribution; 0 where `mask` is False."""
    rewards: np.ndarray
    """[T] float32 reward received with each token; a scalar reward stands on the last token that
    the policy chose.
    """

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """[S] tokens of each sample."""
        return np.diff(self.offsets)

    @classmethod
    def one(
        cls,
        sample_id: int,
        token_ids: Sequence[int] | np.ndarray,
        *,
        mask: Sequence[bool] | np.ndarray | None = None,
        engine_logprobs: Sequence[float] | np.ndarray | None = None,
        reward: float = 0.0,
    ) -> Samples:
        """A single sample; without `mask` the policy chose every token but the first."""
        length = len(token_ids)
        chosen = np.arange(length) > 0 if mask is None else np.asarray(mask, dtype=bool)
        logprobs = np.zeros(length) if engine_logprobs is None else engine_logprobs
        rewards = np.zeros(length, dtype=np.float32)
        if chosen.any():
            rewards[np.flatnonzero(chosen)[-1]] = reward
        return cls(
            ids=np.array([sample_id]),
            offsets=np.array([0, length]),
            token_ids=np.asarray(token_ids, dtype=np.int32),
            mask=chosen,
            engine_logprobs=np.asarray(logprobs, dtype=np.float32),
            rewards=rewards,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Samples]) -> Samples:
        """The samples of all parts, in order."""
        lengths = [np.zeros(1, dtype=np.int64), *(part.lengths for part in parts)]
        columns = {
            name: np.concatenate([np.zeros(0, dtype), *(getattr(part, name) for part in parts)])
            for name, dtype in COLUMNS.items()
        }
        ids = np.concatenate([np.zeros(0, np.int64), *(part.ids for part in parts)])
        return cls(ids=ids, offsets=np.cumsum(np.concatenate(lengths)), **columns)

    def places(self, positions: Sequence[int] | np.ndarray) -> np.ndarray:
        """[T'] int64 indices of the tokens of the samples at `positions`, in that order."""
        chosen = np.asarray(positions, dtype=np.int64)
        lengths = self.lengths[chosen]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        # Token t of the result is token t - (its sample's new start) + (its sample's old start).
        return np.arange(starts[-1]) + np.repeat(self.offsets[chosen] - starts[:-1], lengths)

    def select(self, positions: Sequence[int] | np.ndarray) -> Samples:
        """The samples at `positions` (not their `ids`), in that order."""
        chosen = np.asarray(positions, dtype=np.int64)
        places = self.places(chosen)
        return Samples(
            ids=self.ids[chosen],
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths[chosen])]),
            **{name: getattr(self, name)[places] for name in COLUMNS},
        )


COLUMNS = {
    "token_ids": np.int32,
    "mask": np.bool_,
    "engine_logprobs": np.float32,
    "rewards": np.float32,
}
"""The per-token columns of `Samples`, with their types."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One data rank's share of a step, with what every rank needs of the whole step. Filled by the
    rollout service.
    """

    step: int
    samples: list[Samples]
    """Per mini-batch, this rank's samples."""
    micro_batches: list[list[list[int]]]
    """Per mini-batch, the packed sequences as lists of positions in `samples`; the same number of
    packed sequences on every rank.
    """
    rewards: np.ndarray
    """[N] float64 total reward of every sample of the step, on every rank."""
    groups: np.ndarray
    """[N] int64 group (numbered 0 .. in this step) that each sample belongs to."""
    response_tokens: np.ndarray
    """[N] int64 tokens the policy chose."""
    mini_batch_of: np.ndarray
    """[N] int64 mini-batch in which each sample is trained."""
    metrics: dict[str, float]
    """Statistics of the whole step's rollouts."""
    transcripts: list[dict[str, Any]] = field(default_factory=list)
    """Some groups as text, on rank 0 only."""


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
    sample_ids: torch.Tensor
    """[T] int64, number in the step of the sample that each position belongs to."""
    engine_logprobs: torch.Tensor
    """[T] float32, of the target; 0 where mask is False."""
    rewards: torch.Tensor
    """[T] float32, reward received with the target; 0 where mask is False."""
    members: torch.Tensor
    """[S] int64, the samples of the whole packed sequence, each once, ascending; -1 is padding."""
    places: torch.Tensor
    """[T] int64, index of the target among the tokens of the mini-batch's `Samples`: where columns
    that a role has filled (see `megarl.trainer.role`) have its value; 0 where mask is False.
    """
    indices: tuple[torch.Tensor, ...] = ()
    """Per sequence rank [L_r] int64 on the CPU: positions in the whole row of the tokens it holds.
    Empty: the row is not cut.
    """


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did. Filled by `megarl.trainer`, the same on every rank."""

    step: int
    metrics: dict[str, float]
