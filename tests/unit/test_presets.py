"""Algorithms by name mean their settings, and nothing that contradicts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import tiny_run, write_recipe

import megarl
from megarl.settings import config
from megarl.settings.config import RunConfig
from megarl.settings.presets import PRESETS


def recipe(folder: Path, algorithm: Any) -> Path:
    tree = tiny_run(folder, folder / "model", 3) | {"algorithm": algorithm}
    write_recipe(folder / "recipe.yaml", tree)
    return folder / "recipe.yaml"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_settings(name: str, tmp_path: Path) -> None:
    found = config.read(RunConfig, recipe(tmp_path, {"preset": name}))
    given = dict(found.algorithm)
    assert {key: given[key] for key in PRESETS[name]} == PRESETS[name]
    again = tmp_path / "printed.yaml"
    again.write_text(config.dump(found))
    assert config.read(RunConfig, again) == found, "what is printed means the same"
    by_command = config.read(RunConfig, recipe(tmp_path, {}), [f"--algorithm.preset={name}"])
    assert by_command.algorithm == found.algorithm


def test_a_name_alone_is_enough(tmp_path: Path) -> None:
    more = ["--algorithm.entropy_coefficient", "0.5"]
    for written, words in (("gspo", more), ("dapo", ["--algorithm=gspo", *more])):
        found = config.read(RunConfig, recipe(tmp_path, written), words)
        assert (found.algorithm.loss, found.algorithm.entropy_coefficient) == ("gspo", 0.5)
        assert yaml.safe_load(config.dump(found))["algorithm"]["preset"] == "gspo"
    with pytest.raises(ValueError, match=r"algorithm\.preset is 'gspo'.*clip_high"):
        config.read(RunConfig, recipe(tmp_path, {"clip_high": 0.1}), ["--algorithm", "gspo"])


@pytest.mark.parametrize("name", PRESETS)
def test_what_contradicts_a_preset_is_refused(name: str, tmp_path: Path) -> None:
    other = "rloo" if PRESETS[name]["advantage"] == "grpo" else "grpo"
    says = rf"preset is '{name}', which means algorithm\.advantage .*, but .* is {other}"
    with pytest.raises(ValueError, match=says):
        config.read(RunConfig, recipe(tmp_path, {"preset": name, "advantage": other}))
    with pytest.raises(ValueError, match=says):
        config.read(RunConfig, recipe(tmp_path, name), ["--algorithm.advantage", other])


def test_a_preset_from_python(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"entropy_coefficient": 0.5})
    by_key = megarl.load_recipe(RunConfig, path, algorithm__preset="gspo")
    assert (by_key.algorithm.loss, by_key.algorithm.entropy_coefficient) == ("gspo", 0.5)
    assert megarl.load_recipe(RunConfig, path, algorithm="gspo").algorithm.loss == "gspo"
    with pytest.raises(ValueError, match="which means"):
        megarl.load_recipe(RunConfig, path, algorithm__preset="gspo", algorithm__loss="cispo")


def test_the_token_limit_of_dr_grpo_is_that_of_the_rollouts(tmp_path: Path) -> None:
    found = config.read(RunConfig, recipe(tmp_path, "dr_grpo"))
    assert found.algorithm.constant_tokens == found.rollout.max_new_tokens == 12
    with pytest.raises(ValueError, match=r"algorithm\.preset.*'dapo'"):
        config.read(RunConfig, recipe(tmp_path, "dappo"))
