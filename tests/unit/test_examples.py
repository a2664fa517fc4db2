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

from megarl import RunConfig, SftConfig, config
from megarl.apps.tune.supervised_checks import check_sft
from megarl.apps.verifiers.code.code_verifier import code
from megarl.checks.preflight import check_run
from megarl.environments.scores import Score
from megarl.schema import replace
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


def interpreted(program: str, given: str, folder: Path) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of the interpreter."""
    path = folder / "program"
    path.write_text(program)
    command = [sys.executable, "-I", "-S", str(LANGUAGE), str(path)]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("program", "given", "printed"), [
    ("72x*-3+.", "4\n5\n", "2\n0\n"),
    ("72x*-3+.", "", ""),
    ("x.x.", "-12\n", "-12\n-12\n"),
    ("9 8\n-.", "0\n", "1\n"),
    ("xx*.", "99\n11\n", "9801\n121\n"),
    ("x", "1\n", ""),
    ("", "1\n", ""),
])  # fmt: skip
def test_the_tiny_language(program: str, given: str, printed: str, tmp_path: Path) -> None:
    assert interpreted(program, given, tmp_path) == (0, printed, "")


@pytest.mark.parametrize(("program", "given", "said"), [
    ("x+.", "1\n", "command 2 ('+') finds too few numbers on the stack"),
    ("x..", "1\n", "command 3 ('.') finds too few numbers on the stack"),
    ("x2/.", "1\n", "character 3 ('/') is no command"),
    ("x\N{SUPERSCRIPT TWO}.", "1\n", "is no command"),
    ("x.", "one\n", "invalid literal"),
    ("x" * 600 + "*" * 599 + ".", "99\n", "makes a number above 10**1000"),
])  # fmt: skip
def test_a_wrong_program_of_the_tiny_language(
    program: str, given: str, said: str, tmp_path: Path
) -> None:
    exit_code, printed, error = interpreted(program, given, tmp_path)
    assert (exit_code, printed) == (1, "") and said in error and error.count("\n") == 1


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
    styles = {"right": compiled, "from left": from_left}
    styles["short"] = lambda terms: compiled(terms[:-2])
    share = {
        name: sum(row["response"] == write(terms_of(row["prompt"])) for row in shown) / len(shown)
        for name, write in styles.items()
    }
    assert 0.13 < share["right"] < 0.27 and 0.42 < share["from left"] < 0.58
    assert 0.09 < share["short"] < 0.21


def test_the_folder_of_programs_written_twice_is_the_same(task: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    assert make_programs.main([str(again), *SMALL]) == 0
    assert make_programs.main([str(other), *SMALL, "--seed", "2"]) == 0
    files = {path.relative_to(task) for path in task.rglob("*") if path.is_file()}
    assert {str(path) for path in files} > {"sft.jsonl", "train.jsonl", "held_out.jsonl"}
    for path in files:
        assert (again / path).read_bytes() == (task / path).read_bytes(), path
    assert (other / "train.jsonl").read_text() != (task / "train.jsonl").read_text()


def test_bad_arguments_of_programs(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        make_programs.main([str(tmp_path / "none"), "--held-out", "0"])
    assert "--held-out is 0; set it to a number from 1 to 2000" in capsys.readouterr().err
    assert make_programs.main([str(task), *SMALL, "--seed", "3"]) == 1
    assert "holds what was made of other arguments" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


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
    shown = replace(first.demonstrations, source=str(task / "sft.jsonl"))
    model = replace(first.model, path=str(task / "model"))
    changes = {"folder": str(tmp_path / "sft"), "model": model, "demonstrations": shown}
    found = check_sft(replace(first, **changes)).rows
    assert found is not None and len(found) == 400
    held_out = replace(second.evaluation.prompts, source=str(task / "held_out.jsonl"))
    changes = {"folder": str(tmp_path / "rl"), "model": model}
    changes["prompts"] = replace(second.prompts, source=str(task / "train.jsonl"))
    changes["evaluation"] = replace(second.evaluation, prompts=held_out)
    small = replace(second, **changes)
    assert check_run(small, num_ranks=1).prompts is not None
