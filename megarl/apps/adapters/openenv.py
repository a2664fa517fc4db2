"""Environments behind an OpenEnv server, over its own client.

    prompts: {source: "openenv:http://127.0.0.1:8000", arguments: {action: a, observation: b}}
    environment: {session: openenv}

Every rollout has a connection, and an environment of the server, of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from megarl.apps.adapters.episodes import begun, episode_of, replied, row, seeds
from megarl.apps.adapters.packages import package
from megarl.environments.session import Observation
from megarl.settings.limits import POLL_S
from megarl.settings.schema import require
from megarl.types import Prompt

FULL, CLOSED = "CAPACITY_REACHED", "ConnectionClosed"
"""How such a server answers, and the error if it has closed the connection meanwhile."""
ROWS_WITHIN_S = 300.0
"""Seconds within which the first observations of all episodes must be there."""


class OpenEnvEpisode:
    """The session `openenv`: plays the episode of its prompt on the prompt's server."""

    _client: Any = None

    def open(self, address: str, settings: dict[str, Any]) -> None:
        """Make the client of the server at `address`. `settings`: `action`, the field of an action
        that takes the model's text; `observation`, the field of an observation that the model
        reads; and any others, which each `reset` is given. Raises `ValueError` if a field is
        missing.
        """
        self._address, self._reset = address, dict(settings)
        fields = [self._reset.pop(key, "") for key in ("action", "observation")]
        require(
            all(isinstance(one, str) and one for one in fields),
            "prompts.arguments.action or prompts.arguments.observation is missing; set them to the"
            " names of the fields that hold the texts of an action and of an observation, as in"
            f" {address}/schema",
        )
        self._action, self._observation = fields
        self._client = self._new()

    def _new(self) -> Any:
        # In this mode servers that have agents call tools still take `reset` and `step`.
        library = package("openenv")
        return library.GenericEnvClient(base_url=self._address, mode="simulation")

    async def reset(self, seed: int) -> str:
        """Begin the episode of this seed and return the first observation; waits while the server
        has no room for another environment. Raises `ValueError` if it cannot be reached.
        """
        while True:
            try:
                await self._client.connect()
                return self._text(await self._client.reset(seed=seed, **self._reset))
            except ConnectionError as error:
                raise ValueError(
                    f"no OpenEnv server answers at {self._address}: {error}; start it, or correct"
                    " prompts.source"
                ) from error
            except Exception as error:  # a full server says so, or has closed the connection
                if FULL not in str(error) and not type(error).__name__.startswith(CLOSED):
                    raise
            await self._client.close()
            self._client = self._new()
            await asyncio.sleep(POLL_S)  # until another environment has ended

    def _text(self, result: Any) -> str:
        seen = result.observation.get(self._observation)
        texts = [key for key, value in result.observation.items() if isinstance(value, str)]
        require(
            isinstance(seen, str),
            f"an observation of {self._address} has no text '{self._observation}'; set"
            f" prompts.arguments.observation to one of: {', '.join(texts) or '(none)'}",
        )
        return seen

    async def start(self, prompt: Prompt) -> Observation:
        """Begin the episode. Raises `ValueError` if the server cannot be reached or ignores the
        seed.
        """
        address, settings, seed = episode_of(prompt, "openenv")
        self.open(address, settings)
        return begun(prompt, await self.reset(seed))

    async def step(self, text: str, token_ids: np.ndarray) -> Observation | float:
        """Take the model's turn. Raises what the server answers with."""
        result = await self._client.step({self._action: text})
        return replied(self._text(result), float(result.reward or 0.0), bool(result.done))

    async def close(self) -> None:
        """Close the connection, and with it the server's environment."""
        if self._client is not None:
            await self._client.close()


def openenv_rows(
    address: str, arguments: dict[str, Any], limit: int | None
) -> list[dict[str, Any]]:
    """A row for each episode of the environment at `address`, http://host:port. `arguments`:
    `size`, `seed`, `action`, `observation`, and what else `reset` takes. Asks the server for the
    first observation of each. Raises `ValueError` if the package is missing or the server cannot
    be reached.
    """
    numbers, settings = seeds(arguments, limit)

    async def firsts() -> list[dict[str, Any]]:
        episode = OpenEnvEpisode()
        episode.open(address, settings)
        try:
            async with asyncio.timeout(ROWS_WITHIN_S):
                return [row(address, settings, seed, await episode.reset(seed)) for seed in numbers]
        except TimeoutError:
            raise ValueError(
                f"openenv:{address} did not begin {len(numbers)} episodes within"
                f" {ROWS_WITHIN_S:g} s; let its server hold more environments at a time"
                " (max_concurrent_envs), or lower prompts.arguments.size"
            ) from None
        finally:
            await episode.close()

    return asyncio.run(firsts())


def openenv_sessions() -> type[OpenEnvEpisode]:
    """The class of the session `openenv`. Raises `ValueError` if the package is missing."""
    _ = package("openenv").GenericEnvClient  # imported here, since it takes seconds
    return OpenEnvEpisode
