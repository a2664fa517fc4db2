"""Agents that call the model through the gateway, and a recipe that trains them."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any
from unittest.mock import patch

from make_addition import write_rows
from make_calculator import problems, write_model

from megarl.data.tokenizer import load_tokenizer
from megarl.environments.codec import Codec
from megarl.rollout.batch_files import read_batch
from support.commands import ROOT, megarl, records, replayed, tiny_run

AGENTS = """
from launch.environments.calculator_agent import TOOLS, solve, use

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

async def multiplies(prompt, client):
    chat = [{"role": "user", "content": prompt.text}]
    said = await ask(client, chat, tools=TOOLS)
    given = {"name": "multiply", "arguments": '{"a": 3, "b": 4}'}
    call = {"id": "abcdefghi", "type": "function", "function": given}
    chat.append({"role": "assistant", "tool_calls": [call]})  # whatever the model has said
    chat.append({"role": "tool", "tool_call_id": call["id"], "content": use(**given)})
    (said,) = await ask(client, chat, tools=TOOLS)
    return len(said.get("content") or "") % 3 / 2

async def fails(prompt, client):
    await ask(client, [{"role": "user", "content": prompt.text}])
    raise KeyError("of its own")

async def faulty(prompt, client):
    return await (multiplies, fails, compacts, delegates)[prompt.index % 4](prompt, client)
"""


def codec_of_characters(folder: Path) -> Codec:
    """The codec of a model with the calculator's chat template, which knows all of ASCII."""
    with patch("make_calculator.CHARACTERS", string.printable):
        write_model(folder / "model")
    return Codec.of(load_tokenizer(str(folder / "model")), whole=True)


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
    agent = {"trains": "all"} | agent
    tree["environment"] = {"agent": agent, "max_failure_share": 0.9}
    tree["rollout"] |= {"max_new_tokens": 96, "group_size": 3, "groups_per_step": 4}
    tree["rollout"]["dynamic_sampling"] = {"enabled": False}
    tree.pop("evaluation", None)
    return tree


def repeatable(tree: dict[str, Any], steps: int) -> None:
    """Make the run of a recipe asynchronous, with every group trained and all batches recorded."""
    tree["rollout"] |= {"max_staleness": 1}
    # With the entropy, groups of equal rewards have a gradient too.
    tree["algorithm"] = {"correction": {"kind": "tis"}, "entropy_coefficient": 1e-3}
    tree |= {"steps": steps, "observe": {"batches": True, "transcripts_per_step": 4}}


def is_exact(run: Path, groups: int) -> None:
    """Every group of the asynchronous run is accounted for, and each sampled token is trained."""
    audit = megarl("ledger", str(run), "--json")
    told = json.loads(audit.out)
    assert audit.code == 0 and told["trained"] == told["dispatched"] == groups, audit.err
    assert told["contradictions"] == [] and told["in_flight"] == [] and told["age_max"] == 1
    ended = [one for one in records(run / "ledger.jsonl") if one["event"] == "finished"]
    sampled = sum(rollout[1] for one in ended for rollout in one["rollouts"])
    assert sampled == sum(step["tokens/trained"] for step in records(run / "metrics.jsonl"))


def replays_bit_by_bit(run: Path, steps: int) -> None:
    """Of a run some of whose rollouts are trees."""
    replayed(run, steps)
    batches = (run / "batches").glob("step_*.rank_000.safetensors")
    assert any(len(part.branches) for path in batches for part in read_batch(path)[0].samples)
