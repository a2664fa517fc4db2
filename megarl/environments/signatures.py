"""The forms of a user's reward function, told apart by its parameters.

    megarl   f(prompt, response) -> number, dict or Score
    TRL      f(completions, **columns) or f(prompts, completions, **columns) -> list of rewards
    verl     f(data_source, solution_str, ground_truth, extra_info=None) -> number or {"score": ...}

A function in another library's form is called with one response at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.environments.scores import BadScore, as_number
from megarl.types import Prompt

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
RESPONSES = {
    *("response", "completion", "output", "solution", "solution_str", "prediction", "pred"),
    *("generated", "answer", "text", "candidate", "hypothesis"),
}
"""Names that a first parameter, which receives the prompt, must not have."""
PROMPTS = {"prompt", "question", "problem"}
REFERENCES = {"ground_truth", "truth", "reference", "gold", "label", "target", "expected", "answer"}
"""These and `PROMPTS` are names that a second parameter, which receives the response, must not
have. But `answer` behind one of `PROMPTS` is the model's."""
FORMS = (
    "f(prompt, response); TRL's f(completions, **columns) or f(prompts, completions, **columns); or"
    f" verl's f({', '.join(VERL)})"
)


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's reward function in a common form."""

    call: Callable[[Prompt, str], Any]
    """(prompt, response text) -> as `megarl.environments.verifiers.Verifier`."""
    form: str
    """Another library's form in words, such as "TRL's f(completions, ...)"; "" for megarl's own."""
    is_async: bool


def recognised(function: Callable[..., Any], name: str, setting: str) -> RewardFunction:
    """Wrap a user's function; nothing is called yet. Raises `ValueError` if its parameters fit none
    of the forms, or two. For that message: `name` is the function as the recipe writes it,
    `setting` the recipe's key.
    """
    is_async = inspect.iscoroutinefunction(function)
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a callable written in C
        return RewardFunction(function, "", is_async)
    takes = {key for key, p in parameters.items() if p.kind is not p.POSITIONAL_ONLY}
    is_trl, is_verl = "completions" in takes, "solution_str" in takes
    shown = f"{name} is defined as {name.rpartition(':')[2]}{inspect.signature(function)}"
    if is_trl and (is_verl or "response" in takes):
        raise ValueError(f"{setting}: {shown}, which names the response twice; write it as {FORMS}")
    if is_trl:
        return RewardFunction(_trl(function, parameters), "TRL's f(completions, ...)", is_async)
    if is_verl:
        others = [key for key in _required(parameters) if key not in VERL]
        if others:
            raise ValueError(
                f"{setting}: {shown}, which verl's form does not give {', '.join(others)}; give"
                " these parameters defaults"
            )
        form = "verl's f(data_source, solution_str, ...)"
        return RewardFunction(_verl(function, parameters), form, is_async)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        raise ValueError(
            f"{setting}: {shown}, but is called with (prompt, response); give it these two"
            f" parameters, or write it as {FORMS}"
        ) from None
    first, second = [*parameters, *["args"] * 2][:2]
    is_response = second not in PROMPTS | REFERENCES or (first in PROMPTS and second == "answer")
    if first in RESPONSES or not is_response:
        raise ValueError(
            f"{setting}: {shown}, but is called with (prompt, response), in this order; write it as"
            f" {FORMS}; prompt.answer is the reference answer"
        )
    return RewardFunction(function, "", is_async)


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in several
    ]


def _given(known: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    missing = [key for key in _required(parameters) if key not in known]
    if missing:
        raise BadScore(
            "error",
            f"the reward function has the parameter {missing[0]}, but the row has no such column;"
            f" it has {', '.join(known)}",
        )
    return dict(known) if takes_all else {key: known[key] for key in parameters if key in known}


def _trl(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]
) -> Callable[[Prompt, str], Any]:
    """A function in TRL's form. Prompt and completion are lists of messages where the row's column
    `prompt` or `messages` is, or `completions` is annotated with `dict`.
    """
    annotation = str(parameters["completions"].annotation)

    def call(prompt: Prompt, response: str) -> Any:
        columns = dict(prompt.fields)
        chats = [columns[key] for key in ("prompt", "messages") if _is_chat(columns.get(key))]
        asked: Any = prompt.text
        completion: Any = response
        if (chats or "dict" in annotation) and "list[str]" not in annotation.lower():
            asked = chats[0] if chats else [{"role": "user", "content": prompt.text}]
            completion = [{"role": "assistant", "content": response}]
        for key in ("prompt", "completion"):
            columns.pop(key, None)
        columns.setdefault("answer", prompt.answer)
        known = {key: [value] for key, value in columns.items()}
        known |= {"prompts": [asked], "completions": [completion]}
        return _then(function(**_given(known, parameters)), _only)

    return call


def _verl(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]
) -> Callable[[Prompt, str], Any]:
    """A function in verl's form. The reference answer is the row's `reward_model.ground_truth`, or
    else the recipe's.
    """

    def call(prompt: Prompt, response: str) -> Any:
        fields, truth = prompt.fields, prompt.answer
        model = fields.get("reward_model")
        if isinstance(model, Mapping) and "ground_truth" in model:
            truth = model["ground_truth"]
        source, more = fields.get("data_source", ""), fields.get("extra_info")
        known: dict[str, Any] = dict(zip(VERL, (source, response, truth, more), strict=True))
        return _then(function(**_given(known, parameters)), _scored)

    return call


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, Mapping) and "role" in turn for turn in value)
    )


def _then(answer: Any, read: Callable[[Any], Any]) -> Any:
    """`read` of what a function returned, which may be an awaitable."""
    if not inspect.isawaitable(answer):
        return read(answer)

    async def later() -> Any:
        return read(await answer)

    return later()


def _only(rewards: Any) -> Any:
    if isinstance(rewards, str | bytes | Mapping) or not hasattr(rewards, "__len__"):
        count = "no list"
    elif len(rewards) == 1:
        return rewards[0]
    else:
        count = f"{len(rewards)} rewards"
    raise BadScore(
        "error",
        f"the reward function returned {count}, {rewards!r:.100}, for one completion; TRL's form"
        " returns a list with one reward for each of `completions`",
    )


def _scored(answer: Any) -> Any:
    """The score in what a function of verl's form returned: `score`; `acc`, if 0 or 1, is whether
    it is correct, and other numbers are metrics.
    """
    if not isinstance(answer, Mapping):
        return answer
    if "score" not in answer:
        raise BadScore(
            "error",
            f"the reward function returned a dict with {', '.join(map(str, answer)):.200}, but"
            " without 'score', which verl's form needs; add that key",
        )
    read = {key: as_number(value) for key, value in answer.items() if key != "score"}
    numbers: dict[Any, Any] = {key: number for key, number in read.items() if number is not None}
    if numbers.get("acc") in (0, 1):
        numbers["correct"] = bool(numbers["acc"])
    return {**numbers, "reward": answer["score"]}
