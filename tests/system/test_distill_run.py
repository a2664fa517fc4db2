"""`task: distill` as a user runs it: real engines, a larger teacher on a rank of its own, no verifier."""

from __future__ import annotations

import json
from pathlib import Path

from support.commands import PROBE_BOUND, megarl, records, tiny_run, write_recipe
from support.tiny import write_model


def test_a_policy_learns_from_a_teacher_on_a_rank_of_its_own(tmp_path: Path) -> None:
    student = write_model(tmp_path / "model", biases=True)
    teacher = write_model(
        tmp_path / "teacher", seed=7, hidden_size=96, num_hidden_layers=3, vocab_size=48
    )
    tree = tiny_run(tmp_path, student, 5)
    tree["environment"] = {"verifier": "none"}
    tree["rollout"] |= {"groups_per_step": 8, "group_size": 1, "max_staleness": 1, "top_p": 0.95}
    tree["teacher"] = {"model": {"path": str(teacher)}, "ranks": [1]}
    tree["distillation"] = {"divergence": "jensen_shannon", "beta": 0.9}
    tree["training"] |= {"zero_stage": 2, "checkpoint": {"every_minutes": 1e-6}}  # each step
    done = megarl("run", write_recipe(tmp_path / "recipe.yaml", tree), ranks=2)
    assert done.code == 0, done.err[-4000:]
    assert json.loads(done.out)["steps"] == 5
    steps = records(tmp_path / "run" / "metrics.jsonl")
    assert [one["tokens/trained"] > 0 for one in steps] == [True] * 5
    assert steps[-1]["divergence"] < 0.8 * steps[0]["divergence"]
    assert steps[-1]["teacher_logprob"] > steps[0]["teacher_logprob"]
    assert max(one["probe/max_abs"] for one in steps) < PROBE_BOUND
    assert "mismatch/mean_abs" not in steps[0], "the engines' law is truncated by top_p"
    assert max(one["groups/rejected"] for one in steps) == 0, "equal rewards are no reason"
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.name for path in saved] == ["step_000004", "step_000005"]
    assert (saved[-1] / "model" / "config.json").exists()
