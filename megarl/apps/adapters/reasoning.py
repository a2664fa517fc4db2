"""Data sets of reasoning_gym: problems made by a program, with a scorer of their own.

    prompts: {source: "reasoning_gym:chain_sum", arguments: {size: 500, seed: 1, min_terms: 2}}
    environment: {verifier: reasoning_gym}

Problem n of a data set depends on the data set's settings, its seed and n alone. A row therefore
names the problem, and a worker process makes it again to have it scored.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from megarl.apps.adapters.packages import PINNED, package
from megarl.environments.response_text import after_last
from megarl.environments.verifiers import Verifier
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.schema import require
from megarl.system.third_party import opening
from megarl.types import Prompt

USUAL = {"size": 500, "seed": 0}
"""Arguments of a data set that the recipe leaves out; reasoning_gym would draw a seed."""
UNSAID = "(several answers may be right)"
"""Reference answer of a problem that comes without one."""


def reasoning_rows(name: str, arguments: dict[str, Any], limit: int | None) -> list[dict[str, Any]]:
    """Make the first `limit` problems, or all (None), of the data set `name` of reasoning_gym.
    `arguments`: its settings, with `size` (default 500) and `seed` (default 0). Returns a row for
    each: {prompt, answer, reasoning_gym: what `verifier` needs}. Raises `ValueError` if the package
    is missing, or the data set or a setting unknown.
    """
    package("reasoning_gym")
    settings = json.dumps(USUAL | arguments)
    rows: list[dict[str, Any]] = []
    with opening(
        f"reasoning_gym:{name} with the arguments {settings} cannot be made",
        fix=f"set the name and settings of a data set of {' '.join(PINNED['reasoning_gym'])}",
    ):
        size = len(_data_set(name, settings))
        for number in range(size if limit is None else min(size, limit)):
            entry = _entry(name, settings, number)
            answer = entry["answer"] if isinstance(entry["answer"], str) else ""
            task = {"name": name, "settings": settings, "number": number}
            rows.append(
                {
                    "prompt": entry["question"],
                    "answer": answer.strip() or UNSAID,
                    "reasoning_gym": task,
                }
            )
    return rows


@functools.lru_cache(64)
def _data_set(name: str, settings: str) -> Any:
    return package("reasoning_gym").create_dataset(name, **json.loads(settings))


@functools.lru_cache(1024)
def _entry(name: str, settings: str, number: int) -> dict[str, Any]:
    """Problem `number` of a data set; of rare ones making it takes a second."""
    return _data_set(name, settings)[number]


def verifier(config: EnvironmentConfig) -> Verifier:
    """Make the built-in verifier `reasoning_gym`: (prompt, response) -> {reward: score that the
    prompt's data set gives, mostly from 0 to 1, scorer_errors}. The answer is the text after the
    last `config.answer_after`; without that setting, what the last <answer>...</answer> holds, or
    else the whole response. A response at which the scorer raises is worth 0, and counts in
    `scorer_errors`. Raises `ValueError` if the package is missing.
    """
    extract = package("reasoning_gym").utils.extract_answer

    async def verify(prompt: Prompt, response: str) -> dict[str, float]:
        task: Any = prompt.fields.get("reasoning_gym")
        require(
            isinstance(task, dict),
            f"row {prompt.index} is of no data set of reasoning_gym; set prompts.source to"
            " reasoning_gym:NAME, or environment.verifier to another",
        )
        if config.answer_after:
            answer = after_last(config.answer_after, response)
        else:
            answer = extract(response)
            answer = response.strip() if answer is None else answer
        name, settings = task["name"], task["settings"]
        entry = _entry(name, settings, task["number"])
        try:
            score = float(_data_set(name, settings).score_answer(answer, entry))
        except Exception:  # some scorers take for granted that an answer can be read
            return {"reward": 0.0, "scorer_errors": 1.0}
        return {"reward": score, "scorer_errors": 0.0}

    return verify
