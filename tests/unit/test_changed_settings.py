"""A run that goes on says which settings are not those it began with."""

from __future__ import annotations

from pathlib import Path

from megarl.config import SftConfig, dump
from megarl.data.config import DemonstrationsConfig
from megarl.trainer.changed_settings import changed_settings, unknown_settings
from megarl.trainer.config import ModelConfig, OptimizerConfig, TrainingConfig


def test_changed_settings_are_listed(tmp_path: Path) -> None:
    def recipe(folder: str, rate: float) -> SftConfig:
        return SftConfig(
            folder=folder,
            model=ModelConfig(path="model"),
            demonstrations=DemonstrationsConfig(source="rows.jsonl"),
            training=TrainingConfig(optimizer=OptimizerConfig(learning_rate=rate)),
        )

    file = tmp_path / "recipe.yaml"
    assert changed_settings(file, recipe("run", 0.25)) == []
    file.write_text(dump(recipe("run", 0.25)))
    assert changed_settings(file, recipe("moved", 0.25)) == []
    (changed,) = changed_settings(file, recipe("run", 0.5))
    assert changed == "training.optimizer.learning_rate (0.25 -> 0.5)"


def test_settings_of_another_version_are_named(tmp_path: Path) -> None:
    config = SftConfig(
        folder="run",
        model=ModelConfig(path="model"),
        demonstrations=DemonstrationsConfig(source="rows.jsonl"),
    )
    file = tmp_path / "recipe.yaml"
    assert unknown_settings(file, config) == []
    file.write_text(dump(config))
    assert unknown_settings(file, config) == []
    file.write_text(dump(config).replace("training:\n", "training:\n  colour: {kind: red}\n"))
    assert unknown_settings(file, config) == ["training.colour.kind"]
