"""The wire format of reward servers: JSON over HTTP, described in docs/rewards.md.

    request  {"samples": [{"prompt": {answer, fields, text, token_ids, index}, "response"}, ...]}
    answer   {"scores": [score of the first sample, ...]}

A score is what a reward function may return (a number, or an object with `reward`),
{"failure", "detail"} for a sample that could not be scored, or {"unfinished": true} for one that
was not scored within the time that the request's header `WITHIN` gives: the client asks again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from megarl.environments.scores import DETAIL_CHARACTERS, Outcome, score_reply
from megarl.types import Prompt

ROUTE = "/v1/score"
"""Path at which `megarl serve-reward` scores."""
WITHIN = "Megarl-Answer-Within"
"""Header of a request: seconds within which the client needs an answer."""
PROMPT_KEYS = {"answer": str, "text": str, "fields": dict, "token_ids": list, "index": int}
"""{key of a prompt: its type}. A server may be sent any part of them; `Prompt` says what they are.
"""

Sample = tuple[Prompt, str]
"""A prompt and a response to score."""


class BadMessage(ValueError):
    """Raised for a request or an answer that does not have the wire format."""


def sample_json(prompt: Prompt, response: str) -> bytes:
    """The JSON of one sample of a request. Numbers in the prompt's fields that are not finite
    become null. Raises `ValueError` if a field cannot be written as JSON.
    """
    tree: dict[str, Any] = {
        "prompt": {
            "index": prompt.index,
            "text": prompt.text,
            "answer": prompt.answer,
            "token_ids": prompt.token_ids,
            "fields": prompt.fields,
        },
        "response": response,
    }
    try:
        try:
            return json.dumps(tree, allow_nan=False).encode()
        except ValueError:
            return json.dumps(_finite(tree), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"row {prompt.index} of the data cannot be sent to a reward server as JSON ({error});"
            " remove that column, or score with a file.py:function"
        ) from None


def request_body(samples: Sequence[bytes]) -> bytes:
    """The body of a request, of what `sample_json` has returned."""
    return b'{"samples":[' + b",".join(samples) + b"]}"


def read_request(body: bytes) -> list[Sample]:
    """The samples of a request. Raises `BadMessage` that names the first mistake."""
    tree = _read(body, "request")
    samples = tree.get("samples") if isinstance(tree, dict) else None
    if not isinstance(samples, list):
        raise BadMessage('the request is no object with a list "samples"')
    found = []
    for number, sample in enumerate(samples):
        where = f"sample {number} of the request"
        if not isinstance(sample, dict) or not isinstance(sample.get("response"), str):
            raise BadMessage(f'{where} is no object with a text "response"')
        prompt = sample.get("prompt")
        if not isinstance(prompt, dict):
            raise BadMessage(f'{where} has no object "prompt"')
        found.append((_prompt(prompt, where), sample["response"]))
    return found


def _prompt(tree: dict[str, Any], where: str) -> Prompt:
    for key, kind in PROMPT_KEYS.items():
        if key in tree and (not isinstance(tree[key], kind) or tree[key] is True):
            raise BadMessage(f'{where}: "prompt" has a "{key}" that is not of type {kind.__name__}')
    return Prompt(
        index=tree.get("index", 0),
        text=tree.get("text", ""),
        token_ids=tree.get("token_ids", []),
        answer=tree.get("answer", ""),
        fields=tree.get("fields", {}),
    )


def answer_body(outcomes: Sequence[Outcome | None]) -> bytes:
    """The body of a server's answer; None stands for a sample that is not scored yet."""
    return json.dumps({"scores": [_score(outcome) for outcome in outcomes]}).encode()


def _score(outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {"unfinished": True}
    if outcome.failure or outcome.score is None:
        return {"failure": outcome.failure or "error", "detail": outcome.detail}
    return {"reward": outcome.score, "correct": outcome.correct, **outcome.metrics}


def read_answer(body: bytes, count: int, *, maps_scores: bool = False) -> list[Outcome | None]:
    """The outcomes of `count` samples, None for one that the server has not scored yet. A score
    that is none is that sample's failure. Raises
    `BadMessage` if the answer is not JSON or does not have `count` scores. `maps_scores`: see
    `megarl.environments.scores.score_reply`.
    """
    tree = _read(body, "answer")
    scores = tree.get("scores") if isinstance(tree, dict) else None
    if not isinstance(scores, list):
        raise BadMessage(f'is no object with a list "scores": {_start(body)}')
    if len(scores) != count:
        raise BadMessage(f"has {len(scores)} scores for {count} responses")
    return [_outcome(score, maps_scores) for score in scores]


def _outcome(score: Any, maps_scores: bool) -> Outcome | None:
    if isinstance(score, dict) and score.get("unfinished") is True:
        return None
    if isinstance(score, dict) and "failure" in score and "reward" not in score:
        kind: Literal["error", "timeout", "nan"] = "error"
        if score["failure"] in ("timeout", "nan"):
            kind = score["failure"]
        detail = str(score.get("detail") or score["failure"])
        return Outcome(failure=kind, detail=detail[:DETAIL_CHARACTERS])
    reply = score_reply(score, maps_scores=maps_scores)
    if "detail" in reply:
        said = reply["detail"].replace("the verifier returned", "the reward server answered")
        reply |= {"detail": said}
    return Outcome(**reply)


def _read(body: bytes, what: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        said = f"{error}".split(":")[0][:100]
        prefix = "the request " if what == "request" else ""
        raise BadMessage(f"{prefix}is not JSON ({said}): {_start(body)}") from None


def _start(body: bytes) -> str:
    """The first characters of a message, on one line."""
    text = " ".join(body[:400].decode(errors="replace").split())
    return repr(text if len(text) <= 200 else f"{text[:197]}...")


def _finite(value: Any) -> Any:
    """`value` with None in place of every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
