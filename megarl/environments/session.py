"""Environment sessions: one object per rollout, which reads what the model writes and replies with
an observation, with a score, or with an answer that the recipe's verifier scores.

    start(prompt) -> Observation      step(text, token_ids) -> Observation | Answer | score

A verifier is like a session of one step. Sessions run in worker processes, which enforce a time
limit on each call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from megarl.types import Prompt


@dataclass(frozen=True, slots=True)
class Observation:
    """What a session's `start` and `step` return while the rollout goes on: `text`, which the model
    reads next, and `reward` (default 0) for the model's turn before, which is added to the
    rollout's score.
    """

    text: str
    """The text; without `role`, including the chat template's markup. It is tokenised without
    adding special tokens. It may be empty only at the start, where it means no observation."""
    reward: float = 0.0
    """Reward for the turn that the observation replies to. The rewards of all turns add up with the
    score at the end."""
    role: Literal["", "user"] = ""
    """"user", of an observation of `step`: where prompts are chats (`prompts.template: chat`), the
    text becomes a turn of the user in the markup of the chat template. Empty: the text as it is."""
    follows: int | None = None
    """Which segment of the rollout the text continues, for an environment whose conversations
    branch: a number from 0 in the order of time, where the observation of `start` is segment 0
    unless it is empty, and the model's turns and the observations follow in turn. None: the model's
    newest turn. -1: none, the text begins a conversation of its own, without the prompt. With a
    number the text may be empty: the model answers once more after that segment."""
    max_tokens: int = 0
    """Most tokens of the model's next turn; 0: no limit but the rollout's."""


@dataclass(frozen=True, slots=True)
class AgentObservation(Observation):
    """The observation of an agent's session, which has tokenised the text itself."""

    token_ids: list[int] = field(default_factory=list)
    """[T] token ids of `text`."""
    stop: tuple[str, ...] = ()
    """Texts at which the model's next turn ends, beside those of the recipe."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a session's `step` returns to end the rollout if the recipe's verifier
    (`environment.verifier` or `environment.rewards`) is to score `text`. `metrics`: numbers of the
    session's own, by name.
    """

    text: str
    """The text that the verifier scores as the response."""
    metrics: dict[str, float] = field(default_factory=dict)
    """{name: number} of the session's own metrics."""


class Session(Protocol):
    """Interface of a user's class for a multi-turn environment, named in a recipe as
    `environment.session: path/to/file.py:Class`. One instance is made, without arguments, for each
    rollout: `start(prompt)` is called once, then `step` after each turn of the model until it ends
    the rollout. If a method raises or exceeds its time limit, only this rollout fails.

    Methods may be `async`; those of the sessions in one process run concurrently. Plain functions
    run on `environment.threads` threads of the process.
    """

    def start(self, prompt: Prompt) -> Any:
        """Called once, before the model's first turn. Return an `Observation`, which the model
        reads after the prompt; its text may be empty, its reward must be 0. Time limit:
        `environment.start_limit_s`.
        """
        ...

    def step(self, text: str, token_ids: np.ndarray) -> Any:
        """Called after each turn of the model with what the model wrote: `text`, decoded without
        special tokens (but with the tags of thinking) and without the token that ends the turn, and
        `token_ids`, [T] int32, as they were sampled, with all of these. Time limit:
        `environment.time_limit_s`.

        Return an `Observation`, after which the model continues; or what ends the rollout: an
        `Answer`, whose text the recipe's verifier scores, or a score from 0 (wrong) to 1 (right),
        as a number or a dict with `reward`.
        """
        ...


class Closing(Protocol):
    """Interface of a session class with a method `close`, which is optional, for sessions that hold
    something, such as a file or a process.
    """

    def close(self) -> Any:
        """Called once when the session's rollout has ended, however it ended, unless the worker
        process with the session ended before. An error in it is only printed.
        """
        ...
