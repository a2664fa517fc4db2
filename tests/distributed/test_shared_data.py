"""Rank 0 alone reads and tokenises the data; the other ranks train on what it sends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import megarl, records, write_recipe, write_rows
from support.tiny import write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl import cli

ROWS = [{"prompt": f"{n}+{n}=", "response": str(2 * n) * (1 + n % 3)} for n in range(10, 30)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


def recipe(folder: Path, model: str, rows: list[dict[str, Any]]) -> str:
    data = {"source": write_rows(folder / "data.jsonl", rows)}
    tree = {
        "folder": str(folder / "run"),
        "epochs": 0.9,  # 18 of 20 rows: 3 steps
        "samples_per_step": 6,
        "model": {"path": model},
        "demonstrations": data | {"max_tokens": 20},
        "evaluation": {"demonstrations": data | {"limit": 13}, "every": 2},
    }
    return write_recipe(folder / "recipe.yaml", tree)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [row for row in records(folder / "run" / "metrics.jsonl") if "loss" in row]


def loss_by_transformers(model: str, rows: list[dict[str, Any]]) -> float:
    """Mean of -log-prob over the tokens of the responses, each with its end."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(model)
    terms = []
    for row in rows:
        prompt = tokenizer(row["prompt"]).input_ids
        reply = tokenizer(row["response"], add_special_tokens=False).input_ids
        ids = torch.tensor([*prompt, *reply, tokenizer.eos_token_id])
        logp = torch.log_softmax(whole(ids[None]).logits[0, :-1], -1)
        terms.append(logp.gather(1, ids[1:, None])[len(prompt) - 1 :, 0])
    return -torch.cat(terms).mean().item()


def test_two_ranks_train_as_one_on_what_rank_0_sends(model: str, tmp_path: Path) -> None:
    found, evaluated = {}, {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        done = megarl("run", recipe(folder, model, ROWS), ranks=ranks)
        assert done.code == 0, done.err
        found[ranks] = metrics(folder)
        evaluated[ranks] = records(folder / "run" / "evaluations.jsonl")
        assert [row["step"] for row in evaluated[ranks]] == [0, 2, 3]
        first = evaluated[ranks][0]["eval/loss"]
        assert first == pytest.approx(loss_by_transformers(model, ROWS[:13]), rel=1e-5)
    assert len(found[1]) == len(found[2]) == 3
    for one, two in zip(found[1], found[2], strict=True):
        assert one["tokens/trained"] == two["tokens/trained"]
        for name in ("loss", "grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-5)
    for one, two in zip(evaluated[1], evaluated[2], strict=True):
        assert two["eval/loss"] == pytest.approx(one["eval/loss"], rel=1e-5)
        assert one["eval/tokens"] == two["eval/tokens"]
    assert "steps: 3" in (tmp_path / "2" / "run" / "recipe.yaml").read_text()


@pytest.mark.parametrize("task", ["rl", "sft"])
def test_ranks_but_the_first_do_not_read(
    task: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only a rank that reads would find: there is no such file."""
    tree: dict[str, Any] = {"folder": str(tmp_path / "run"), "model": {"path": model}, "steps": 1}
    missing = {"source": str(tmp_path / "missing.jsonl")}
    if task == "sft":
        tree |= {"demonstrations": missing, "samples_per_step": 4}
    else:
        tree |= {
            "prompts": missing | {"max_prompt_tokens": 8},
            "evaluation": {"prompts": missing | {"max_prompt_tokens": 8}},
            "rollout": {"groups_per_step": 4, "group_size": 2, "max_new_tokens": 8},
        }
    path = write_recipe(tmp_path / "recipe.yaml", tree)
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "2"}
    for name, value in (place | {"LOCAL_WORLD_SIZE": "2", "RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    assert cli.plan(["run", path, "--check"]).run() == 0
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(cli.UserError, match=r"missing\.jsonl does not exist"):
        cli.plan(["run", path, "--check"]).run()


def test_a_bad_row_is_one_message_of_the_run(model: str, tmp_path: Path) -> None:
    rows = [*ROWS[:7], ROWS[7] | {"response": "1" * 30}, *ROWS[8:]]
    done = megarl("run", recipe(tmp_path, model, rows), ranks=2)
    assert done.code != 0
    assert done.err.count("megarl: error") == 1
    assert "data.jsonl, line 8 (row 7, counted from 0)" in done.err
    assert not (tmp_path / "run").exists(), "nothing was started"
