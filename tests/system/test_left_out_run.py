"""A whole run whose reward function fails for a third of the responses equals, bit by bit, the run
in which these responses are never sampled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import megarl, records, tiny_run, write_recipe
from support.tiny import write_model

REWARD = """
import zlib
def score(prompt, response):
    number = zlib.crc32(f"{prompt.text}{response}".encode("utf-8", "replace"))
    if number % 3 == 0: raise ConnectionError("the judge is down")
    return number % 5 / 4
"""

NEVER_SAMPLED = """
import asyncio, importlib.util, json, os, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "megarl.rollout.service":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            never = set(map(tuple, json.loads(os.environ["NEVER_SAMPLED"])))
            async def generate(self, group, first, version):
                numbers = range(first, first + self.config.group_size - len(group.rollouts))
                sampled = [n for n in numbers if (group.ordinal, n) not in never]
                rollout = lambda n: self._rollout(group.prompt, group.ordinal, n, version)
                rollouts = await asyncio.gather(*map(rollout, sampled))
                return module.Group(group.ordinal, group.prompt, [*group.rollouts, *rollouts])
            module.RolloutService._generate = generate
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
"""A `sitecustomize.py`, which every new Python imports: some rollouts are never sampled."""
OF_ALL_SAMPLED = ("environment/", "verifier/", "length/", "tokens/generated", "publish/", "time/")
"""Beginnings of names of metrics that count failed rollouts too, or measure time."""


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of training of each step."""
    return [
        {
            name: value
            for name, value in step.items()
            if not name.startswith(OF_ALL_SAMPLED) and not name.endswith("_per_s")
        }
        for step in records(run / "metrics.jsonl")
    ]


def run_of(folder: Path, model: Path, **environment: str) -> tuple[Path, list[dict[str, Any]]]:
    """(a run's folder, the events of its ledger about finished groups)."""
    folder.mkdir()
    tree = tiny_run(folder, model, 4)
    (folder / "reward.py").write_text(REWARD)
    tree["environment"] |= {"max_failure_share": 0.9}
    # One sequence at a time: no rounding depends on what is sampled beside it.
    tree["rollout"]["engine"] = {"max_num_sequences": 1}
    del tree["evaluation"]
    done = megarl("run", write_recipe(folder / "recipe.yaml", tree), **environment)
    assert done.code == 0, done.err[-3000:]
    events = records(folder / "run" / "ledger.jsonl")
    return folder / "run", [event for event in events if event["event"] == "finished"]


@pytest.mark.nightly
@pytest.mark.slow
def test_failed_verdicts_change_nothing(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (tmp_path / "sitecustomize.py").write_text(NEVER_SAMPLED)
    run, groups = run_of(tmp_path / "fails", model)
    failed = [(group["ordinal"], n) for group in groups for n, *_ in group.get("left_out", ())]
    assert len(failed) > 0.25 * sum(len(group["rollouts"]) for group in groups)
    never = {"PYTHONPATH": str(tmp_path), "NEVER_SAMPLED": json.dumps(failed)}
    other, others = run_of(tmp_path / "absent", model, **never)
    assert not any(group.get("left_out") for group in others)
    assert steps_of(run) == steps_of(other) and len(steps_of(run)) == 4
    weights = (run / "checkpoints" / "step_000004").rglob("*.safetensors")
    for file in (compared := [path for path in weights if path.parent.name != "random"]):
        assert file.read_bytes() == (other / file.relative_to(run)).read_bytes(), file
    assert len(compared) > 1
