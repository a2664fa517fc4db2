"""Reward functions written for other libraries are recognised by their parameters and called so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.environments import PROMPT, verdicts

from megarl.environments.trial import check_verifier
from megarl.settings.environments import EnvironmentConfig

FUNCTIONS = """
import asyncio
import numpy as np
from dataclasses import dataclass

def own(prompt, response): return float(prompt.answer in response)
def one_column(completions, answer): return [float(a in c) for a, c in zip(answer, completions)]
def with_prompts(prompts, completions, **columns):
    return [len(p) + float(a in c) for p, c, a in zip(prompts, completions, columns["answer"])]
def with_solution(completions, solution, **kwargs):
    return [float(s in c) for c, s in zip(completions, solution)]
def chat(completions, **kwargs):
    return [float("7" in c[0]["content"]) + len(c) - 1 for c in completions]
def annotated(prompts: list[list[dict]], completions: list[list[dict[str, str]]]):
    return [float("7" in c[-1]["content"] and p[0]["role"] == "user") for p, c in zip(prompts, completions)]
async def later(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float("7" in c) for c in completions]
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source in ("", "gsm8k")
    return {"score": float(ground_truth in solution_str), "acc": 1, "pred": "7", "length": 3}
def numpy_types(data_source, solution_str, ground_truth, extra_info=None):
    right = np.array([ground_truth in solution_str])
    more = {"f1": np.float32(0.5), "count": np.int64(3), "scale": np.array(2.0)}
    return {"score": 2.0, "acc": right.all(), "pred": None, "spans": np.ones(2), **more}
def empties(prompt, response):
    prompt.fields["tests"].sort()
    while prompt.fields["tests"]: prompt.fields["tests"].pop()
    prompt.fields["more"]["seen"] = 1
    return 0.0
def takes(prompt, response): return counts(prompt, response) + empties(prompt, response)
def empties_column(completions, tests, **kwargs): tests[0].clear(); return [0.0]
def counts(prompt, response): return float(len(prompt.fields["tests"]) + len(prompt.fields["more"]))
async def counts_later(prompt, response): return counts(prompt, response)
def count_verl(solution_str, extra_info): return float(len(extra_info["tests"]))
def number(solution_str, ground_truth, **kwargs): return float(ground_truth in solution_str)
def too_many(completions, **kwargs): return [1.0, 0.0]
def no_list(completions, **kwargs): return 1.0
def no_column(completions, level): return [1.0]
def no_score(data_source, solution_str, ground_truth, extra_info): return {"acc": 1}

def both(completions, solution_str): return [1.0]
def twice(completions, response): return [1.0]
def swapped(response, prompt): return 1.0
def old(completion, answer): return 1.0
def expected(x, expected): return 1.0
def unknown(x, answer, *args): return 1.0
def fine(question, answer): return 1.0
def also_fine(row, text): return 1.0
def needs_more(data_source, solution_str, ground_truth, extra_info, tokenizer): return 1.0
def three(prompt, response, answer): return 1.0
def yields(prompt, response): yield 1.0
async def yields_later(prompt, response): yield 1.0
@dataclass
class Reward:
    prompt: object
    response: str
"""
CHAT = [{"role": "user", "content": "3+4="}]


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    return str(tmp_path / "own.py")


@pytest.mark.parametrize(("name", "fields", "expected"), [
    ("own", {}, (1.0, 0.0)),
    ("one_column", {}, (1.0, 0.0)),
    ("one_column", {"answer": "8"}, (0.0, 1.0)),
    ("with_prompts", {}, (5.0, 4.0)),
    ("with_solution", {"solution": "8"}, (0.0, 1.0)),
    ("chat", {"prompt": CHAT}, (1.0, 0.0)),
    ("chat", {"messages": CHAT}, (1.0, 0.0)),
    ("annotated", {}, (1.0, 0.0)),
    ("later", {}, (1.0, 0.0)),
    ("compute_score", {"data_source": "gsm8k"}, (1.0, 0.0)),
    ("numpy_types", {}, (2.0, 2.0)),
    ("fine", {}, (1.0, 1.0)),
    ("also_fine", {}, (1.0, 1.0)),
    ("number", {"reward_model": {"ground_truth": "8", "style": "rule"}}, (0.0, 1.0)),
])  # fmt: skip
def test_functions_of_other_libraries(
    own: str, name: str, fields: dict[str, Any], expected: tuple[float, ...]
) -> None:
    prompt = replace(PROMPT, fields=fields)
    found = verdicts(EnvironmentConfig(verifier=f"{own}:{name}"), "a 7", "an 8", prompt=prompt)
    assert [(one.reward, one.detail) for one in found] == [(one, "") for one in expected]
    if name == "numpy_types":
        assert [one.correct for one in found] == [True, False]
        assert found[0].metrics == {"acc": 1.0, "f1": 0.5, "count": 3.0, "scale": 2.0}
    if name == "compute_score":
        assert found[1].correct and found[1].metrics == {"acc": 1.0, "length": 3.0}


@pytest.mark.parametrize("counting", ["counts", "counts_later", "count_verl"])
def test_no_function_sees_what_another_did_to_the_row(own: str, counting: str) -> None:
    """Neither of the same response nor of an earlier one."""
    tests = [3, 1, 2]
    fields = {"tests": tests, "more": {}, "extra_info": {"tests": tests}}
    prompt = replace(PROMPT, fields=fields)
    names = ["empties", counting, "empties_column"]
    for order in (names, names[::-1]):
        config = EnvironmentConfig(rewards={f"{own}:{name}": 1.0 for name in order})
        assert [one.reward for one in verdicts(config, "x", "y", prompt=prompt)] == [3.0, 3.0]
    assert tests == [3, 1, 2]


def test_a_call_finds_the_row_as_it_is(own: str) -> None:
    prompt = replace(PROMPT, fields={"tests": [3, 1, 2], "more": {}})
    found = verdicts(EnvironmentConfig(verifier=f"{own}:takes"), "x", "y", prompt=prompt)
    assert [one.reward for one in found] == [3.0, 3.0]


@pytest.mark.parametrize(("name", "said"), [
    ("too_many", "returned 2 rewards, [1.0, 0.0], for one completion"),
    ("no_list", "returned no list, 1.0, for one completion"),
    ("no_column", "has the parameter level, but the row has no such column; it has answer"),
    ("no_score", "a dict with acc, but without 'score'"),
])  # fmt: skip
def test_what_such_a_function_does_wrong_is_said(own: str, name: str, said: str) -> None:
    (found,) = verdicts(EnvironmentConfig(verifier=f"{own}:{name}"), "x", prompt=PROMPT)
    assert found.failure == "error" and said in found.detail, found


@pytest.mark.parametrize(("name", "said"), [
    ("both", r"both\(completions, solution_str\), which names the response twice"),
    ("twice", r"twice\(completions, response\), which names the response twice"),
    ("swapped", r"swapped\(response, prompt\), but is called with .*, in this order; write"),
    ("old", r"old\(completion, answer\), but is called with .*, in this order; write"),
    ("expected", r"expected\(x, expected\), but is called with .*, in this order"),
    ("unknown", r"unknown\(x, answer, \*args\), but is called with .*, in this order"),
    ("needs_more", "verl's form does not give tokenizer; give these parameters defaults"),
    ("three", r"called with \(prompt, response\); give it these two parameters, or write it"),
    ("yields", "yields is a generator function"),
    ("yields_later", "yields_later is a generator function"),
    ("Reward", "Reward is a class; write a function"),
])  # fmt: skip
def test_what_fits_no_form_is_refused(own: str, name: str, said: str) -> None:
    for settings in ({"verifier": f"{own}:{name}"}, {"rewards": {f"{own}:{name}": 1.0}}):
        with pytest.raises(ValueError, match=said):
            check_verifier(EnvironmentConfig(**settings))


def test_the_form_is_said_before_a_run(own: str, capfd: pytest.CaptureFixture[str]) -> None:
    check_verifier(EnvironmentConfig(rewards={f"{own}:chat": 1.0, f"{own}:number": 1.0}))
    told = capfd.readouterr().err
    assert f"environment.rewards: {own}:chat is called in the form of TRL's f(completions" in told
    assert f"{own}:number is called in the form of verl's f(data_source" in told
    check_verifier(EnvironmentConfig(verifier=f"{own}:own"))
    assert "is called in the form" not in capfd.readouterr().err
