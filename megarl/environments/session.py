"""Environment sessions: one object per rollout, which replies to what the model writes.

    start(prompt) -> Observation      step(text, token_ids) -> Observation | Answer | score

Sessions run in worker processes, which enforce a time limit on each call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from megarl.types import Prompt


@dataclass(frozen=True, slots=True)
class Observation:
    """What `start` and `step` return while the rollout goes on."""

    text: str
    """What the model reads next, without `role` including the chat template's markup. Empty only at
    the start: no observation."""
    reward: float = 0.0
    """For the turn that the observation replies to; added to the final score."""
    role: Literal["", "user"] = ""
    """"user": where prompts are chats (`prompts.template: chat`), the text of a `step` becomes a
    user's turn in the chat template's markup. Empty: the text as it is."""
    follows: int | None = None
    """Which segment of the rollout the text continues, for conversations that branch: a number from
    0 in the order of time, counting the observation of `start`, if not empty, the model's turns and
    the observations. With it the text may be empty: the model answers once more. None: the model's
    newest turn. -1: none; a conversation of its own, without the prompt."""
    max_tokens: int = 0
    """Most tokens of the model's next turn; 0: no limit but the rollout's."""


@dataclass(frozen=True, slots=True)
class AgentObservation(Observation):
    """Of an agent's session, which has tokenised the text itself."""

    token_ids: list[int] = field(default_factory=list)
    """[T], of `text`."""
    stop: tuple[str, ...] = ()
    """Texts at which the model's next turn ends, beside those of the recipe."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What `step` returns to end the rollout with a text that the recipe's verifier scores."""

    text: str
    """Scored as the response."""
    metrics: dict[str, float] = field(default_factory=dict)
    """{name: number} of the session's own."""


class Session(Protocol):
    """Interface of a user's multi-turn environment, `environment.session: path/to/file.py:Class`.
    Each rollout gets an instance, made without arguments: `start` is called once, then `step` after
    each turn of the model until it ends the rollout. If a method raises or exceeds its limit, only
    this rollout fails. Methods may be `async`; plain ones run on `environment.threads` threads.
    """

    def start(self, prompt: Prompt) -> Any:
        """Return an `Observation`, which the model reads after the prompt; its text may be empty,
        its reward must be 0. Time limit: `environment.start_limit_s`.
        """
        ...

    def step(self, text: str, token_ids: np.ndarray) -> Any:
        """Called with the model's turn: `text`, without special tokens (but with the tags of
        thinking) and end of turn, and `token_ids`, [T] int32, as sampled. Time limit:
        `environment.time_limit_s`.

        Return an `Observation`, after which the model continues; or, to end the rollout, an
        `Answer`, or a score from 0 (wrong) to 1 (right), as a number or a dict with `reward`.
        """
        ...


class Closing(Protocol):
    """Optional method of a session that holds something, such as a file or a process."""

    def close(self) -> Any:
        """Called once when the rollout has ended, unless the session's process ended before. An
        error in it is only printed.
        """
        ...
