"""A language model as a judge: reads prompt and response, writes verdicts, from which the score is
read.

    (prompt, response) --JudgePrompt--> token ids --engine--> token ids --VerdictReader--> score

Only what the engine has generated is searched for a verdict: one that stands in the response counts
for nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.apps.serve.judge_prompt import JudgePrompt, values
from megarl.apps.serve.judge_verdict import NoVerdict, VerdictReader
from megarl.environments.scores import DETAIL_CHARACTERS, Outcome, score_reply
from megarl.types import Prompt, Segment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.serve_config import JudgeConfig


class EngineJudge:
    """Judges responses with a generating engine."""

    def __init__(
        self,
        config: JudgeConfig,
        generate: Callable[..., Awaitable[Segment]],
        *,
        tokenizer: PreTrainedTokenizerBase,
        prompt: JudgePrompt,
        reader: VerdictReader,
        max_tokens: int,
    ) -> None:
        """`generate`: as `megarl.rollout.engine.Engine.generate`. `max_tokens`: most tokens of what
        the judge reads and writes together.
        """
        self._config, self._generate, self._tokenizer = config, generate, tokenizer
        self._prompt, self._reader, self._max_tokens = prompt, reader, max_tokens

    async def judge(self, prompt: Prompt, response: str) -> Outcome:
        """The mean of the verdicts on a response that can be read; a failure if there are none.
        With several samples, the metric `unread` is the share of the others. What the engine raises
        is raised.
        """
        config = self._config
        try:
            ids = self._prompt.ids(values(self._prompt.fields, prompt, response))
        except ValueError as error:
            return _failure(str(error))
        if len(ids) + config.max_new_tokens > self._max_tokens:
            return _failure(
                f"the judge would read {len(ids):,} tokens, and with judge.max_new_tokens"
                f" {config.max_new_tokens:,} they exceed judge.max_tokens {self._max_tokens:,}"
            )
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._verdict(ids, n)) for n in range(config.samples)]
        found, problems = list[float](), list[str]()
        for answer in (task.result() for task in asked):
            if isinstance(answer, NoVerdict):
                problems.append(str(answer))
            else:
                found.append(answer)
        if not found:
            return _failure(problems[0])
        score: dict[str, Any] = {"reward": sum(found) / len(found)}
        if config.samples > 1:
            score["unread"] = len(problems) / config.samples
        return Outcome(**score_reply(score))

    async def _verdict(self, ids: list[int], number: int) -> float | NoVerdict:
        """The score of verdict `number`, or why there is none."""
        config = self._config
        segment = await self._generate(
            ids,
            seed=seed_of(config.seed, ids, number),
            max_tokens=config.max_new_tokens,
            temperature=config.temperature,
        )
        if config.require_stop and segment.finish != "stop":
            return NoVerdict(
                f"the judge's text was cut off at judge.max_new_tokens {config.max_new_tokens};"
                " raise it, or set judge.require_stop to false if the verdict comes first"
            )
        written = self._tokenizer.decode(
            segment.arrays.token_ids.tolist(), skip_special_tokens=True
        )
        try:
            return self._reader.read(str(written))
        except NoVerdict as error:
            return error


def seed_of(seed: int, ids: list[int], number: int) -> int:
    """The seed of verdict `number` on a text: the same whenever the text is judged."""
    content = np.asarray([seed, number, *ids], dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little") >> 1


def _failure(said: str) -> Outcome:
    return Outcome(failure="error", detail=said[:DETAIL_CHARACTERS])
