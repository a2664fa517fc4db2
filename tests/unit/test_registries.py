"""The names that a recipe may use are the entries that exist, in the same order."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from megarl.objectives import config
from megarl.objectives.advantages import ADVANTAGES
from megarl.objectives.corrections import CORRECTIONS
from megarl.objectives.kl import KL_ESTIMATORS
from megarl.objectives.losses import AGGREGATIONS, LOSSES
from megarl.objectives.token_advantages import TOKEN_ADVANTAGES
from megarl.presets import PRESETS

REGISTRIES: dict[str, tuple[Any, dict[str, Any], type, str]] = {
    "advantages": (
        config.AdvantageName,
        {**ADVANTAGES, **TOKEN_ADVANTAGES},
        config.AlgorithmConfig,
        "advantage",
    ),
    "losses": (config.LossName, LOSSES, config.AlgorithmConfig, "loss"),
    "aggregations": (config.AggregationName, AGGREGATIONS, config.AlgorithmConfig, "aggregation"),
    "kl": (config.KLName, KL_ESTIMATORS, config.KLConfig, "estimator"),
    "presets": (config.PresetName, {"": None, **PRESETS}, config.AlgorithmConfig, "preset"),
    "corrections": (config.CorrectionName, CORRECTIONS, config.CorrectionConfig, "kind"),
}


@pytest.mark.parametrize("registry", REGISTRIES)
def test_names_are_the_keys(registry: str) -> None:
    names, entries, _, _ = REGISTRIES[registry]
    assert list(get_args(names)) == list(entries)


@pytest.mark.parametrize("registry", REGISTRIES)
def test_setting_uses_these_names_and_its_default_exists(registry: str) -> None:
    names, entries, settings, field = REGISTRIES[registry]
    assert get_type_hints(settings)[field] == names
    assert getattr(settings(), field) in entries


@pytest.mark.parametrize("registry", [name for name in REGISTRIES if name != "presets"])
def test_every_entry_is_named_and_explained(registry: str) -> None:
    _, entries, _, _ = REGISTRIES[registry]
    for name, function in entries.items():
        assert function.__name__ == name
        assert function.__doc__, f"{name} needs a docstring with its formula and source"
