"""A whole run with a reward server beside a verifier that begins to fail: it ends at that step, with
what was learned before.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.commands import megarl, records, tiny_run, write_recipe
from support.reward_servers import Scripted, serving
from support.tiny import write_model

from megarl.checkpoints.manifest import damage

VERIFIER = """
import os
from pathlib import Path

calls = 0

def score(prompt, response):
    global calls
    calls += 1
    if calls > 32:  # two steps of 4 x 4
        raise KeyError("gold")
    around = [Path(f"/proc/{pid}/environ").read_bytes() for pid in (os.getpid(), os.getppid())]
    seen = sum(b"hush" in one for one in around)
    return {"reward": (len(response) % 3) / 2, "seen": seen}
"""


def test_a_verifier_that_begins_to_fail_at_step_3(tmp_path: Path) -> None:
    tree = tiny_run(tmp_path, write_model(tmp_path / "model"), steps=6)
    del tree["evaluation"]
    tree["rollout"]["dynamic_sampling"] = {"enabled": False}
    (tmp_path / "reward.py").write_text(VERIFIER)
    server = Scripted(score=lambda sample: float(len(sample["response"])))
    with serving(server) as url:
        tree["environment"] = {
            "rewards": {f"{tmp_path}/reward.py:score": 1.0, url: 0.5},
            "remote": {"token_variable": "REWARD_TOKEN"},
            "require_stop": False,
            "isolate": False,  # the verifier looks into the environment of the actor above it
        }
        recipe = write_recipe(tmp_path / "recipe.yaml", tree)
        done = megarl("run", recipe, REWARD_TOKEN="hush")  # noqa: S106
    assert done.code == 2 and done.out == "", done.err[-3000:]
    # What the clean-up says, such as that a checkpoint is saved, comes after it.
    (said,) = [line for line in done.err.splitlines() if line.startswith("megarl: error")]
    assert said.startswith("megarl: error: step 3: the verifier failed for 16 of 16 responses")
    assert "KeyError: 'gold'" in said and "environment.max_failure_share" in said
    rows = records(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        lengths, own = row["environment/reward/127.0.0.1"], row["environment/reward/score"]
        assert row["reward/mean"] == pytest.approx(own + 0.5 * lengths) and lengths > 0
        assert row["environment/score/seen"] == 0, "the token, in the worker or the actor above it"
    assert {headers["authorization"] for headers in server.headers} == {"Bearer hush"}
    trained = [one for samples in server.requests for one in samples if one["prompt"]["token_ids"]]
    assert len(trained) >= 48
    (kept,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert kept.name == "step_000002" and damage(kept) == ""
    weights = load_file(kept / "model" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
