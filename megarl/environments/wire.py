"""The messages between a reward server and its clients: JSON over HTTP, described in
docs/reference_rewards.md.

    request  {"samples": [{"prompt": {answer, fields, text, token_ids, index}, "response"}, ...]}
    answer   {"scores": [score of the first sample, ...]}

A score is what a reward function may return, {"failure", "detail"}, or {"unfinished": true} for a
sample that was not scored within the request's header `WITHIN`: the client asks again.
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
"""Header: seconds within which the client needs an answer."""
PROMPT_KEYS = {"index": int, "text": str, "answer": str, "token_ids": list, "fields": dict}
"""{key of a prompt: its type}, all optional; fields of `megarl.types.Prompt`."""

Sample = tuple[Prompt, str]


def sample_json(prompt: Prompt, response: str) -> bytes:
    """One sample as UTF-8 JSON; numbers that are not finite become null. Raises `ValueError` if a
    field cannot be written.
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
    return b'{"samples":[' + b",".join(samples) + b"]}"


def read_request(body: bytes) -> list[Sample]:
    """Read a request. Keys that a prompt lacks get an empty value or 0. Raises `ValueError` that
    names the first mistake.
    """
    samples = []
    tree = _read(body, "the request ")
    for number, sample in enumerate(_member(tree, "samples", list, "the request")):
        where = f"sample {number} of the request"
        response = _member(sample, "response", str, where)
        prompt = _member(sample, "prompt", dict, where)
        values = {
            key: _member({key: key_type(), **prompt}, key, key_type, f"the prompt of {where}")
            for key, key_type in PROMPT_KEYS.items()
        }
        samples.append((Prompt(**values), response))
    return samples


def _member(tree: Any, key: str, kind: type, where: str) -> Any:
    value = tree.get(key) if isinstance(tree, dict) else None
    if type(value) is not kind:
        raise ValueError(f'{where} has no "{key}" of type {kind.__name__}')
    return value


def answer_body(outcomes: Sequence[Outcome | None]) -> bytes:
    """The answer with a score for each sample, in order; None for one not scored yet."""
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
    """Outcomes of `count` samples, None for one not scored yet. A wrong score is that sample's
    failure; with `maps_scores`, also one outside of 0 to 1. Raises `ValueError` if the answer is
    not JSON or does not have `count` scores.
    """
    scores = _member(_read(text), "scores", list, f"is {_start(text)} and")
    if len(scores) != count:
        raise ValueError(f"has {len(scores)} scores for {count} responses")
    return [_outcome(score, maps_scores) for score in scores]


def _outcome(score: Any, maps_scores: bool) -> Outcome | None:
    if isinstance(score, dict) and score.get("unfinished") is True:
        return None
    if isinstance(score, dict) and "failure" in score and "reward" not in score:
        detail = str(score.get("detail") or score["failure"])
        failure = score["failure"] if score["failure"] in get_args(Failure) else ""
        return Outcome(failure=failure or "error", detail=detail[:DETAIL_CHARACTERS])
    outcome = Outcome(**score_reply(score, maps_scores=maps_scores))
    detail = outcome.detail.replace("the verifier returned", "the reward server answered")
    return replace(outcome, detail=detail)


def _read(body: bytes | str, what: str = "") -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = f"{error}".split(":")[0][:100]
        raise ValueError(f"{what}is not JSON ({reason}): {_start(body)}") from None


def _start(body: bytes | str) -> str:
    text = body if isinstance(body, str) else body.decode(errors="replace")
    return repr(shortened(text, 200))
