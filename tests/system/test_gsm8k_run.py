"""Three DAPO steps on GSM8K's schema with a small untrained model: the real path, with honest
rewards. And five steps of the recipe for two GPUs.

With MEGARL_GSM8K set to a folder that holds GSM8K's train.jsonl, on the real problems; else on a
few made in its schema. With MEGARL_GSM8K_MODEL set to a folder of Qwen2.5-0.5B-Instruct the recipe
for GPUs trains that model, and the verifier is the recipe's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHATML, tokenizer_of
from support.commands import ROOT, megarl, records
from support.tiny import write_model

STEPS = 5
"""Of the recipe for GPUs."""


def prepared(tmp_path: Path) -> tuple[Path, Path]:
    """(folder of a small untrained model, file of problems)."""
    model = write_model(tmp_path / "model", vocab_size=320, max_position_embeddings=2048)
    tokenizer_of(CHATML).save_pretrained(model)
    where = os.environ.get("MEGARL_GSM8K", "")
    source = Path(where) / "train.jsonl"
    if not where:
        source = tmp_path / "train.jsonl"
        rows = [
            {
                "question": f"Ann has {n} pears and buys {n} more. How many?",
                "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>\n#### {2 * n}",
            }
            for n in range(1, 40)
        ]
        source.write_text("\n".join(map(json.dumps, rows)))
    return model, source


@pytest.mark.nightly
def test_three_steps_on_gsm8k_finish_with_honest_rewards(tmp_path: Path) -> None:
    model, source = prepared(tmp_path)
    run = tmp_path / "run"
    overrides = [f"--folder={run}", f"--model.path={model}", f"--prompts.source={source}"]
    recipe = str(ROOT / "launch/recipes/gsm8k_tiny_cpu.yaml")
    done = megarl("run", recipe, *overrides, "--model.from_scratch=true")
    assert done.code == 0, done.err[-4000:]
    rows = records(run / "metrics.jsonl")
    assert len(rows) == 3
    for row in rows:
        assert row["accuracy"] <= 0.05, "the verifier is wrong: the model is untrained"
        assert row["verifier/errors"] == row["verifier/timeouts"] == row["verifier/nans"] == 0
        assert row["probe/max_abs"] < 1e-4


def on_two_gpus(tmp_path: Path) -> list[str]:
    """The words after `megarl run` for a few steps of the recipe."""
    model, source = prepared(tmp_path)
    words = [f"--folder={tmp_path / 'run'}", f"--steps={STEPS}", f"--prompts.source={source}"]
    words += ["--evaluation.every=0", f"--evaluation.prompts.source={source}"]
    if real := os.environ.get("MEGARL_GSM8K_MODEL"):
        words += [f"--model.path={real}"]
    else:  # an untrained model answers nothing right, and equal rewards would train nothing
        reward = tmp_path / "reward.py"
        reward.write_text("def score(prompt, response):\n    return (len(response) % 3) / 2\n")
        words += [f"--model.path={model}", f"--environment.verifier={reward}:score"]
        words += ["--rollout.groups_per_step=8", "--environment.require_stop=false"]
    return [str(ROOT / "launch/recipes/gsm8k.yaml"), *words]


def test_the_recipe_for_two_gpus_is_planned(tmp_path: Path) -> None:
    recipe, *words = on_two_gpus(tmp_path)
    done = megarl("run", recipe, "--dry-run", "--gpus-per-node", "2", *words)
    assert done.code == 0, done.err[-4000:]


@pytest.mark.gpu
def test_the_recipe_for_two_gpus(tmp_path: Path, record_property: Any) -> None:
    done = megarl("run", *on_two_gpus(tmp_path), timeout_s=550)
    assert done.code == 0, done.err[-4000:]
    rows = records(tmp_path / "run/metrics.jsonl")
    names = ("accuracy", "tokens/generated_per_s", "mismatch/mean_abs", "time/publish_s")
    record_property("numbers", json.dumps([[row.get(name) for name in names] for row in rows]))
    assert len(rows) == STEPS
    for row in rows:
        assert row["verifier/errors"] == row["verifier/timeouts"] == row["verifier/nans"] == 0
        assert row["tokens/trained"] > 0 and row["mismatch/mean_abs"] < 0.05, row
