"""Whole runs under a layout: ranks that share samples and tokens learn what one rank learns, and
their checkpoint resumes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import PROBE_BOUND, megarl, records, tiny_run, write_recipe
from support.tiny import write_model

LAYOUT = {"layout": {"data": 1, "sequence": 2, "tensor": 2}, "zero_stage": 3}
CLOSE = {
    "loss": 1e-4,
    "grad_norm": 1e-4,
    "entropy": 1e-4,
    "kl": 1e-5,
    "reward/mean": 1e-6,
    "length/mean": 1e-6,
}
BESIDE = {"ranks": [1], "zero_stage": 3}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    write_model(folder / "model", num_attention_heads=2, num_key_value_heads=1, tied=True)
    return folder


def run(
    place: Path,
    name: str,
    ranks: int,
    *arguments: str,
    reference: dict[str, Any] | None = None,
    **training: Any,
) -> list[dict[str, Any]]:
    """Metrics of three steps; the recipe is the same but for `reference` and `training`."""
    tree = tiny_run(place, place / "model", 3) | {
        "folder": str(place / name),
        "evaluation": {},
        "algorithm": {"kl": {"coefficient": 0.05}},
        "reference": reference or {},
    }
    tree["training"] = tree["training"] | training
    done = megarl("train", write_recipe(place / f"{name}.yaml", tree), *arguments, ranks=ranks)
    assert done.code == 0, done.err[-4000:]
    return records(place / name / "metrics.jsonl")


def test_four_ranks_learn_what_one_does_and_resume(place: Path) -> None:
    """Tied embeddings, one key head for two ranks, ZeRO 3: published whole to a real engine after
    every step.
    """
    alone, together = run(place, "alone", 1), run(place, "together", 4, **LAYOUT)
    # The same with the reference on a rank of its own.
    beside = run(place, "beside", 2, reference=BESIDE)
    for one, other in [*zip(alone, together, strict=True), *zip(alone, beside, strict=True)]:
        assert other["probe/max_abs"] < PROBE_BOUND and other["mismatch/max_abs"] < PROBE_BOUND
        assert other["tokens/trained"] == one["tokens/trained"]
        for name, bound in CLOSE.items():
            assert abs(one[name] - other[name]) <= bound * max(1.0, abs(one[name])), (
                name,
                one["step"],
            )
    # The last checkpoint is damaged: the run goes back one and comes out bit by bit the same.
    newest = place / "together" / "checkpoints" / "step_000003" / "run.json"
    newest.write_text(newest.read_text() + " ")
    again = run(place, "together", 4, "--resume", "True", **LAYOUT)
    assert [row["step"] for row in again] == [0, 1, 2]
    assert {name: again[2][name] for name in CLOSE} == {name: together[2][name] for name in CLOSE}


def test_supervised_training_under_a_layout(place: Path) -> None:
    rows = [{"prompt": f"{a}+{b}=", "response": f"{a + b}"} for a in range(6) for b in range(6)]
    (place / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for ranks, training in ((1, {}), (4, {"layout": {"data": 1, "sequence": 4}, "zero_stage": 2})):
        tree = {
            "folder": str(place / f"sft{ranks}"),
            "steps": 3,
            "samples_per_step": 7,
            "model": {"path": str(place / "model")},
            "demonstrations": {"source": str(place / "demonstrations.jsonl")},
            "training": {"micro_batch_tokens": 16, "optimizer": {"learning_rate": 1e-3}} | training,
        }
        done = megarl("sft", write_recipe(place / f"sft{ranks}.yaml", tree), ranks=ranks)
        assert done.code == 0, done.err[-4000:]
        found[ranks] = records(place / f"sft{ranks}" / "metrics.jsonl")
    for one, other in zip(found[1], found[4], strict=True):
        assert abs(one["loss"] - other["loss"]) < 1e-5 * one["loss"]
        assert abs(one["grad_norm"] - other["grad_norm"]) < 1e-4 * one["grad_norm"]
