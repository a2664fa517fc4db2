"""A run that goes on says which settings are not those it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.ranks import run_ranks
from support.tiny import sft_config

from megarl.config import SftConfig, dump
from megarl.trainer.config import ModelConfig, OptimizerConfig, TrainingConfig
from megarl.trainer.context import changed_settings, unknown_settings


def learning(rate: float) -> TrainingConfig:
    return TrainingConfig(optimizer=OptimizerConfig(learning_rate=rate))


def test_changed_settings_are_listed(tmp_path: Path) -> None:
    def recipe(folder: str, rate: float) -> SftConfig:
        return sft_config(folder, training=learning(rate))

    file = tmp_path / "recipe.yaml"
    assert changed_settings(file, recipe("run", 0.25)) == []
    file.write_text(dump(recipe("run", 0.25)))
    assert changed_settings(file, recipe("moved", 0.25)) == []
    (changed,) = changed_settings(file, recipe("run", 0.5))
    assert changed == "training.optimizer.learning_rate (0.25 -> 0.5)"


def start(folder: str, steps: int, rate: float, done: int) -> tuple[bool, str]:
    """Start a run of which `done` steps are done: (whether it is finished, its recipe then)."""
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
    inputs = RunInputs(Layout(), tokenizer, described, [1], "", **resumes)
    with open_context(config, inputs) as context:
        return context.is_finished(), (place / "recipe.yaml").read_text()


def test_a_finished_run_keeps_the_recipe_that_it_was_trained_by(tmp_path: Path) -> None:
    starts = [(8, 0.25, 0), (4, 0.5, 8), (8, 0.5, 8), (9, 0.5, 8)]
    found = [run_ranks(1, __file__, "start", str(tmp_path), *one)[0] for one in starts]
    assert [finished for finished, _ in found] == [False, True, True, False]
    (_, first), *again, (_, further) = found
    assert "learning_rate: 0.25" in first and [recipe for _, recipe in again] == [first] * 2
    assert "learning_rate: 0.5" in further and "steps: 9" in further


def test_settings_of_another_version_are_named(tmp_path: Path) -> None:
    config = sft_config()
    file = tmp_path / "recipe.yaml"
    assert unknown_settings(file, config) == []
    file.write_text(dump(config))
    assert unknown_settings(file, config) == []
    file.write_text(dump(config).replace("training:\n", "training:\n  colour: {kind: red}\n"))
    assert unknown_settings(file, config) == ["training.colour.kind"]
