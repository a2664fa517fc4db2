"""Rollouts of several turns on the real engine: trained on, shown, and equal to what the engine
itself recorded.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT, finish, megarl, records, start, tiny_run, write_recipe
from support.tiny import write_model

SESSION = """
from megarl.environments.session import Observation

class Echo:
    async def start(self, prompt):
        self.turns = 0
        return Observation("=" if int(prompt.answer) % 2 else "")

    async def step(self, text, token_ids):
        self.turns += 1
        reward = len(text) % 3 / 2
        if self.turns == 3 or len(token_ids) == 1:
            return {"reward": reward, "correct": len(text) % 2 == 0, "turns": self.turns}
        return Observation(",+", reward=reward)
"""

SEEN = """
import json
from megarl.environments.session import Answer

class Seen(Echo):
    async def start(self, prompt):
        self.is_single = int(prompt.answer) % 2 == 0
        return await super().start(prompt)

    async def step(self, text, token_ids):
        with open({path!r}, "a") as to:
            to.write(json.dumps([token_ids.tolist(), text]) + "\\n")
        if self.is_single:
            return Answer(text)
        said = await super().step(text, token_ids)
        return Observation("<s>,+", said.reward) if isinstance(said, Observation) else said
"""


def recipe_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of sessions of up to three turns, which end at a digit."""
    (folder / "own.py").write_text(SESSION)
    tree = tiny_run(folder, write_model(folder / "model"), steps=4)
    tree["environment"] = {"session": f"{folder}/own.py:Echo", "require_stop": False}
    tree["rollout"] |= {"max_new_tokens": 40, "max_staleness": 1, "stop": ["1", "2", "3", "4"]}
    tree["rollout"]["dynamic_sampling"] = {"enabled": False}
    tree["algorithm"] = {"credit": "turn", "correction": {"kind": "tis"}}
    tree["observe"] = {"transcripts_per_step": 4}
    return tree | changes


def test_a_run_of_several_turns(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", recipe_of(tmp_path))
    done = megarl("run", recipe)
    assert done.code == 0, done.err[-3000:]
    steps = records(tmp_path / "run" / "metrics.jsonl")
    groups = records(tmp_path / "run" / "transcripts.jsonl")
    assert len(steps) == 4 and len(groups) == 16
    assert all(step["grad_norm"] > 0 and step["verifier/errors"] == 0 for step in steps)
    several = 0
    for number, step in enumerate(steps, start=1):
        rollouts = [one for group in groups if group["step"] == number for one in group["rollouts"]]
        assert len(rollouts) == 16
        mean = sum(one["reward"] for one in rollouts) / len(rollouts)
        assert step["reward/mean"] == pytest.approx(mean)
        for one in rollouts:
            turns = one.get("turns", [])
            several += len(turns) > 2
            own = [turn for turn in turns if turn["by"] == "model"]
            if own:
                assert sum(turn["tokens"] for turn in own) == one["tokens"]
                assert sum(turn["reward"] for turn in own) == pytest.approx(one["reward"])
                assert "".join(turn["text"] for turn in turns) == one["response"]
            assert sum(span[1] for span in one["versions"]) == one["tokens"]
    assert several > 10
    assert {
        span[0] for group in groups for one in group["rollouts"] for span in one["versions"]
    } > {0}
    (evaluated, *_) = records(tmp_path / "run" / "evaluations.jsonl")
    assert any(len(one.get("turns", [])) > 2 for one in evaluated["transcripts"])
    report = (tmp_path / "run" / "report.html").read_text()
    assert "model, trained on" in report and "environment, read only" in report


def test_rollouts_are_printed_with_special_tokens(tmp_path: Path) -> None:
    """Those of prompt, model and environment; what is judged has none."""
    tree = recipe_of(tmp_path)
    tokenizer = with_bos(tmp_path / "model")
    seen = tmp_path / "seen.jsonl"
    (tmp_path / "own.py").write_text(SESSION + SEEN.format(path=str(seen)))
    tree["environment"] |= {
        "session": f"{tmp_path}/own.py:Seen",
        "verifier": f"{tmp_path}/reward.py:score",
    }
    tree["rollout"]["stop"] = ["1"]
    done = megarl("rollout", write_recipe(tmp_path / "recipe.yaml", tree), "--num", "12")
    assert done.code == 0, done.err[-3000:]
    assert len(re.findall(r"--- prompt ---\n<s>\d\+\d=\n", done.out)) == 12
    assert "--- environment, 3 tokens ---\n<s>,+\n" in done.out and "\x1b" not in done.out
    single = r"--- prompt ---\n.*\n--- model, .*\n.*\n--- (right|wrong), "
    assert re.search(single, done.out)
    shown = re.findall(r"--- model, .*\n(.*)\n", done.out)
    turns: list[Any] = records(seen)[-len(shown) :]  # those before are of the check at the start
    assert sorted(shown) == sorted(tokenizer.decode(ids) for ids, _ in turns)
    assert any(one.endswith("<eos>") for one in shown)
    assert all(text == tokenizer.decode(ids, skip_special_tokens=True) for ids, text in turns)
    rewards = [float(one) for one in re.findall(r"(?:right|wrong), reward (\S+?),?\s", done.out)]
    assert len(rewards) == 12 and sum(rewards) == sum(len(text) % 3 / 2 for _, text in turns)


def with_bos(folder: Path) -> Any:
    """The tokenizer in `folder`, of which texts begin with a special token from now on."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast.from_pretrained(str(folder), bos_token="<s>")
    first = [("<s>", made.bos_token_id)]
    made.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", None, first)
    made.save_pretrained(str(folder))
    return made


def test_rows_are_what_the_engine_recorded(tmp_path: Path) -> None:
    """Tokens to the last one, log-probs as those of transformers within 1e-4."""
    recipe = write_recipe(tmp_path / "recipe.yaml", recipe_of(tmp_path))
    tool = str(ROOT / "tools" / "bench" / "turns.py")
    done = finish(
        *start([sys.executable, tool, "exact", recipe, "--rollouts", "60", "--json"]),
        timeout_s=240.0,
    )
    assert done.code == 0 and done.survivors == [], done.err[-3000:]
    found = json.loads(done.out[done.out.index("{") :])
    assert found["requests"] > found["rollouts"] == 60 and found["failures"] == 0
    assert found["with_tools_or_observations"] > 30
    assert found["rows_that_differ"] == found["turns_that_differ"] == 0
    assert found["largest_logprob_difference"] < 1e-4
