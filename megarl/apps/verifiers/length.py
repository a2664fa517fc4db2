"""The verifier `length`: rewards that depend on how long a response is, in tokens or characters."""

from __future__ import annotations

import math
from typing import Any

from megarl.environments.response_text import Counted, row_value
from megarl.environments.scores import read_score
from megarl.environments.verifiers import VERIFIERS, Verifier, built_in
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.schema import require
from megarl.settings.verifiers import LengthConfig
from megarl.types import Prompt


def linear_penalty(config: LengthConfig, length: int) -> float:
    """Reward, 0 to 1, of a response of `length` (in the recipe's unit, tokens or characters): 1 up
    to `config.shortest`, then falling linearly to 0 at `config.longest`; 0 beyond.
    """
    beyond = (length - config.shortest) / (config.longest - config.shortest)
    return 1.0 - min(1.0, max(0.0, beyond))


def cosine(config: LengthConfig, length: int, correct: bool) -> float:
    """The cosine reward of arXiv:2502.03373: half a period of a cosine from the reward of length 0
    (`correct_start`, or `wrong_start` for a response that is not `correct`) to that of `longest`
    (`correct_end` or `wrong_end`); `exceeded` for a length of `longest` or more.
    """
    if length >= config.longest:
        return config.exceeded
    start, end = (
        (config.correct_start, config.correct_end)
        if correct
        else (config.wrong_start, config.wrong_end)
    )
    return end + (start - end) * (1 + math.cos(math.pi * length / config.longest)) / 2


def l1_exact(config: LengthConfig, length: int, correct: bool, target: int) -> float:
    """The reward of L1-Exact (arXiv:2503.04697): 1 if `correct`, else 0, minus `config.alpha` x
    |target - length|.
    """
    return float(correct) - config.alpha * abs(target - length)


def l1_max(config: LengthConfig, length: int, correct: bool, target: int) -> float:
    """The reward of L1-Max (arXiv:2503.04697): `config.alpha` x (target - length) + `config.delta`,
    cut to the range from 0 to 1, if `correct`; 0 otherwise.
    """
    return float(correct) * min(1.0, max(0.0, config.alpha * (target - length) + config.delta))


def length_reward(config: EnvironmentConfig) -> Verifier:
    """Make the verifier `length` from the recipe: an async function (prompt, response) that returns
    a reward from the length of the response. For `kind: linear` it returns a number, otherwise a
    dict {reward, correct, length}, where another built-in verifier, `length.verifier`, says whether
    the response is correct. Raises `ValueError` if there is no such verifier.
    """
    settings = config.length
    require(
        settings.kind == "linear" or settings.verifier in VERIFIERS,
        f"length.verifier is '{settings.verifier}'; set one of the verifiers of the house:"
        f" {', '.join(VERIFIERS)}",
    )
    judge = None if settings.kind == "linear" else built_in(settings.verifier, config)

    async def verify(prompt: Prompt, response: str) -> Any:
        length = counted(settings, response)
        if judge is None:
            return linear_penalty(settings, length)
        score = read_score(await judge(prompt, response))
        correct = score.reward == 1.0 if score.correct is None else score.correct
        if settings.kind == "cosine":
            reward = cosine(settings, length, correct)
        else:
            form = l1_exact if settings.kind == "l1_exact" else l1_max
            reward = form(settings, length, correct, target_of(settings, prompt))
        return {"reward": reward, "correct": correct, "length": length}

    return verify


def counted(config: LengthConfig, response: str) -> int:
    """Length of the response in `config.unit`, "tokens" or "characters". Raises `ValueError` if the
    unit is tokens and `response` is a plain `str`, not a `Counted`, the subclass with the number of
    tokens that the model generated.
    """
    if config.unit == "characters":
        return len(response)
    require(
        isinstance(response, Counted),
        "length.unit is 'tokens', but the response came as text without token ids, as to a reward"
        " server; set length.unit to 'characters'",
    )
    assert isinstance(response, Counted)
    return response.num_tokens


def target_of(config: LengthConfig, prompt: Prompt) -> int:
    """The target length of a prompt: `config.target`, or the number in the column
    `config.target_column` of the prompt's row. Raises `ValueError` if that is no whole number above
    0.
    """
    if not config.target_column:
        return config.target
    value = row_value(prompt, config.target_column, "length.target_column")
    require(
        isinstance(value, int) and not isinstance(value, bool) and value > 0,
        f"row {prompt.index} of the data has the target length {value!r:.80} (column"
        f" '{config.target_column}'); set a whole number above 0",
    )
    return value
