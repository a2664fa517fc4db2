"""Agents on the real engine: what is trained is what was sampled, and programs are trained whose
history is no chain.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from make_addition import write_rows
from make_calculator import problems, write_model
from support.commands import ROOT, finish, megarl, records, start, tiny_run, write_recipe

AGENTS = """
from launch.environments.calculator_agent import TOOLS, solve

async def ask(client, chat, **more):
    made = await client.chat.completions.create(model="policy", messages=chat, max_tokens=9, **more)
    return [one.message.model_dump(exclude_none=True) for one in made.choices]

async def compacts(prompt, client):
    chat = [{"role": "user", "content": prompt.text}]
    for turn in range(4):
        chat += await ask(client, chat)
        chat.append({"role": "user", "content": str(turn)})
        if turn == 2:  # the first turns become a summary
            chat = [{"role": "system", "content": "12"}, *chat[-3:]]
    return "12"

async def delegates(prompt, client):
    chat = [{"role": "user", "content": prompt.text}]
    (plan,) = await ask(client, chat)
    (found,) = await ask(client, [{"role": "user", "content": "1+" + prompt.text}], tools=TOOLS)
    told = {"role": "user", "content": "= " + str(found.get("content"))}
    drafts = await ask(client, [*chat, plan, told], n=2)
    return {"reward": len(str(drafts[0])) % 3 / 2, "correct": False}

async def mixed(prompt, client):
    return await (solve, compacts, delegates)[prompt.index % 3](prompt, client)
"""

PROGRAM = """
import asyncio, os, sys
sys.path.insert(0, {folder!r})
import own
from openai import AsyncOpenAI
from types import SimpleNamespace

assert "answer" not in open(os.environ["MEGARL_PROMPT"]).read()
if sys.argv[1].endswith("7"):
    sys.exit("a mistake of its own")
print(asyncio.run(own.compacts(SimpleNamespace(text=sys.argv[1]), AsyncOpenAI())))
"""


def recipe_of(folder: Path, agent: dict[str, Any]) -> dict[str, Any]:
    """A run of an agent with a model of the calculator's tokenizer, and random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model, data = folder / "model", folder / "train.jsonl"
    write_model(model)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    write_rows(data, problems(200, 1, held_out=False))
    (folder / "own.py").write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n{AGENTS}")
    tree = tiny_run(folder, model, steps=2)
    tree["prompts"] = {"source": str(data), "max_prompt_tokens": 32}
    tree["environment"] = {"agent": agent, "max_failure_share": 0.9}
    tree["rollout"] |= {"max_new_tokens": 96, "group_size": 3, "groups_per_step": 4}
    tree["rollout"]["dynamic_sampling"] = {"enabled": False}
    tree.pop("evaluation", None)
    return tree


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
    done = megarl("train", write_recipe(tmp_path / "recipe.yaml", tree), timeout_s=240.0)
    assert done.code == 0 and done.survivors == [], done.err[-3000:]
    steps = records(tmp_path / "run" / "metrics.jsonl")
    groups = records(tmp_path / "run" / "transcripts.jsonl")
    rollouts = [one for group in groups for one in group["rollouts"]]
    assert len(steps) == 2 and all(step["grad_norm"] >= 0 for step in steps)
    failed = [one for one in rollouts if one["failure"]]
    assert all(one["detail"].endswith("exit code 1: a mistake of its own") for one in failed)
    assert sum(step["verifier/errors"] for step in steps) == len(failed)
    assert "template" not in done.err
    whole = [one for one in rollouts if not one["failure"]]
    assert whole and all(one["metrics"]["conversations"] == 2.0 for one in whole)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"command": ["no_such"]}, "there is no such program"),
        ({"command": ["python", "none.py"]}, "there is no such file"),
        ({"function": "own.py:TOOLS"}, "own.py"),
        ({"command": ["python"], "function": "own.py:solve"}, "set one of the two"),
    ],
)
def test_agents_that_cannot_run(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    tree = recipe_of(tmp_path, change)
    done = megarl("train", write_recipe(tmp_path / "recipe.yaml", tree))
    assert done.code != 0 and said in done.err and "Traceback" not in done.err, done.err
