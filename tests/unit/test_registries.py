"""The names that a recipe may use are the entries that exist, in the same order."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from megarl.loops.rl import METHODS
from megarl.objectives import config
from megarl.objectives.advantages import ADVANTAGES
from megarl.objectives.corrections import CORRECTIONS
from megarl.objectives.kl import KL_ESTIMATORS
from megarl.objectives.losses import AGGREGATIONS, LOSSES
from megarl.objectives.token_advantages import TOKEN_ADVANTAGES
from megarl.presets import PRESETS
from megarl.recipe_paths import IsPath
from megarl.rollout.config import FILTER, RolloutConfig
from megarl.rollout.service import FILTERS

EVERY_ADVANTAGE = ADVANTAGES | TOKEN_ADVANTAGES
REGISTRIES: dict[str, tuple[Any, dict[str, Any], type, str]] = {
    "advantages": (config.ADVANTAGE, EVERY_ADVANTAGE, config.AlgorithmConfig, "advantage"),
    "losses": (config.LOSS, LOSSES, config.AlgorithmConfig, "loss"),
    "aggregations": (config.AggregationName, AGGREGATIONS, config.AlgorithmConfig, "aggregation"),
    "kl": (config.KLName, KL_ESTIMATORS, config.KLConfig, "estimator"),
    "presets": (config.PresetName, {"": None, **PRESETS}, config.AlgorithmConfig, "preset"),
    "corrections": (config.CORRECTION, CORRECTIONS, config.CorrectionConfig, "kind"),
    "methods": (config.METHOD, METHODS, config.AlgorithmConfig, "method"),
    "filters": (FILTER, {"": None, **FILTERS}, RolloutConfig, "filter"),
}


@pytest.mark.parametrize("registry", REGISTRIES)
def test_names_are_the_keys_and_the_setting_uses_them(registry: str) -> None:
    names, entries, settings, field = REGISTRIES[registry]
    known = names.names if isinstance(names, IsPath) else get_args(names)
    assert list(known) == list(entries)
    hint = get_type_hints(settings, include_extras=isinstance(names, IsPath))[field]
    assert hint == names or names in get_args(hint)
    assert getattr(settings(), field) in entries


@pytest.mark.parametrize(
    "registry", [name for name in REGISTRIES if name not in ("presets", "methods", "filters")]
)
def test_every_entry_is_named_and_explained(registry: str) -> None:
    _, entries, _, _ = REGISTRIES[registry]
    for name, function in entries.items():
        assert function.__name__ == name
        assert function.__doc__, f"{name} needs a docstring with its formula and source"
