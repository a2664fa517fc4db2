"""The verifier is called on rows of the data before a run starts: one that fails for every response
would give rewards that say nothing.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np

from megarl.data.source import PromptList
from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.environments.mathematics import final_expression
from megarl.environments.scoring import Environment
from megarl.schema import require
from megarl.types import Prompt, Segment, TokenArrays, Verdict

MOST_ROWS = 32
"""Number of rows, in training order, on which the verifier is tried."""

LEAST_ROWS, ENOUGH_S = 4, 2.0
"""After so many rows, none is begun if those after the first have taken so many seconds. A single
call is bounded by the time limits of `EnvironmentConfig`; after a time-out none is begun."""


def try_verifier(config: EnvironmentConfig, prompts: PromptList, codec: Codec) -> None:
    """Call the verifier with some rows and their reference answers as responses, or begin a session
    and take a step.

    Raises `ValueError` with the first failure's message if at least `environment.max_failure_share`
    of the calls fail. Which score they give does not matter, except that `math` must find every
    reference answer equal to itself.
    """
    failed, count = asyncio.run(_try(config, prompts, codec))
    if not failed:
        return
    prompt, verdict = failed[0]
    setting = "session" if config.session else "rewards" if config.rewards else "verifier"
    named = config.session or ", ".join(config.rewards) or config.verifier
    said = " ".join((verdict.detail or verdict.failure).split())
    require(
        len(failed) < max(1.0, config.max_failure_share * count),
        f"environment.{setting} '{named}' failed for {len(failed)} of {count} rows on which it was"
        f" tried, first for row {prompt.index}: {said}; mend it, or set another",
    )


async def _try(
    config: EnvironmentConfig, prompts: PromptList, codec: Codec
) -> tuple[list[tuple[Prompt, Verdict]], int]:
    """(prompts of failed calls with their verdicts, number of calls)."""
    environment, failed, count, until = Environment(config, codec), [], 0, 0.0
    try:
        await environment.start()
        for ordinal in range(min(MOST_ROWS, len(prompts))):
            if count >= LEAST_ROWS and time.monotonic() > until:
                break
            prompt = prompts.at(ordinal)
            found = await _call(environment, prompt, is_math=config.verifier == "math")
            count += 1
            if count == 1:  # which imports what the verifier needs
                until = time.monotonic() + ENOUGH_S
            if isinstance(found, Verdict) and found.failure:
                failed.append((prompt, found))
                if found.failure == "timeout":
                    break
    finally:
        await environment.close()
    return failed, count


async def _call(
    environment: Environment, prompt: Prompt, *, is_math: bool
) -> Segment | Verdict | None:
    """One call of the verifier, or the first two of a session. `is_math`: the verifier is `math`,
    for which a reference that does not equal itself is a failure.
    """
    if not environment.has_start:
        marked = prompt.answer
        if is_math and final_expression(marked) is None:
            marked = f"\\boxed{{{marked}}}"
        found = await environment.score(prompt, marked, 0, False)
        if is_math and not (found.failure or found.correct):
            detail = (
                f"the reference answer {prompt.answer!r:.200} is not mathematics: it does not equal"
                " itself; set environment.verifier to 'exact_match' or to a function of your own"
            )
            return replace(found, failure="error", detail=detail)
        return found
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
