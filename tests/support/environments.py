"""Responses scored by an environment in its worker processes, all within a deadline."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from megarl.environments.codec import Codec
from megarl.environments.scoring import Environment
from megarl.environments.verifiers import load_verifier
from megarl.settings.environments import EnvironmentConfig
from megarl.types import Prompt, Verdict

T = TypeVar("T")
PROMPT = Prompt(index=0, text="3+4=", token_ids=[1], answer="7")


@asynccontextmanager
async def opened(
    config: EnvironmentConfig, codec: Codec | None = None
) -> AsyncIterator[Environment]:
    """An environment, which is closed at the end."""
    environment = Environment(config, codec)
    try:
        yield environment
    finally:
        await environment.close()
        await environment.close()  # nothing is left to do


def run(
    config: EnvironmentConfig,
    use: Callable[[Environment], Awaitable[T]],
    within_s: float = 60.0,
    codec: Codec | None = None,
) -> T:
    """Use an environment and close it, all within `within_s` seconds."""

    async def whole() -> T:
        async with opened(config, codec) as environment:
            return await use(environment)

    return asyncio.run(asyncio.wait_for(whole(), within_s))


def ask(
    config: EnvironmentConfig, answer: str, response: str, text: str = "", **fields: Any
) -> Any:
    """What the verifier of `config` returns, called here."""
    verify: Any = load_verifier(config)

    async def whole() -> Any:
        found = verify(Prompt(4, text, [], answer, fields), response)
        return await found if inspect.isawaitable(found) else found

    return asyncio.run(whole())


def together(config: EnvironmentConfig, *texts: str, prompt: Prompt = PROMPT) -> list[Verdict]:
    """The verdict on each response, all asked for at once."""

    async def use(environment: Environment) -> list[Verdict]:
        asked = [environment.score(prompt, text, 5, False) for text in texts]
        return await asyncio.gather(*asked)

    return run(config, use)


def verdicts(config: EnvironmentConfig, *texts: str, prompt: Prompt = PROMPT) -> list[Verdict]:
    """The verdict on each response, asked one after the other."""

    async def use(environment: Environment) -> list[Verdict]:
        return [await environment.score(prompt, text, 5, False) for text in texts]

    return run(config, use)
