"""The verifier is called on rows of the data before a run starts: one that fails for every response
would give rewards that say nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data.chat_template import Variables
from megarl.data.source import PromptList
from megarl.environments.codec import Codec
from megarl.environments.response_text import without_opening
from megarl.environments.scoring import Environment
from megarl.environments.verifiers import own_files, setting_of
from megarl.parallel import launcher
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.schema import require
from megarl.system import console
from megarl.system.lookup import of_app
from megarl.types import Prompt, Segment, TokenArrays, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_ROWS = 32
"""Rows, in training order, on which the verifier is tried."""

LEAST_ROWS = 4
"""After so many rows, none is begun if those after the first have taken 2 s, nor after a time-out.
"""


def try_verifier(
    config: EnvironmentConfig,
    prompts: PromptList,
    tokenizer: PreTrainedTokenizerBase,
    variables: Variables | None = None,
    *,
    chats: bool = False,
) -> None:
    """Try the verifier, or each one of `environment.mixture`, on some rows, with the reference
    answer as the response; of a session or tools its first step. `variables`: that the chat
    template reads besides. `chats`: prompts are chats.

    Raises `ValueError` with the first failure if at least `environment.max_failure_share` of a
    verifier's calls fail. Scores do not matter, but `math` must find reference answers equal to
    themselves.
    """
    chats = chats and bool(config.session)
    codec = Codec.of(
        tokenizer,
        whole=config.needs_template,
        variables=variables,
        chats=chats,
        allows_control=config.control_tokens,
    )
    tried = asyncio.run(_try(config, prompts, codec))
    for name in dict.fromkeys(prompt.environment for prompt, _ in tried):
        section, key = config, "environment"
        if config.mixture and not config.has_sessions:
            section, key = config.named_parts[name], f"environment.mixture.{name}"
        calls = [(prompt, verdict) for prompt, verdict in tried if prompt.environment == name]
        failed = [(prompt, verdict) for prompt, verdict in calls if verdict is not None]
        setting = setting_of(section).removeprefix("environment.")
        several = section.tools.functions or section.tools.servers or section.rewards
        agent = section.agent.function or " ".join(section.agent.command)
        named = section.session or agent or ", ".join(several) or section.verifier
        for prompt, verdict in failed[:1]:
            detail = " ".join((verdict.detail or verdict.failure).split())
            require(
                len(failed) < max(1.0, config.max_failure_share * len(calls)),
                f"{key}.{setting} '{named}' failed for {len(failed)} of {len(calls)} rows on"
                f" which it was tried, first for row {prompt.index}: {detail}; mend it, or set"
                " another",
            )


def rows_to_try(prompts: PromptList) -> list[Prompt]:
    """About 32 prompts: the first in training order, or of each verifier of a mixture in turn."""
    if not prompts.environments:
        return [prompts.at(ordinal) for ordinal in range(min(MOST_ROWS, len(prompts)))]
    by_name: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_name.setdefault(prompt.environment, []).append(prompt)
    turns = itertools.zip_longest(*(rows[:MOST_ROWS] for rows in by_name.values()))
    rows = [prompt for turn in turns for prompt in turn if prompt is not None]
    return rows[: max(MOST_ROWS, LEAST_ROWS * len(by_name))]


async def _try(
    config: EnvironmentConfig, prompts: PromptList, codec: Codec
) -> list[tuple[Prompt, Verdict | None]]:
    """(prompt, verdict if the call failed) of each call."""
    environment, until = Environment(config, codec), 0.0
    tried: list[tuple[Prompt, Verdict | None]] = []
    least = LEAST_ROWS * max(1, len(config.mixture))
    is_math = {name: section.verifier == "math" for name, section in config.named_parts.items()}
    try:
        await environment.start()
        for prompt in rows_to_try(prompts):
            if len(tried) >= least and time.monotonic() > until:
                break
            whether = is_math.get(prompt.environment, config.verifier == "math")
            result = await _call(environment, prompt, is_math=whether)
            failed = result if isinstance(result, Verdict) and result.failure else None
            tried.append((prompt, failed))
            if len(tried) == 1:  # which imports what the verifier needs
                until = time.monotonic() + 2.0
            if failed and failed.failure == "timeout":
                break
    finally:
        await environment.close()
    return tried


async def _call(
    environment: Environment, prompt: Prompt, *, is_math: bool
) -> Segment | Verdict | None:
    """One call of the verifier, or the first two of a session. `is_math`: a reference that does not
    equal itself is a failure.
    """
    if not environment.has_start:
        marked = prompt.answer
        if is_math and of_app("final_expression")(marked) is None:
            marked = f"\\boxed{{{marked}}}"
        written = without_opening(prompt, environment.thinking)
        verdict = await environment.score(written, marked, 0, False)
        if is_math and not (verdict.failure or verdict.correct):
            detail = (
                f"the reference answer {prompt.answer!r:.200} is not mathematics: it does not equal"
                " itself; set environment.verifier to 'exact_match' or to a function of your own"
            )
            return replace(verdict, failure="error", detail=detail)
        return verdict
    key = f"trial {prompt.index}"
    begun = await environment.begin(key, prompt)
    if isinstance(begun, Verdict):
        return begun
    tokens = np.asarray(prompt.token_ids, dtype=np.int32)
    arrays = TokenArrays(tokens, np.zeros(len(tokens), dtype=np.float32))
    response = Segment("model", len(tokens), arrays, finish="stop")
    answer = await environment.step(key, prompt, response, num_tokens=len(tokens))
    if isinstance(answer, Segment):
        await environment.cut_off(key, 0)
    return answer


def check_verifier(config: EnvironmentConfig) -> list[dict[str, Any]]:
    """Raise `ValueError` unless verifier, session or tools can be loaded in a worker process.
    Returns the tools in OpenAI's format.
    """
    if config.programs:
        of_app("say_protection")(config)

    async def load_once() -> list[dict[str, Any]]:
        environment = Environment(config)
        try:
            # What is built in ends; how long a user's file takes, only the user knows.
            files = own_files(config) and not config.tools.servers
            await environment.start(within_s=config.load_limit_s if files else None)
            for name, form in environment.forms.items() if launcher.rank() == 0 else ():
                console.say(f"{setting_of(config)}: {name} is called in the form of {form}")
            return environment.tools
        finally:
            await environment.close()

    return asyncio.run(load_once())
