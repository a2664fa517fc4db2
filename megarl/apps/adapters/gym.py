"""Environments of gymnasium whose observations are texts, or are rendered as texts.

    prompts: {source: "gymnasium:FrozenLake-v1", arguments: {size: 64, render_mode: ansi}}
    environment: {session: gymnasium}

Actions are texts, or words for the actions of a discrete space.
"""

from __future__ import annotations

import re
from typing import Any

from megarl.apps.adapters.episodes import Episode, Reply, rows_of
from megarl.apps.adapters.packages import package
from megarl.settings.schema import require

COLOURED = re.compile(r"((?:\x1b\[[\d;]*m)+)(.*?)\x1b\[0m", re.DOTALL)
"""Characters that a rendering marks by a colour, such as where the player stands."""


class GymEpisode(Episode):
    """The session `gymnasium`. With `render_mode: ansi` in its settings an observation is its
    rendering, coloured characters in brackets; otherwise observations must be texts. An action is
    the model's whole turn if the action space holds texts. If it is discrete, the action is the
    last of the words `settings["actions"]` in the turn, or the last number without that setting.
    """

    kind = "gymnasium"
    fix = (
        "set the id of an environment with texts, its module before it if that registers it"
        " (MODULE:NAME-v0), and its settings in prompts.arguments"
    )

    _env: Any = None

    def open(self, name: str, settings: dict[str, Any]) -> None:
        """Raises `ValueError` if the actions are neither texts nor discrete."""
        library, options = package("gymnasium"), dict(settings)
        words = options.pop("actions", None)
        self._env = library.make(name, **options)
        space = self._env.action_space
        self._words: list[str] = []
        if isinstance(space, library.spaces.Discrete):
            self._first = int(space.start)
            numbers = range(self._first, self._first + int(space.n))
            self._words = [str(word).lower() for word in words or numbers]
            require(
                len(self._words) == len(numbers),
                f"prompts.arguments.actions has {len(self._words)} words for {space.n} actions",
            )
        else:
            is_text = isinstance(space, library.spaces.Text)
            require(is_text, f"its actions are {space}, neither texts nor discrete")
        listed = "|".join(map(re.escape, sorted(self._words, key=len, reverse=True)))
        self._known = re.compile(rf"(?<!\w)(?:{listed})(?!\w)")

    def reset(self, seed: int) -> str:
        return self._text(self._env.reset(seed=seed)[0])

    def turn(self, text: str) -> Reply:
        """A turn without an action changes nothing: the model reads what actions there are."""
        action: Any = text
        if self._words:
            actions = self._known.findall(text.lower())
            if not actions:
                return f"Write one of: {', '.join(self._words)}", 0.0, False
            action = self._first + self._words.index(actions[-1])
        seen, reward, is_ended, is_cut, _ = self._env.step(action)
        return self._text(seen), float(reward), bool(is_ended or is_cut)

    def _text(self, seen: Any) -> str:
        if self._env.render_mode == "ansi":
            seen = COLOURED.sub(r"[\2]", str(self._env.render())).strip()
        require(
            isinstance(seen, str),
            f"its observations are {type(seen).__name__}, not texts, and its render_mode is"
            f" {self._env.render_mode}, not ansi",
        )
        return seen

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def gym_rows(name: str, arguments: dict[str, Any], limit: int | None) -> list[dict[str, Any]]:
    """A row for each episode of environment `name` of gymnasium. `arguments`: `size`, `seed`,
    `actions` (words for discrete actions) and what `gymnasium.make` takes. Raises `ValueError` if
    the package is missing, or the environment unknown or not one of texts.
    """
    return rows_of(GymEpisode, name, arguments, limit)


def gym_sessions() -> type[Episode]:
    """The class of the session `gymnasium`. Raises `ValueError` if the package is missing."""
    package("gymnasium")
    return GymEpisode
