"""Agents on the real engine: what is trained is what was sampled, and programs are trained whose
history is no chain.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.agents import is_exact, recipe_of, repeatable, replays_bit_by_bit
from support.commands import ROOT, finish, megarl, records, start, write_recipe

from megarl import cli
from megarl.errors import UserError

PROGRAM = """
import asyncio, os, sys
sys.path.insert(0, {folder!r})
import own
from openai import AsyncOpenAI
from types import SimpleNamespace

assert "answer" not in open(os.environ["MEGARL_PROMPT"]).read()
for hidden in ("train.jsonl", "run/recipe.yaml"):
    try:
        sys.exit(open({folder!r} + "/" + hidden).read())
    except PermissionError:
        pass
    except FileNotFoundError:  # in the check before the run
        assert hidden != "train.jsonl"
if sys.argv[1].endswith("5"):
    sys.exit("a mistake of its own")
print(asyncio.run(own.compacts(SimpleNamespace(text=sys.argv[1]), AsyncOpenAI())))
"""


def test_what_is_trained_is_what_was_sampled(tmp_path: Path) -> None:
    """Of a plain loop, an agent that compacts its history, and one with a second agent."""
    tree = recipe_of(tmp_path, {"function": f"{tmp_path}/own.py:mixed"})
    recipe = write_recipe(tmp_path / "recipe.yaml", tree)
    tool = str(ROOT / "tools" / "bench" / "turns.py")
    words = [sys.executable, tool, "exact", recipe, "--rollouts", "60", "--json"]
    done = finish(*start(words), timeout_s=240.0)
    assert done.code == 0 and done.survivors == [], done.err[-3000:]
    found = json.loads(done.out[done.out.index("{") :])
    assert found["requests"] > 100 and found["rollouts"] == 60 and found["failures"] == 0
    assert found["rollouts_that_branch"] > 30
    assert found["rows_that_differ"] == found["turns_that_differ"] == 0
    assert found["largest_logprob_difference"] < 1e-4


def test_a_program_is_trained(tmp_path: Path) -> None:
    """A program, some of whose runs fail; its rollouts are trees."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(tmp_path)))
    tree = recipe_of(tmp_path, {"command": ["python", str(program), "{prompt}"]})
    tree["observe"] = {"transcripts_per_step": 4}
    done = megarl("run", write_recipe(tmp_path / "recipe.yaml", tree), timeout_s=240.0)
    assert done.code == 0 and done.survivors == [], done.err[-3000:]
    steps = records(tmp_path / "run" / "metrics.jsonl")
    groups = records(tmp_path / "run" / "transcripts.jsonl")
    rollouts = [one for group in groups for one in group["rollouts"]]
    assert len(steps) == 2 and all(step["grad_norm"] >= 0 for step in steps)
    failed = [one for one in rollouts if one["failure"]]
    assert len(failed) == 6, "of two prompts"
    assert all(one["detail"].endswith("exit code 1: a mistake of its own") for one in failed)
    assert sum(step["verifier/errors"] for step in steps) == len(failed)
    assert "template" not in done.err
    whole = [one for one in rollouts if not one["failure"]]
    assert whole and all(one["metrics"]["conversations"] == 2.0 for one in whole)


@pytest.mark.nightly
def test_an_asynchronous_run_is_repeated(tmp_path: Path) -> None:
    """Of functions with tools, some of which fail: the replay gives the same bits."""
    tree = recipe_of(tmp_path, {"function": f"{tmp_path}/own.py:faulty"})
    repeatable(tree, steps=3)
    tree["environment"]["on_failure"] = "wrong"  # all rollouts of a prompt fail
    done = megarl("run", write_recipe(tmp_path / "recipe.yaml", tree))
    assert done.code == 0, done.err[-3000:]
    groups = records(tmp_path / "run" / "transcripts.jsonl")
    rollouts = [one for group in groups for one in group["rollouts"]]
    failed = [one for one in rollouts if one["failure"]]
    (told,) = {one["detail"] for one in failed}
    assert re.fullmatch(r"KeyError \(own.py, line \d+\): 'of its own'", told)
    assert len(rollouts) == 36
    whole = [one["metrics"] for one in rollouts if not one["failure"]]
    assert {one["conversations"] for one in whole} == {2.0}
    is_exact(tmp_path / "run", groups=12)
    replays_bit_by_bit(tmp_path / "run", steps=3)


@pytest.mark.parametrize(("change", "said"), [
    ({"command": ["no_such"]}, "there is no such program"),
    ({"command": ["python", "none.py"]}, "there is no such file"),
    ({"function": "own.py:TOOLS"}, "own.py"),
    ({"command": ["python"], "function": "own.py:solve"}, "set one of the two"),
])  # fmt: skip
def test_agents_that_cannot_run(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", recipe_of(tmp_path, change))
    with pytest.raises(UserError, match=re.escape(said)):
        cli.plan(["run", recipe, "--check"]).run()
