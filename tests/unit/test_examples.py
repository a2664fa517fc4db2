"""The example tasks of launch/recipes: their interpreters, rows and reference solutions."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import make_programs
import pytest
from make_programs import compiled, from_left, mistaken

from megarl import RunConfig, SftConfig
from megarl.apps.tune.tune_checks import check_sft
from megarl.apps.verifiers.code.code_verifier import code
from megarl.environments.scores import Score
from megarl.run.plan import plan_run
from megarl.settings import config
from megarl.types import Prompt

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "launch" / "recipes"
LANGUAGE = ROOT / "launch" / "environments" / "tiny_language.py"
SMALL = ["--demonstrations", "400", "--prompts", "60", "--held-out", "20"]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs") / "data"
    assert make_programs.main([str(folder), *SMALL]) == 0
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def terms_of(prompt: str) -> list[str]:
    """Of `7-2*x=` the list of operands and operators: every one is a character."""
    return list(prompt.removesuffix("="))


@pytest.mark.parametrize(("program", "given", "printed", "said"), [
    ("72x*-3+.", "4\n5\n", "2\n0\n", ""),
    ("72x*-3+.", "", "", ""),
    ("x.x.", "-12\n", "-12\n-12\n", ""),
    ("9 8\n-.", "0\n", "1\n", ""),
    ("x", "1\n", "", ""),
    ("x+.", "1\n", "", "command 2 ('+') finds too few numbers on the stack"),
    ("x..", "1\n", "", "command 3 ('.') finds too few numbers on the stack"),
    ("x2/.", "1\n", "", "character 3 ('/') is no command"),
    ("x\N{SUPERSCRIPT TWO}.", "1\n", "", "is no command"),
    ("x.", "one\n", "", "invalid literal"),
    ("x" * 600 + "*" * 599 + ".", "99\n", "", "makes a number above 10**1000"),
])  # fmt: skip
def test_the_tiny_language(
    program: str, given: str, printed: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "program"
    path.write_text(program)
    command = [sys.executable, "-I", "-S", str(LANGUAGE), str(path)]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (int(bool(said)), printed), done.stderr
    assert said in done.stderr and done.stderr.count("\n") == int(bool(said))


def test_programs_pass_their_rows_in_the_sandbox(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the recipe's interpreter and limits: what the reference compiler writes passes, what a
    demonstration of another style writes does not.
    """
    monkeypatch.chdir(ROOT)  # the recipe names the interpreter from there
    verify = code(config.read(RunConfig, RECIPES / "programs.yaml").environment)

    def verdict(row: dict[str, Any], response: str) -> Score:
        prompt = Prompt(index=0, text="", token_ids=[1], answer="", fields=row)
        given: Any = verify(prompt, response)
        return asyncio.run(given)

    draw = random.Random(1)
    for row in rows(task / "train.jsonl")[:8] + rows(task / "held_out.jsonl")[:4]:
        terms = terms_of(row["prompt"])
        right = compiled(terms)
        wrongs = [from_left(terms), compiled(terms[:-2]), compiled(mistaken(terms, draw))]
        for wrong in (*wrongs, right.removesuffix("."), right[:-2] + right[-1]):
            assert not verdict(row, wrong).correct, (row, wrong)
        found = verdict(row, right)
        assert found.correct and found.metrics == {"tests_passed": 1.0, "timed_out": 0.0}


def test_rows_of_programs_need_precedence_and_x(task: Path) -> None:
    """Python's own arithmetic gives the expected outputs, and from left to right gives others."""
    trained = rows(task / "train.jsonl")
    for row in trained + rows(task / "held_out.jsonl"):
        terms, pairs = terms_of(row["prompt"]), row["input_output"]
        assert "x" in terms and len(pairs["inputs"]) == len(pairs["outputs"]) == 2
        for given, wanted in zip(pairs["inputs"], pairs["outputs"], strict=True):
            for x, value in zip(given.split(), wanted.split(), strict=True):
                assert eval("".join(terms), {"x": int(x)}) == int(value)
                total = int(x) if terms[0] == "x" else int(terms[0])
                for operator, operand in zip(terms[1::2], terms[2::2], strict=True):
                    total = eval(f"{total}{operator}{operand}", {"x": int(x)})
                assert total != int(value), row
    held_out = {row["prompt"] for row in rows(task / "held_out.jsonl")}
    shown = [row["prompt"] for row in trained + rows(task / "sft.jsonl")]
    assert len(held_out) == 20 and not held_out & set(shown)
    assert len({row["prompt"] for row in trained}) == 60


def test_demonstrations_of_programs_are_mostly_wrong(task: Path) -> None:
    shown = rows(task / "sft.jsonl")
    for share, style in ((0.2, compiled), (0.5, from_left), (0.15, lambda t: compiled(t[:-2]))):
        found = sum(row["response"] == style(terms_of(row["prompt"])) for row in shown)
        assert found / len(shown) == pytest.approx(share, abs=0.08)


def test_recipes_of_programs_pass_the_checks(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and responses fit the limits, and the second recipe begins with the first's model."""
    monkeypatch.chdir(ROOT)
    first = config.read(SftConfig, RECIPES / "programs_sft.yaml")
    second = config.read(RunConfig, RECIPES / "programs.yaml")
    assert second.model.path == f"{first.folder}/checkpoints/step_{first.steps:06d}/model"
    folder = "runs/programs/data"
    assert second.prompts.source == f"{folder}/train.jsonl"
    assert second.evaluation.prompts.source == f"{folder}/held_out.jsonl"
    longest = max(len(row["response"]) for row in rows(task / "sft.jsonl"))
    assert longest < second.rollout.max_new_tokens

    def changed(**changes: Any) -> list[str]:
        changes |= {"folder": tmp_path / "run", "model.path": task / "model"}
        return [f"--{name}={value}" for name, value in changes.items()]

    words = changed(**{"demonstrations.source": task / "sft.jsonl"})
    found = check_sft(config.read(SftConfig, RECIPES / "programs_sft.yaml", words)).rows
    assert found is not None and len(found) == 400
    sources: dict[str, Any] = {"model.from_scratch": True, "prompts.source": task / "train.jsonl"}
    sources["evaluation.prompts.source"] = task / "held_out.jsonl"
    small = config.read(RunConfig, RECIPES / "programs.yaml", changed(**sources))
    assert plan_run(small).prompts is not None
