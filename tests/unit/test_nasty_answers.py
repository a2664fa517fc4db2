"""Nasty answers to the verifier `math`: each gets its verdict in time, and none harms another's."""

from __future__ import annotations

import asyncio
import random

from support.environments import run
from support.nasty_answers import NASTY

from megarl.environments.scoring import Environment
from megarl.settings.environments import EnvironmentConfig
from megarl.types import Prompt, Verdict

LIMIT_S = 10.0
PLAIN = [("7", "so \\boxed{7}", True), ("7", "so \\boxed{8}", False), ("1/2", "#### 0.5", True)]
"""Asked between the nasty ones, of the same processes."""


def test_every_verdict_is_right_and_in_time() -> None:
    asked = [(name, *case) for name, case in NASTY.items()]
    asked += [("plain", *PLAIN[number % len(PLAIN)]) for number in range(len(NASTY))]
    random.Random(1).shuffle(asked)

    prompts = [(Prompt(0, "", [], answer), text) for _, answer, text, _ in asked]

    async def score(environment: Environment) -> list[Verdict]:
        return list(await asyncio.gather(*(environment.score(*one, 5, False) for one in prompts)))

    config = EnvironmentConfig(verifier="math", num_workers=2, time_limit_s=LIMIT_S)
    found = run(config, score, 240)
    assert [
        (name, verdict.failure, verdict.detail[:200], verdict.correct)
        for (name, _, _, right), verdict in zip(asked, found, strict=True)
        if verdict.failure or verdict.correct != right
    ] == []
