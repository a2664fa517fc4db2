"""Games of textarena for one player.

    prompts: {source: "textarena:GuessTheNumber-v0", arguments: {size: 200, seed: 1}}
    environment: {session: textarena}

Games for several players, and those that download lists of words, cannot be played.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

from megarl.apps.adapters.episodes import Episode, Reply, rows_of
from megarl.apps.adapters.packages import package

TURN = threading.Lock()
"""Held by the game that draws from the random numbers of the process."""


class ArenaEpisode(Episode):
    """The session `textarena`: a game played by one player without wrappers: the model's turn is
    taken as it is, and an observation holds what the game has said since the turn before. The
    reward is the game's own, at the end of an episode. Games draw from the random numbers of the
    whole process; each keeps a state of its own, so that it does not depend on those played beside
    it.
    """

    kind = "textarena"
    fix = (
        "set the id of a game for one player, such as GuessTheNumber-v0, and its settings in"
        " prompts.arguments"
    )

    def open(self, name: str, settings: dict[str, Any]) -> None:
        self._library = package("textarena")
        self._state: Any = None
        self._env = self._library.make(f"{name.removesuffix('-raw')}-raw", **settings)

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        with TURN:
            outer = random.getstate()
            if self._state is not None:
                random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(outer)

    def reset(self, seed: int) -> str:
        with self._drawing():
            self._env.reset(num_players=1, seed=seed)
            return self._heard()

    def turn(self, text: str) -> Reply:
        with self._drawing():
            is_over, _ = self._env.step(text)
            if not is_over:
                return self._heard(), 0.0, False
            rewards, _ = self._env.close()
            return "", float(rewards[0]), True

    def _heard(self) -> str:
        action = self._library.core.ObservationType.PLAYER_ACTION
        _, messages = self._env.get_observation()
        return "\n".join(text for _, text, kind in messages if kind is not action)


def arena_rows(name: str, arguments: dict[str, Any], limit: int | None) -> list[dict[str, Any]]:
    """A row for each episode of game `name` of textarena. `arguments`: `size`, `seed` and the
    game's own settings. Raises `ValueError` if the package is missing or the game unknown.
    """
    return rows_of(ArenaEpisode, name, arguments, limit)


def arena_sessions() -> type[Episode]:
    """The class of the session `textarena`. Raises `ValueError` if the package is missing."""
    package("textarena")
    return ArenaEpisode
