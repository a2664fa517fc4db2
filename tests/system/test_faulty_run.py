"""A whole run whose verifier begins to fail: it ends at that step, with what was learned before."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from support.commands import megarl, records, tiny_run, write_recipe
from support.tiny import write_model

from megarl.checkpoints.manifest import damage

VERIFIER = """
calls = 0

def score(prompt, response):
    global calls
    calls += 1
    if calls > 32:  # two steps of 4 x 4
        raise KeyError("gold")
    return (len(response) % 3) / 2
"""


def test_a_verifier_that_begins_to_fail_at_step_3(tmp_path: Path) -> None:
    tree = tiny_run(tmp_path, write_model(tmp_path / "model"), steps=6)
    del tree["evaluation"]
    tree["rollout"]["dynamic_sampling"] = {"enabled": False}
    (tmp_path / "reward.py").write_text(VERIFIER)
    done = megarl("train", write_recipe(tmp_path / "recipe.yaml", tree))
    said = done.err.strip().splitlines()[-1]
    assert done.code == 2 and done.out == "", done.err[-3000:]
    assert said.startswith("megarl: error: step 3: the verifier failed for 16 of 16 responses")
    assert "KeyError: 'gold'" in said and "environment.max_failure_share" in said
    assert len(records(tmp_path / "run" / "metrics.jsonl")) == 2
    (kept,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert kept.name == "step_000002" and damage(kept) == ""
    weights = load_file(kept / "model" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
