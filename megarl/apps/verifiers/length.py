"""The verifier `length`: rewards that depend on how long a response is."""

from __future__ import annotations

import inspect
import math
from typing import Any

from megarl.environments.config import EnvironmentConfig
from megarl.environments.response_text import Counted, row_value
from megarl.environments.scores import read_score
from megarl.environments.verifier_config import LengthConfig
from megarl.environments.verifiers import VERIFIERS, Verifier, built_in
from megarl.schema import require
from megarl.types import Prompt


def linear(config: LengthConfig, length: int) -> float:
    """1 up to `shortest`, then falling linearly to 0 at `longest`; 0 beyond."""
    beyond = (length - config.shortest) / (config.longest - config.shortest)
    return 1.0 - min(1.0, max(0.0, beyond))


def cosine(config: LengthConfig, length: int, correct: bool) -> float:
    """The cosine reward of arXiv:2502.03373: half a period of a cosine from the reward of length 0
    (`correct_start` or `wrong_start`) to that of `longest` (`correct_end` or `wrong_end`);
    `exceeded` for `longest` or more.
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
    """The reward of L1-Exact (arXiv:2503.04697): 1 if correct, minus alpha x |target - length|."""
    return float(correct) - config.alpha * abs(target - length)


def l1_max(config: LengthConfig, length: int, correct: bool, target: int) -> float:
    """The reward of L1-Max (arXiv:2503.04697): alpha x (target - length) + delta, cut to the range
    from 0 to 1, if correct; 0 otherwise.
    """
    return float(correct) * min(1.0, max(0.0, config.alpha * (target - length) + config.delta))


def length_reward(config: EnvironmentConfig) -> Verifier:
    """The verifier `length`. Another verifier of the house, `length.verifier`, says whether a
    response is correct.
    """
    own = config.length
    require(
        own.kind == "linear" or own.verifier in VERIFIERS,
        f"length.verifier is '{own.verifier}'; set one of the verifiers of the house:"
        f" {', '.join(VERIFIERS)}",
    )
    judge = None if own.kind == "linear" else built_in(own.verifier, config)

    async def verify(prompt: Prompt, response: str) -> Any:
        length = counted(own, response)
        if judge is None:
            return linear(own, length)
        answer: Any = judge(prompt, response)
        score = read_score(await answer if inspect.isawaitable(answer) else answer)
        correct = score.reward == 1.0 if score.correct is None else score.correct
        if own.kind == "cosine":
            reward = cosine(own, length, correct)
        else:
            form = l1_exact if own.kind == "l1_exact" else l1_max
            reward = form(own, length, correct, target_of(own, prompt))
        return {"reward": reward, "correct": correct, "length": length}

    return verify


def counted(config: LengthConfig, response: str) -> int:
    """Length of the response in `length.unit`. Raises `ValueError` if the tokens are not known."""
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
    """The target length of a prompt. Raises `ValueError` if its row holds no whole number."""
    if not config.target_column:
        return config.target
    value = row_value(prompt, config.target_column, "length.target_column")
    require(
        isinstance(value, int) and not isinstance(value, bool) and value > 0,
        f"row {prompt.index} of the data has the target length {value!r:.80} (column"
        f" '{config.target_column}'); set a whole number above 0",
    )
    return value
