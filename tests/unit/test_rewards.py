"""Reward functions of a user: the examples of the documentation, and what may go wrong."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.documented import block
from support.environments import PROMPT, opened, run, verdicts

from megarl.environments.scores import BadScore, read_score
from megarl.environments.scoring import Environment
from megarl.environments.user_code import prepare_imports
from megarl.environments.verifiers import load_verifier, short_names
from megarl.environments.worker import limit_memory
from megarl.environments.workers import Worker
from megarl.rollout.batch import own_metrics
from megarl.settings.environments import EnvironmentConfig
from megarl.types import Verdict


def example(name: str, folder: Path) -> str:
    """The documentation's code block `name`, written to a file."""
    (folder / f"{name}.py").write_text(block(f"python {name}"))
    return str(folder / f"{name}.py")


def write(path: Path, body: str) -> str:
    path.write_text(body)
    return f"{path}:score"


EXAMPLES: dict[str, dict[str, float]] = {
    "answer_alone": {"<think>5</think> 7": 1.0, "<think>7</think> 5": 0.0},
    "ends_right": {"so it is 7": 1.0, "7 it is": 0.0, "": 0.0},
    "from_the_row": {"a cat and a dog": 1.0, "a cat": 0.5, "": 0.0},
    "judge": {"a 7": 1.0, "an 8": 0.0},
    "own_metrics": {"a b c d e f g": 0.0, "one two": -5.0},
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_the_page(name: str, tmp_path: Path) -> None:
    config = EnvironmentConfig(verifier=f"{example(name, tmp_path)}:score")
    prompt = replace(PROMPT, fields={"keywords": ["cat", "dog"]})
    expected = EXAMPLES[name]
    found = verdicts(config, *expected, prompt=prompt)
    assert [(verdict.reward, verdict.failure) for verdict in found] == [
        (reward, "") for reward in expected.values()
    ]
    if name == "own_metrics":
        assert [verdict.correct for verdict in found] == [True, False]
        assert [verdict.metrics for verdict in found] == [{"words": 7.0}, {"words": 2.0}]


def test_several_weighted_rewards_of_the_page(tmp_path: Path) -> None:
    file = example("style", tmp_path)
    weights = {"math": 1.0, f"{file}:brevity": 0.2, f"{file}:politeness": 0.1}
    text = "please: #### 7, thank you"
    (verdict,) = verdicts(EnvironmentConfig(rewards=weights), "please, thank you\n#### 7")
    brief = 1 - len("please, thank you\n#### 7") / 1000
    assert verdict.reward == pytest.approx(1.0 + 0.2 * brief + 0.1) and verdict.correct, text
    assert verdict.metrics == {
        "reward/math": 1.0,
        "reward/brevity": brief,
        "reward/politeness": 1.0,
        "politeness/thanks": 1.0,
    }


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a.py:f", "b/c.py:f", "a.py:g", "math"], ["a.f", "c.f", "g", "math"]),
        (["a/r.py:f", "b/r.py:f", "c.py:f"], ["a/r.f", "b/r.f", "c.f"]),
        (["x.py:math", "math"], ["x.math", "math"]),
        (["./x.py:f", "x.py:f"], ["./x.py:f", "x.py:f"]),
        (["http://h:1/a", "http://h:2/a", "https://i/b"], ["h/1", "h/2", "i"]),
    ],
)
def test_short_names_are_unique(names: list[str], shown: list[str]) -> None:
    assert list(short_names(names).values()) == shown


def test_means_of_own_metrics() -> None:
    made = [{"a": 1.0}, {"a": 2.0, "b": 5.0}, {}]
    means = {"environment/a": 1.5, "environment/b": 5.0}
    assert own_metrics(made) == means | {
        "environment/a/responses": 2.0,
        "environment/b/responses": 1.0,
    }


BAD: dict[str, tuple[Any, str, str]] = {
    "text": ("1.0", "nan", "returned '1.0', not a finite number"),
    "huge": (1e10, "error", r"returned 1e\+10; return a reward between -1e\+09 and 1e\+09"),
    "beyond floats": (10**400, "nan", "not a finite number"),
    "no reward": ({"score": 1.0}, "error", "a dict with score, but without 'reward'; add that key"),
    "bad reward": ({"reward": "x"}, "nan", "returned 'x', not a finite number"),
    "bad metric": ({"reward": 1, "a": float("inf")}, "nan", "returned inf for metric 'a'"),
    "bad name": ({"reward": 1, "a\nb": 1}, "error", "a metric named"),
    "correct text": ({"reward": 1, "correct": "False"}, "error", "'False' for 'correct'; return"),
    "many": (
        {"reward": 1} | {f"m{n}": 1 for n in range(65)},
        "error",
        "returned 65 metrics; return at most 64",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_score_is_said(case: str) -> None:
    answer, failure, message = BAD[case]
    with pytest.raises(BadScore, match=message) as told:
        read_score(answer)
    assert told.value.failure == failure and "\n" not in str(told.value)


@pytest.mark.parametrize("value", [True, 1, np.True_, np.int64(1), 0, False, np.bool_(False), None])
def test_correct_may_be_a_truth_value(value: Any) -> None:
    found = read_score({"reward": 0.5, "correct": value}).correct
    assert found is (None if value is None else bool(value))


DEFINED = """
from __future__ import annotations
import asyncio, os
from dataclasses import dataclass

@dataclass
class Rule:
    value: float = 0.5

def score(prompt, response):
    async def later():
        return Rule().value
    return asyncio.run(later())

async def interrupt(prompt, response): raise KeyboardInterrupt("by hand")
async def cancel(prompt, response): raise asyncio.CancelledError("no more")
def leave(prompt, response): raise SystemExit("no key")
def look(prompt, response): return os.environ["NOWHERE"]
"""


@pytest.mark.parametrize("several", [False, True])
def test_a_plain_function_may_run_its_own_loop(several: bool, tmp_path: Path) -> None:
    """Its file may define dataclasses whose annotations are text."""
    own = write(tmp_path / "own.py", DEFINED)
    config = EnvironmentConfig(rewards={own: 1.0}) if several else EnvironmentConfig(verifier=own)
    (found,) = verdicts(config, "x")
    assert (found.reward, found.detail) == (0.5, "")


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("function", "detail"),
    [
        ("interrupt", "KeyboardInterrupt: by hand"),
        ("cancel", "CancelledError: no more"),
        ("leave", "SystemExit: no key"),
        ("look", "KeyError: 'NOWHERE'"),
    ],
)
def test_what_is_no_exception_is_a_failure_too(
    function: str, detail: str, several: bool, tmp_path: Path
) -> None:
    """The detail names the line of the user's file, also of an error in Python's own."""
    write(tmp_path / "own.py", DEFINED)
    name = f"{tmp_path / 'own.py'}:{function}"
    config = EnvironmentConfig(rewards={name: 1.0}) if several else EnvironmentConfig(verifier=name)
    (line,) = (n for n, text in enumerate(DEFINED.split("\n"), 1) if f"def {function}(" in text)
    kind, text = ("RuntimeError", f"{function}: {detail}") if several else detail.split(": ")
    found = verdicts(config, "x", "x")
    expected = ("error", f"{kind} (own.py, line {line}): {text}")
    assert [(one.failure, one.detail) for one in found] == [expected] * 2


def test_helpers_of_one_name_beside_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused if one is imported, since the second file would get the first one's."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    paths, weights = [], {}
    for value, folder in enumerate(["a", "b"]):
        (tmp_path / folder).mkdir()
        for name in ("own_util", f"only_{folder}"):
            (tmp_path / folder / f"{name}.py").write_text(f"V = {value}.0\n")
        paths.append(tmp_path / folder / "r.py")
        weights[
            write(paths[-1], f"import only_{folder}\ndef score(p, r): return only_{folder}.V\n")
        ] = 1.0
    config = EnvironmentConfig(rewards=weights)
    prepare_imports(paths, {})
    total = asyncio.run(load_verifier(config)(PROMPT, "x"))  # type: ignore[arg-type]
    assert total.metrics == {"reward/a/r.score": 0.0, "reward/b/r.score": 1.0}
    write(paths[1], "from own_util import V\ndef score(p, r): return V\n")
    with pytest.raises(ValueError, match=r"'own_util' is found in .*; give each a name") as told:
        load_verifier(config)
    assert "\n" not in str(told.value)
    assert all(f"{tmp_path / folder / 'own_util.py'}" in str(told.value) for folder in "ab")


def test_responses_without_a_score(tmp_path: Path) -> None:
    """They get `unscored`; one of several functions that fails is named."""
    own = write(tmp_path / "own.py", "def score(prompt, response):\n    return 1 / len(response)\n")
    config = EnvironmentConfig(verifier=own, unscored=-3.0)
    assert [(one.reward, one.failure) for one in verdicts(config, "ab", "")] == [
        (0.5, ""),
        (-3.0, "error"),
    ]
    cut = run(config, lambda made: made.score(PROMPT, "ab", 5, True))
    assert (cut.reward, cut.failure) == (-3.0, "")
    (failed,) = verdicts(EnvironmentConfig(rewards={own: 1.0, "math": 2.0}), "")
    assert failed.detail == (
        "RuntimeError (own.py, line 2): score: ZeroDivisionError: division by zero"
    )


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "weight": (
        {"rewards": {"math": float("nan")}},
        "rewards.math is nan; it should be a finite number",
    ),
    "unknown": ({"rewards": {"mathz": 1.0}}, "environment.rewards is 'mathz'; set it to one of"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_contradict_each_other(case: str) -> None:
    settings, message = SETTINGS[case]
    with pytest.raises(ValueError, match=message):
        Environment(EnvironmentConfig(**settings))


OWN = """
import os
import beside

def score(prompt, response):
    if response == "die":
        os.kill(os.getpid(), 9)
    if response == "allocate":
        held = bytearray(2**30)
    return {"reward": beside.VALUE, "version": 1}
"""


def test_editing_the_files_does_not_change_a_run(tmp_path: Path) -> None:
    """A process that replaces another runs what the first one ran, also of files beside it."""
    own = write(tmp_path / "own.py", OWN)
    (tmp_path / "beside.py").write_text("VALUE = 2.5\n")

    async def use(environment: Environment) -> list[Verdict]:
        found = []
        for number, edit in enumerate(["version 2", "version 3", "def score(:"]):
            found.append(await environment.score(PROMPT, "x", 1, False))
            (tmp_path / "own.py").write_text(edit if number == 2 else OWN.replace("1", "2"))
            (tmp_path / "beside.py").write_text("VALUE = 9.0\n")
            found.append(await environment.score(PROMPT, "die", 1, False))
            assert found[-1].failure == "error"
        return [*found, await environment.score(PROMPT, "x", 1, False)]

    found = run(EnvironmentConfig(verifier=own), use)
    for verdict in found[::2]:
        assert (verdict.reward, verdict.metrics, verdict.failure) == (2.5, {"version": 1.0}, "")
    (said,) = [verdict.warning for verdict in found if verdict.warning]
    assert said.endswith("changed after the run started; the run goes on with what it was then")
    assert "own.py" in said and "beside.py" in said


def test_memory_is_limited(tmp_path: Path) -> None:
    own = write(tmp_path / "own.py", OWN)
    (tmp_path / "beside.py").write_text("VALUE = 1.0\n")
    config = EnvironmentConfig(verifier=own, memory_limit_mib=256)
    failed, after = verdicts(config, "allocate", "x")
    assert (failed.failure, after.failure, after.reward) == ("error", "", 1.0)
    assert failed.detail == (
        "the verifier's process ran out of memory; raise environment.memory_limit_mib = 256"
    )
    fills = write(
        tmp_path / "fills.py",
        """
async def score(prompt, response):
    held = []
    while True: held.append("x" * 50 + str(len(held)))
""",
    )
    config = EnvironmentConfig(rewards={fills: 1.0}, memory_limit_mib=256)
    (failed,) = verdicts(config, "x")
    assert failed.detail.startswith("RuntimeError") and "score: MemoryError" in failed.detail
    with pytest.raises(ValueError, match=r"is 1, but the verifier's process holds \d+ MiB once"):
        limit_memory(1)


async def test_a_verifier_of_the_house_has_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    whole = Worker.__init__

    def watched(self: Worker, *arguments: Any) -> None:
        whole(self, *arguments)
        started.append(self.process.pid)

    monkeypatch.setattr(Worker, "__init__", watched)
    async with opened(EnvironmentConfig(verifier="math")) as environment:
        await environment.start()
        limits = Path(f"/proc/{started[0]}/limits").read_text()
        status = Path(f"/proc/{started[0]}/status").read_text()
        found = re.search(r"Max data size +(\d+)", limits), re.search(r"VmData:\s+(\d+)", status)
        assert found[0] and found[1]
        most, used = int(found[0][1]), int(found[1][1]) * 1024
    assert used < most < used + 512 * 2**20


async def test_a_prompt_verdict_looks_at_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find a worker's descendants reads all of /proc, milliseconds for each verdict."""
    looks: list[int] = []
    monkeypatch.setattr("megarl.environments.workers.computed_s", looks.append)
    async with opened(EnvironmentConfig(verifier="exact_match", time_limit_s=60)) as environment:
        for response in ("1", "2"):
            assert (await environment.score(PROMPT, response, 1, False)).failure == ""
    assert not looks


async def test_a_timeout_does_not_wait_for_the_process_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with much memory takes a second to end; here it takes until the verdict is in."""
    told = threading.Event()
    whole = Worker.kill

    def slow(self: Worker) -> None:
        assert told.wait(30)
        whole(self)

    monkeypatch.setattr(Worker, "kill", slow)
    own = write(tmp_path / "own.py", "def score(prompt, response):\n    while True: pass\n")
    async with opened(EnvironmentConfig(verifier=own, time_limit_s=0.2)) as environment:
        found = await environment.score(PROMPT, "x", 1, False)
        told.set()
    assert found.failure == "response_limit"
