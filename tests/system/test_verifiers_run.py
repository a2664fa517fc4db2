"""An environment of verifiers, trained through the gateway on the real engine."""

from __future__ import annotations

from pathlib import Path

from make_calculator import write_model
from support.commands import ROOT, megarl, records, tiny_run, write_recipe
from support.verifiers_sums import NEEDS, PYTHON, SUMS


@NEEDS
def test_rewards_are_those_of_the_environment(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = tmp_path / "model"
    write_model(model)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    (tmp_path / "sums.py").write_text(SUMS)
    tree = tiny_run(tmp_path, model, steps=2)
    arguments = {"size": 5, "python": PYTHON, "system": "add"}
    tree["prompts"] = {"source": "verifiers:sums", "arguments": arguments, "max_prompt_tokens": 32}
    tree["environment"] = {"agent": {"function": "verifiers"}}
    tree["rollout"] |= {"max_new_tokens": 40, "dynamic_sampling": {"enabled": False}}
    tree["observe"] = {"transcripts_per_step": 4}
    tree.pop("evaluation")
    path = f"{ROOT}:{tmp_path}"
    done = megarl("run", write_recipe(tmp_path / "recipe.yaml", tree), PYTHONPATH=path)
    assert done.code == 0, done.err[-3000:]
    groups = records(tmp_path / "run" / "transcripts.jsonl")
    found = [(group, one) for group in groups for one in group["rollouts"]]
    assert len(found) == 32 and not any(one["failure"] for _, one in found)
    for group, one in found:
        said = one["turns"][-1]["text"].strip()  # as verifiers reads it
        right = said == str(int(group["answer"].removeprefix("s")) + 3)
        assert one["reward"] == 0.5 * right + 0.25 * said.isdigit()
        assert one["metrics"]["letters"] == len(said)
    assert len({one["metrics"]["letters"] for _, one in found}) > 3
