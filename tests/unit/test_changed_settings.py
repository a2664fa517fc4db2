"""A run that goes on says which settings are not those it began with; and when 16-bit weights change
that come from a file of their dtype: by torch's own rounding.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import sft_config

from megarl.observe.observer import EVALUATIONS
from megarl.settings.config import RunConfig, dump
from megarl.settings.schema import Config
from megarl.settings.training import ModelConfig, OptimizerConfig, TrainingConfig
from megarl.trainer.context import changed_settings, rounding_line, steps_until_half_change


def learning(rate: float) -> TrainingConfig:
    return TrainingConfig(optimizer=OptimizerConfig(learning_rate=rate))


def rl(**sections: Any) -> RunConfig:
    """A recipe of reinforcement learning with these sections."""
    base: dict[str, Any] = {"folder": "run", "model": {"path": "model"}}
    return RunConfig(**base | {"prompts": {"source": "rows.jsonl"}} | sections)


def of(**environment: Any) -> RunConfig:
    column = {"environment_column": "kind"} if environment.get("mixture") else {}
    return rl(prompts={"source": "rows.jsonl", **column}, environment=environment)


def mixed(*weights: float, **more: Any) -> RunConfig:
    entries = [{"source": f"rows{n}.jsonl", "weight": one} for n, one in enumerate(weights)]
    entries[-1] |= more
    return rl(prompts={"sources": entries})


A, B = "a.py:score", "b.py:score"
OWN = {"advantage": "a.py:advantage"}
CHANGES: dict[str, tuple[Config, Config, list[str]]] = {
    "a number": (
        sft_config("run", training=learning(0.25)),
        sft_config("moved", training=learning(0.5)),
        ["training.optimizer.learning_rate (0.25 -> 0.5)"],
    ),
    "a verifier becomes rewards": (
        of(verifier="numeric"),
        of(rewards={A: 1.0}),
        [f"environment.rewards.{A} (none -> 1.0)", "environment.verifier (numeric -> exact_match)"],
    ),
    "rewards become a verifier": (
        of(rewards={A: 1.0}),
        of(),
        [f"environment.rewards.{A} (1.0 -> none)"],
    ),
    "a further reward, another weight": (
        of(rewards={A: 1.0}),
        of(rewards={A: 2.0, B: 1.0}),
        [f"environment.rewards.{A} (1.0 -> 2.0)", f"environment.rewards.{B} (none -> 1.0)"],
    ),
    "an entry of a mixture goes, one changes": (
        of(mixture={"easy": {"verifier": "numeric"}, "hard": {"verifier": "math"}}),
        of(mixture={"easy": {"verifier": "choice"}}),
        [
            "environment.mixture.easy.verifier (numeric -> choice)",
            "environment.mixture.hard ({...} -> none)",
        ],
    ),
    "rewards of an entry": (
        of(mixture={"easy": {"rewards": {A: 1.0}}}),
        of(mixture={"easy": {"rewards": {B: 1.0}}}),
        [
            f"environment.mixture.easy.rewards.{A} (1.0 -> none)",
            f"environment.mixture.easy.rewards.{B} (none -> 1.0)",
        ],
    ),
    "a critic more": (
        rl(algorithm=OWN, critics={"near": {}}),
        rl(algorithm=OWN, critics={"near": {"value_clip": None}, "far": {"warmup_steps": 2}}),
        ["critics.far (none -> {...})", "critics.near.value_clip (0.2 -> None)"],
    ),
    "sources: another weight, a setting, one more": (
        mixed(0.5, 0.5),
        mixed(0.5, 0.25, 0.25, template="chat"),
        [
            "prompts.sources[1].weight (0.5 -> 0.25)",
            "prompts.sources[2] (none -> {...})",
        ],
    ),
    "sources become one": (
        mixed(1.0),
        rl(),
        ["prompts.source ( -> rows.jsonl)", "prompts.sources[0] ({...} -> none)"],
    ),
    "a list of texts, and null": (
        rl(rollout={"stop": ["a"]}, environment={"thinking": None}),
        rl(rollout={"stop": ["a", "b"]}, environment={"thinking": ["<t>", "</t>"]}),
        [
            "environment.thinking (None -> ['<t>', '</t>'])",
            "rollout.stop (['a'] -> ['a', 'b'])",
        ],
    ),
    "settings of one's own": (
        rl(algorithm={**OWN, "own": {"tau": 0.5, "on": True}}),
        rl(algorithm={**OWN, "own": {"tau": 0.75}}),
        ["algorithm.own.on (True -> none)", "algorithm.own.tau (0.5 -> 0.75)"],
    ),
}  # fmt: skip
"""{what: (recipe before, recipe now, what is said)}"""


@pytest.mark.parametrize("case", CHANGES)
def test_settings_that_changed_are_listed(case: str, tmp_path: Path) -> None:
    before, now, said = CHANGES[case]
    file = tmp_path / "recipe.yaml"
    assert changed_settings(file, now) == ([], []), "no file, nothing to say"
    file.write_text(dump(before))
    assert changed_settings(file, before) == ([], [])
    changed, foreign = changed_settings(file, now)
    short = [re.sub(r"\{.*?(?=\)| ->)", "{...}", one) for one in changed]
    assert (sorted(short), foreign) == (said, [])


def test_settings_of_another_version_are_listed(tmp_path: Path) -> None:
    """Those that this version does not know, and new ones that the run sets."""
    file, config = tmp_path / "recipe.yaml", of(mixture={"easy": {}}, rewards={})
    text = dump(config).replace("training:\n", "training:\n  colour: {kind: red}\n")
    file.write_text(text.replace("easy:\n", "easy:\n      colour: [1]\n"))
    unknown = ["environment.mixture.easy.colour", "training.colour.kind"]
    changed, foreign = changed_settings(file, config)
    assert (changed, sorted(foreign)) == ([], unknown)
    file.write_text("folder: run\ndemonstrations: {source: rows.jsonl}\nmodel: {path: model}\n")
    assert changed_settings(file, sft_config(steps=7)) == (["steps (100 -> 7)"], [])


def started(folder: str, starts: list[tuple[Any, ...]]) -> list[tuple[bool, str]]:
    """What comes of `start` with each of these values, one after the other."""
    return [start(folder, *one) for one in starts]


def start(
    folder: str, steps: int, rate: float, done: int, evaluates: bool = False
) -> tuple[bool, str]:
    """Start a run of which `done` steps are done: (whether it is finished, its recipe then).
    `evaluates`: it has held-out rows.
    """
    from support.tiny import write_model

    from megarl.checkpoints.progress import Progress, write_progress
    from megarl.data.tokenizer import load_tokenizer
    from megarl.parallel.layout import Layout
    from megarl.trainer.context import RunInputs, open_context
    from megarl.trainer.model_config import load_model_config

    place, model = Path(folder), write_model(Path(folder) / "model")
    settings: Any = {"steps": steps, "training": learning(rate)}
    config = sft_config(folder, model=ModelConfig(path=str(model)), **settings)
    write_progress(place, Progress(done, done, 0, "", "", ""))
    tokenizer, described = load_tokenizer(config.model.path), load_model_config(config.model)
    resumes: Any = {"resume_from": place if done else None}
    resumes |= {"held_out_rows": [1]} if evaluates else {}
    inputs = RunInputs(Layout(), tokenizer, described, [1], "", **resumes)
    with open_context(config, inputs) as context:
        return context.is_finished(), (place / "recipe.yaml").read_text()


def test_a_finished_run_keeps_the_recipe_that_it_was_trained_by(tmp_path: Path) -> None:
    starts = [(8, 0.25, 0), (4, 0.5, 8), (8, 0.5, 8), (9, 0.5, 8)]
    (found,) = run_ranks(1, __file__, "started", str(tmp_path), starts)
    assert [finished for finished, _ in found] == [False, True, True, False]
    (_, first), *again, (_, further) = found
    assert "learning_rate: 0.25" in first and [recipe for _, recipe in again] == [first] * 2
    assert "learning_rate: 0.5" in further and "steps: 9" in further


def test_a_run_without_its_last_evaluation_is_not_finished(tmp_path: Path) -> None:
    """As after an interrupt in that evaluation, or a kill before it."""

    def is_finished(steps: int) -> bool:
        return run_ranks(1, __file__, "start", str(tmp_path), steps, 0.25, 8, True)[0][0]

    (tmp_path / EVALUATIONS).write_text('{"step": 4, "eval/loss": 1.0}\n')
    assert [is_finished(8), is_finished(7)] == [False, True], "weights of step 7 are gone"
    (tmp_path / EVALUATIONS).write_text('{"step": 8, "eval/loss": 1.0}\n')
    assert is_finished(8)


def changed(weights: torch.Tensor, moved: float) -> float:
    """Share of 16-bit weights that differ once their float32 copies have moved away from 0."""
    master = weights.float()
    return float(((master + moved * master.sign()).to(weights.dtype) != weights).float().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [2e-5, 0.02, 1.0, 37.0])
def test_half_of_the_weights_change_at_that_step_and_not_before(
    scale: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weights = (scale * torch.randn(300, 101)).to(dtype)
    steps = steps_until_half_change([weights[:200], weights[200:]], 1e-6)
    assert changed(weights, 0.99e-6 * steps) < 0.5 <= changed(weights, 1.01e-6 * steps)


def test_zeros_and_ranks_without_weights_count_for_nothing() -> None:
    assert steps_until_half_change([], 1e-6) == 0.0
    assert steps_until_half_change([torch.zeros(4).bfloat16()], 1e-6) == 0.0
    weights = torch.tensor([0.0, 0.0, 0.0, 0.05]).bfloat16()
    assert steps_until_half_change([weights], 1e-6) == pytest.approx(122.07, rel=1e-3)
    assert "before optimizer step 122;" in rounding_line("policy", [weights], 1e-6)
