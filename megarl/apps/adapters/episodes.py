"""What the adapters of environments of several turns have in common: an episode is an environment's
name, its settings and a seed. Its first observation is the prompt; a session plays it on.

    NAME, {size, seed, settings} --rows_of--> rows --Episode.start, step--> replies
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from megarl.apps.adapters.packages import package
from megarl.environments.session import Observation
from megarl.settings.schema import require
from megarl.system.third_party import opening
from megarl.types import Prompt

SIZE, SEED = 100, 0
"""Number of episodes, and seed of the first, where the recipe has none."""
Reply = tuple[str, float, bool]
"""(what the model reads, reward of its turn, whether the episode is over)"""


def seeds(arguments: dict[str, Any], limit: int | None) -> tuple[range, dict[str, Any]]:
    """Split `prompts.arguments`: (seeds of the episodes, the other arguments, which are settings of
    the environment). Raises `ValueError` if `size` or `seed` is not a whole number from 0.
    """
    rest = dict(arguments)
    size, seed = rest.pop("size", SIZE), rest.pop("seed", SEED)
    for key, value in {"size": size, "seed": seed}.items():
        require(
            type(value) is int and value >= 0,
            f"prompts.arguments.{key} is {value!r}; set it to a whole number from 0",
        )
    return range(seed, seed + (size if limit is None else min(size, limit))), rest


def row(name: str, settings: dict[str, Any], seed: int, first: str) -> dict[str, Any]:
    """The prompt's row of an episode. No verifier reads its answer, which tells episodes apart."""
    episode = {"name": name, "settings": settings, "seed": seed}
    return {"prompt": first, "answer": f"episode {seed}", "episode": episode}


def episode_of(prompt: Prompt, kind: str) -> tuple[str, dict[str, Any], int]:
    """(name, settings, seed) of a prompt's episode. Raises `ValueError` if `row` has not made the
    prompt's row.
    """
    episode: Any = prompt.fields.get("episode")
    require(
        isinstance(episode, dict),
        f"row {prompt.index} is no episode; set prompts.source to {kind}:NAME, or"
        " environment.session to another",
    )
    return episode["name"], episode["settings"], episode["seed"]


def begun(prompt: Prompt, first: str) -> Observation:
    """What a session's `start` returns. Raises `ValueError` if `first`, the first observation, is
    not that of the prompt, so that the rollouts of a group could not be compared.
    """
    require(
        first == prompt.fields["prompt"],
        "the environment began with another observation than when the prompts were made:"
        f" {first!r:.200}; use one that begins alike with the same seed",
    )
    return Observation("")


def replied(observation: str, reward: float, is_over: bool) -> Observation | float:
    """What a session's `step` returns: the last reward if the episode is over, otherwise the
    observation as a turn of the user.
    """
    # Not an empty text, of which the model could not tell whose turn it is.
    return reward if is_over else Observation(observation or "\n", reward, role="user")


class Episode(ABC):
    """A session that plays the episode of its prompt in an environment of this process."""

    kind = ""
    """What stands before the colon of `prompts.source`."""
    fix = ""
    """What the user should set instead of an environment that cannot be played."""

    @abstractmethod
    def open(self, name: str, settings: dict[str, Any]) -> None:
        """Make the environment `name` with its `settings`."""

    @abstractmethod
    def reset(self, seed: int) -> str:
        """Begin the episode of this seed; returns the first observation."""

    @abstractmethod
    def turn(self, text: str) -> Reply:
        """Take the turn `text` of the model; returns (observation, reward, whether it is over)."""

    def start(self, prompt: Prompt) -> Observation:
        """Begin the episode. Raises what the environment raises."""
        name, settings, seed = episode_of(prompt, self.kind)
        self.open(name, settings)
        return begun(prompt, self.reset(seed))

    def step(self, text: str, token_ids: np.ndarray) -> Observation | float:
        """Take the model's turn. Raises what the environment raises."""
        return replied(*self.turn(text))

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free what the environment holds."""


def rows_of(
    kind: type[Episode], name: str, arguments: dict[str, Any], limit: int | None
) -> list[dict[str, Any]]:
    """A row for each episode of environment `name`: `arguments` are size, seed and settings. Raises
    `ValueError` if the package is missing, or it cannot be made or begun.
    """
    package(kind.kind)
    numbers, settings = seeds(arguments, limit)
    with opening(f"{kind.kind}:{name} cannot be begun with {settings}", fix=kind.fix):
        episode = kind()
        episode.open(name, settings)
        try:
            return [row(name, settings, seed, episode.reset(seed)) for seed in numbers]
        finally:
            episode.close()
