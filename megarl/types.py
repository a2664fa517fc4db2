"""The data types that packages exchange, in the order in which a run makes them.

    Prompt -> Segment -> Rollout -> Group -> StepBatch of Samples -> MicroBatch -> StepReport

Letters in shapes: T tokens of a sequence, P tokens of a prompt, N samples of a step, S samples of
one `Samples` object, G samples of a group.
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
    """A prompt for reinforcement learning, from `megarl.data.source.load_prompts`."""

    index: int
    """Of the row in the data set, from 0; in a mixture over all its sources."""
    text: str
    """What the model sees, with the chat template applied."""
    token_ids: list[int]
    """[P]."""
    answer: str
    """The reference answer, for the verifier; empty if the data have none."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The whole row, for verifiers that need other columns."""
    environment: str = ""
    """Verifier in `environment.mixture`; empty without a mixture."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a run in its data: the groups that its finished steps have used, by position in
    the training order: all below `first`, and those in `beyond`.
    """

    first: int = 0
    """The first group that is not used."""
    beyond: tuple[int, ...] = ()
    """Used groups above `first`, ascending."""


START = Cursor()
"""The cursor of a new run."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt with a response to imitate, for supervised fine-tuning; in a conversation the
    response also has turns of others. From `megarl.data.demonstrations`.
    """

    index: int
    prompt_ids: list[int]
    """[P]."""
    response_ids: list[int]
    """[T], the end-of-sequence token included."""
    response_mask: list[int] | None = None
    """[T] 1 for tokens that are trained on, 0 for turns of others; None: all are."""


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt with two responses, from `megarl.data.preferences`; usually the first is better.

    With `is_single`, for KTO, the first is labelled by itself, and the second belongs to another
    prompt: KTO estimates a KL divergence with it.
    """

    index: int
    """In the data set, from 0."""
    prompt_ids: list[int]
    """[P]."""
    responses: tuple[list[int], list[int]]
    """[T] token ids each, with the end-of-sequence token: (chosen, rejected) or, with `is_single`,
    (response, one of another prompt).
    """
    margin: float = 0.0
    """By how much the chosen response is better, for reward models."""
    is_single: bool = False
    is_desirable: bool = True
    """With `is_single`: whether the response is good."""
    cut: int = 0
    """With `is_single`: tokens at the prompt's beginning that are left out before the other
    prompt's response, so that both fit.
    """


class TokenArrays(NamedTuple):
    """The tokens of a segment."""

    token_ids: np.ndarray
    """[T] int32. In model segments the sampled ones, the end-of-sequence token included; text is
    never tokenised again.
    """
    logprobs: np.ndarray
    """[T] float32, under the engine's sampling distribution (temperature applied); 0 in environment
    segments.
    """
    experts: np.ndarray | None = None
    """[C, layers, K] `expert_dtype`: the experts that the engine chose for the last C >= T tokens
    that end with this segment, earlier segments and prompt included; `unreported_experts` where it
    does not tell. In model segments, for `algorithm.router_replay: rollout`.
    """


def expert_dtype(num_experts: int) -> type[np.unsignedinteger]:
    """The type of the experts' numbers, which has one number more."""
    return np.uint8 if num_experts < 256 else np.uint16


def unreported_experts(dtype: Any) -> int:
    """The number in place of an expert's where an engine does not tell: the highest of `dtype`."""
    return int(np.iinfo(dtype).max)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of a rollout, all by the model or all by the environment. A single-turn
    rollout is one model segment; with tools they alternate. The model attends to all, and is
    trained on its own.
    """

    kind: Literal["model", "environment"]
    num_tokens: int
    """T; 0 is possible only for environment segments."""
    arrays: Any
    """`TokenArrays`, or a reference to them (`megarl.rollout.stored_arrays.StoredArrays`)."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Weight versions that generated the tokens: (version, number of consecutive tokens), summing
    to T.
    """
    finish: Literal["stop", "length", "tool_call", "turns", ""] = ""
    """Why generation stopped: `length` at the token limit, `tool_call` there too, inside a tool
    call, `turns` at the limit of turns. Empty in environment segments.
    """
    reward: float = 0.0
    """In an environment segment: for the model segment made last before it; finite."""
    max_next: int = 0
    """In an environment segment: most tokens of the model's next one; 0: no limit but the
    rollout's.
    """
    follows: int | None = None
    """Number of the segment that this one continues; None: the one before; -1: none, a conversation
    of its own begins. A rollout that is not one chain is a tree: a token attends to its own
    segment and to those that it continues.
    """
    stop_next: tuple[str, ...] = ()
    """In an environment segment: texts that end the model's next one, beside the recipe's."""


Failure = Literal["", "error", "timeout", "nan", "response_limit"]
"""Why a verifier gave no score. The response is to blame for "response_limit": computing on it has
used up the verifier's time or memory. The verifier is to blame for the others.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of scoring a rollout, from `megarl.environments.scoring.Environment`."""

    reward: float
    """Higher is better; with the length penalty, without rewards of single turns; finite."""
    correct: bool
    failure: Failure = ""
    """With one, the reward is that of a wrong answer."""
    detail: str = ""
    """Message of the verifier's error."""
    penalty: float = 0.0
    """Length penalty in `reward`, at most 0."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the verifier returned beside its score."""
    warning: str = ""
    """About the environment, on the first verdict after it was noticed."""
    finish: Literal["", "tool_call"] = ""
    """"tool_call" if the last response was cut off inside a tool call."""
    judged: bool = True
    """Whether the verifier was asked; False for a response that was cut off and counts as wrong."""
    untrained: Sequence[int] = ()
    """Model segments that are not trained: an agent has not read them, or thrown them away."""
    lost: bool = False
    """Whether the process of the session has ended, with all others in it."""
    left_out: bool = False
    """Not trained on and in no mean, since nobody knows its worth: the verifier failed, or
    abstained (without `failure`).
    """

    @property
    def missing(self) -> str:
        """Why there is no score: the `failure`, "abstained", or ""."""
        return self.failure or ("abstained" if self.left_out else "")


def total_reward(segments: Sequence[Segment], verdict: Verdict) -> float:
    """The score of the whole rollout, plus rewards of single turns."""
    return verdict.reward + sum(segment.reward for segment in segments)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One scored rollout of a prompt."""

    sample: int
    """Index among those of its prompt, 0 .. G - 1."""
    seed: int
    segments: list[Segment]
    """The last one is a model segment. None if the environment failed before the model's first
    turn.
    """
    verdict: Verdict
    dispatched_at: int
    """Weight version when it started."""

    @property
    def num_tokens(self) -> int:
        """Generated by the model."""
        return sum(segment.num_tokens for segment in self.segments if segment.kind == "model")

    @property
    def reward(self) -> float:
        return total_reward(self.segments, self.verdict)

    @property
    def truncated(self) -> bool:
        """Cut off, at the limit of tokens or turns."""
        return self.segments[-1].finish != "stop"

    @property
    def oldest_version(self) -> int:
        """Oldest weight version of a token; 0 is the model before training."""
        return min(version for segment in self.segments for version, _ in segment.versions)


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt with all its rollouts, which are sampled together and compared with each other."""

    ordinal: int
    """Position of the prompt in the training order of the run, from 0."""
    prompt: Prompt
    rollouts: list[Rollout]
    """The G rollouts that have a verdict, by `sample`."""
    greedy: Rollout | None = None
    """A greedy response, with whose reward `remax` compares; not trained on."""
    left_out: list[Rollout] = field(default_factory=list)
    """Rollouts without a verdict: counted and shown, not trained on."""

    @property
    def members(self) -> list[Rollout]:
        """All rollouts."""
        return [*self.rollouts, *([self.greedy] if self.greedy else []), *self.left_out]


@dataclass(frozen=True, slots=True)
class Samples:
    """Token sequences (prompt and response) without padding: sequence i is `[offsets[i]:offsets[i +
    1]]` of each per-token array.

    Example: prompt tokens 5 6, response tokens 7 1, reward 0.5 for the whole response:

            ids [0]   offsets [0 4]   token_ids [5 6 7 1]   mask [0 0 1 1]
            engine_logprobs [0 0 -0.3 -0.1]   rewards [0 0 0 0.5]
    """

    ids: np.ndarray
    """[S] int64 index of each sample in the step, 0 .. N - 1, on every rank."""
    offsets: np.ndarray
    """[S + 1] int64 index of the first token of each sample, then T."""
    prompts: np.ndarray
    """[S] int64 tokens of each prompt; -1 where only `mask` tells it."""
    token_ids: np.ndarray
    """[T] int32."""
    mask: np.ndarray
    """[T] bool, True for tokens that the policy generated."""
    engine_logprobs: np.ndarray
    """[T] float32 under the engine's sampling distribution; 0 where `mask` is False."""
    rewards: np.ndarray
    """[T] float32. That of the whole response is on the policy's last token."""
    branches: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """[B, 2] int64, of trees: where a token does not continue the one before it in the arrays, (its
    index, index of the token of the same sample that it continues, or -1), ascending. Tokens are
    in the order in which they were made.
    """
    experts: np.ndarray | None = None
    """[T, layers, K], as `TokenArrays.experts`, of every token; None if engines report none."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """[S] int64 tokens of prompt and response."""
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
        prompt: int = -1,
        branches: Sequence[tuple[int, int]] | np.ndarray = (),
    ) -> Samples:
        """A single sample. `reward`: on the policy's last token. `mask` None: all but the first
        token; `engine_logprobs` None: zeros; `prompt` -1: unknown length.
        """
        length = len(token_ids)
        chosen = np.arange(length) > 0 if mask is None else np.asarray(mask, dtype=bool)
        logprobs = np.zeros(length) if engine_logprobs is None else engine_logprobs
        rewards = np.zeros(length, dtype=np.float32)
        if chosen.any():
            rewards[np.flatnonzero(chosen)[-1]] = reward
        return cls(
            ids=np.array([sample_id]),
            offsets=np.array([0, length]),
            prompts=np.array([prompt]),
            token_ids=np.asarray(token_ids, dtype=np.int32),
            mask=chosen,
            engine_logprobs=np.asarray(logprobs, dtype=np.float32),
            rewards=rewards,
            branches=np.array(branches, np.int64).reshape(-1, 2),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Samples]) -> Samples:
        """The samples of all `parts`, in order, copied."""
        lengths = [np.zeros(1, dtype=np.int64), *(chunk.lengths for chunk in parts)]
        begins = np.cumsum([0, *(len(chunk.token_ids) for chunk in parts)]).tolist()
        branches = [_moved(chunk.branches, by) for chunk, by in zip(parts, begins, strict=False)]
        columns = {
            name: np.concatenate([np.zeros(0, dtype), *(getattr(chunk, name) for chunk in parts)])
            for name, dtype in ({"ids": np.int64, "prompts": np.int64} | COLUMNS).items()
        }
        return cls(
            offsets=np.cumsum(np.concatenate(lengths)),
            branches=np.concatenate([np.zeros((0, 2), np.int64), *branches]),
            experts=_joined_experts(parts),
            **columns,
        )

    def places(self, positions: Sequence[int] | np.ndarray) -> np.ndarray:
        """[T'] int64 indices into per-token arrays, of all tokens of the samples at these
        `positions` (not `ids`).
        """
        chosen = np.asarray(positions, dtype=np.int64)
        lengths = self.lengths[chosen]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        # Token t of the result is token t - (its sample's new start) + (its sample's old start).
        return np.arange(starts[-1]) + np.repeat(self.offsets[chosen] - starts[:-1], lengths)

    def branches_of(self, number: int) -> np.ndarray:
        """[b, 2] `branches` of the sample at position `number`, counted from its first token."""
        first, last = self.offsets[number : number + 2].tolist()
        low, high = np.searchsorted(self.branches[:, 0], (first, last))
        return _moved(self.branches[low:high], -first)

    def select(self, positions: Sequence[int] | np.ndarray) -> Samples:
        """Copies of the samples at these `positions`, in their order."""
        chosen = np.asarray(positions, dtype=np.int64)
        places = self.places(chosen)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths[chosen])])
        branches = [
            _moved(self.branches_of(n), to)
            for n, to in zip(chosen.tolist(), offsets.tolist(), strict=False)
            if len(self.branches)
        ]
        return Samples(
            ids=self.ids[chosen],
            offsets=offsets,
            prompts=self.prompts[chosen],
            branches=np.concatenate([np.zeros((0, 2), np.int64), *branches]),
            experts=None if self.experts is None else self.experts[places],
            **{name: getattr(self, name)[places] for name in COLUMNS},
        )


def _moved(branches: np.ndarray, by: int) -> np.ndarray:
    """`branches` of tokens that are `by` places farther on."""
    return np.where(branches < 0, branches, branches + by)


def _joined_experts(parts: Sequence[Samples]) -> np.ndarray | None:
    """The `experts` of all parts; unreported those of a part that has none."""
    known = next((chunk.experts for chunk in parts if chunk.experts is not None), None)
    if known is None:
        return None
    missing = unreported_experts(known.dtype)
    return np.concatenate(
        [
            np.full((len(chunk.token_ids), *known.shape[1:]), missing, known.dtype)
            if chunk.experts is None
            else chunk.experts
            for chunk in parts
        ]
    )


COLUMNS = {
    "token_ids": np.int32,
    "mask": np.bool_,
    "engine_logprobs": np.float32,
    "rewards": np.float32,
}
"""{name of a per-token array of `Samples`: dtype}."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The samples of one step for one data-parallel rank, and rewards, groups and metrics of the
    whole step. From the rollout service.
    """

    step: int
    samples: list[Samples]
    """For each mini-batch, this rank's."""
    micro_batches: list[list[list[int]]]
    """For each mini-batch, this rank's packed sequences as indices of samples there. Every rank has
    equally many.
    """
    rewards: np.ndarray
    """[N] float64 total reward of every sample."""
    groups: np.ndarray
    """[N] int64 index of each sample's group in this step."""
    response_tokens: np.ndarray
    """[N] int64 trained tokens of each sample: 0 for greedy responses."""
    mini_batch_of: np.ndarray
    """[N] int64 mini-batch of each sample."""
    metrics: dict[str, float]
    """Over the whole step's rollouts."""
    transcripts: list[dict[str, Any]] = field(default_factory=list)
    """Rollouts of some prompts as text; on rank 0."""
    warning: str = ""
    """For the user, about the step's rollouts."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples as one packed sequence without padding, with labels shifted: the input of one forward
    and backward pass. From `megarl.trainer.packing`.

    With sequence parallelism a rank has T tokens of it. `starts`, `parents`, `begins`, `ends`,
    `indices` and `members` describe the whole packed sequence.
    """

    token_ids: torch.Tensor
    """[T] int64."""
    position_ids: torch.Tensor
    """[T] int64 position in the sample: tokens before it to which it attends without a sliding
    window.
    """
    targets: torch.Tensor
    """[T] int64 id of the next token; arbitrary where `mask` is False."""
    mask: torch.Tensor
    """[T] bool, True if the *target* was generated by the policy and is trained on."""
    starts: torch.Tensor
    """[D + 1] int32 first token of each of D documents, then the length. A document is a sample; a
    prefix that samples share, or the rest of a sample; of a tree, the tokens from a branch's
    start to a last token.
    """
    sample_ids: torch.Tensor
    """[T] int64 index in the step of each token's sample; -1 for shared prefixes and padding."""
    engine_logprobs: torch.Tensor
    """[T] float32 log-prob of the target by the engine; 0 where `mask` is False."""
    rewards: torch.Tensor
    """[T] float32 for the target; 0 where `mask` is False."""
    members: torch.Tensor
    """[S] int64 ids of the samples, ascending; -1 is padding."""
    places: torch.Tensor
    """[T] int64 index of each target in the per-token arrays of the mini-batch's `Samples`; 0 where
    `mask` is False.
    """
    multiplicity: torch.Tensor
    """[T] float32 how many sequences the token is in: those of all samples that share it, a tree's
    from the root to each leaf; 0 for padding.
    """
    ends: torch.Tensor
    """[S] int64 position of each sample's last token."""
    indices: tuple[torch.Tensor, ...] = ()
    """For each sequence-parallel rank, [L_r] int64 positions of its tokens, on the CPU; empty if
    not divided.
    """
    parents: tuple[int, ...] = ()
    """[D] the document that each continues and attends to, or -1; empty where none does."""
    begins: tuple[int, ...] = ()
    """[D] tokens before each document that it continues: the first ones of its parent, or all, and
    those that the parent continues.
    """
    experts: torch.Tensor | None = None
    """[T, layers, K] int16 experts of each token, which its routers take; -1 where they choose.
    None: they choose everywhere.
    """


@dataclass(frozen=True, slots=True)
class StepReport:
    """Metrics of one step, the same on every rank; from `megarl.trainer`."""

    step: int
    metrics: dict[str, float]
