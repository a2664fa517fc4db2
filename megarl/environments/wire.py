"""The messages between a reward server and its clients: JSON over HTTP, described in
docs/reference_rewards.md.

    request  {"samples": [{"prompt": {answer, fields, text, token_ids, index}, "response"}, ...]}
    answer   {"scores": [score of the first sample, ...]}

A score is what a reward function may return (a number, or an object with `reward`), {"failure",
"detail"} for a sample that could not be scored, or {"unfinished": true} for a sample that was not
scored within the time that the request's header `WITHIN` gives: the client asks again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from megarl.environments.scores import DETAIL_CHARACTERS, Outcome, score_reply
from megarl.settings.schema import shortened
from megarl.types import Failure, Prompt

ROUTE = "/v1/score"
"""Path at which `megarl serve-reward` scores."""
WITHIN = "Megarl-Answer-Within"
"""Header of a request: seconds within which the client needs an answer."""
PROMPT_KEYS = {"index": int, "text": str, "answer": str, "token_ids": list, "fields": dict}
"""{key of a prompt in a request: its type}. A client may leave out any of them; the keys are fields
of `megarl.types.Prompt`."""

Sample = tuple[Prompt, str]
"""A prompt and a response to score."""


class BadMessage(ValueError):
    """Raised if the body of a request to a reward server, or of its answer, is not the JSON that it
    must be: {"samples": [{"prompt", "response"}, ...]} or {"scores": [...]}. The message names the
    mistake.
    """


def sample_json(prompt: Prompt, response: str) -> bytes:
    """One sample of a request to a reward server as UTF-8 JSON: {"prompt": {index, text, answer,
    token_ids, fields}, "response": text}. Numbers in the prompt's `fields`, the columns of its row,
    that are not finite become null. Raises `ValueError` if a field cannot be written as JSON.
    """
    tree = {"prompt": {key: getattr(prompt, key) for key in PROMPT_KEYS}, "response": response}
    try:
        text = json.dumps(tree)
        if "NaN" in text or "Infinity" in text:
            text = json.dumps(json.loads(text, parse_constant=lambda name: None))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"row {prompt.index} of the data cannot be sent to a reward server as JSON ({error});"
            " remove that column, or score with a file.py:function"
        ) from None


def request_body(samples: Sequence[bytes]) -> bytes:
    """The JSON body, {"samples": [...]}, of a request to a reward server; each of `samples` is the
    JSON of one prompt and response, as `sample_json` returns it.
    """
    return b'{"samples":[' + b",".join(samples) + b"]}"


def read_request(body: bytes) -> list[Sample]:
    """Read the JSON body, {"samples": [...]}, of a request to a reward server. Returns a list of
    (`Prompt`, response text). Keys that a prompt lacks get an empty value or 0. Raises `BadMessage`
    that names the first mistake.
    """
    found = []
    tree = _read(body, "the request ")
    for number, sample in enumerate(_member(tree, "samples", list, "the request")):
        where = f"sample {number} of the request"
        response = _member(sample, "response", str, where)
        prompt = _member(sample, "prompt", dict, where)
        values = {
            key: _member({key: kind(), **prompt}, key, kind, f"the prompt of {where}")
            for key, kind in PROMPT_KEYS.items()
        }
        found.append((Prompt(**values), response))
    return found


def _member(tree: Any, key: str, kind: type, where: str) -> Any:
    """`tree[key]`. Raises `BadMessage` if `tree` is no object with a `key` of type `kind`."""
    value = tree.get(key) if isinstance(tree, dict) else None
    if type(value) is not kind:
        raise BadMessage(f'{where} has no "{key}" of type {kind.__name__}')
    return value


def answer_body(outcomes: Sequence[Outcome | None]) -> bytes:
    """The JSON body of a reward server's answer, {"scores": [...]}, with one entry for each sample
    of the request, in order: {reward, correct, metrics by name}, with the reward null if the
    verifier abstained, {failure, detail}, or {"unfinished": true} for None, a sample that is not
    scored yet.
    """
    return json.dumps({"scores": [_score(outcome) for outcome in outcomes]}).encode()


def _score(outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {"unfinished": True}
    if outcome.abstained:
        return {"reward": None, **outcome.metrics}
    if outcome.failure or outcome.score is None:
        return {"failure": outcome.failure or "error", "detail": outcome.detail}
    return {"reward": outcome.score, "correct": outcome.correct, **outcome.metrics}


def read_answer(text: str, count: int, *, maps_scores: bool = False) -> list[Outcome | None]:
    """Read `text`, the JSON body {"scores": [...]} of a reward server's answer to a request with
    `count` samples. Returns an `Outcome` (score, or failure with detail) for each sample, in order,
    or None for one that the server has not scored yet. A score that is no number or object is that
    sample's failure; with `maps_scores`, so is a score outside of 0 to 1. Raises `BadMessage` if
    the answer is not JSON or does not have `count` scores.
    """
    scores = _member(_read(text), "scores", list, f"is {_start(text)} and")
    if len(scores) != count:
        raise BadMessage(f"has {len(scores)} scores for {count} responses")
    return [_outcome(score, maps_scores) for score in scores]


def _outcome(score: Any, maps_scores: bool) -> Outcome | None:
    if isinstance(score, dict) and score.get("unfinished") is True:
        return None
    if isinstance(score, dict) and "failure" in score and "reward" not in score:
        said = str(score.get("detail") or score["failure"])
        kind = score["failure"] if score["failure"] in get_args(Failure) else ""
        return Outcome(failure=kind or "error", detail=said[:DETAIL_CHARACTERS])
    found = Outcome(**score_reply(score, maps_scores=maps_scores))
    said = found.detail.replace("the verifier returned", "the reward server answered")
    return replace(found, detail=said)


def _read(body: bytes | str, what: str = "") -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        said = f"{error}".split(":")[0][:100]
        raise BadMessage(f"{what}is not JSON ({said}): {_start(body)}") from None


def _start(body: bytes | str) -> str:
    """The first characters of a message, on one line."""
    text = body if isinstance(body, str) else body.decode(errors="replace")
    return repr(shortened(text, 200))
