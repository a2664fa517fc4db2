"""The names that a recipe may use are the entries that exist, in the same order."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from megarl.objectives.advantages import ADVANTAGES
from megarl.objectives.corrections import CORRECTIONS
from megarl.objectives.kl import KL_ESTIMATORS
from megarl.objectives.losses import AGGREGATIONS, LOSSES
from megarl.objectives.token_advantages import TOKEN_ADVANTAGES
from megarl.rollout.service import FILTERS
from megarl.run.loop import METHODS
from megarl.settings import objectives
from megarl.settings.presets import PRESETS
from megarl.settings.recipe_paths import IsPath
from megarl.settings.rollout import FILTER, RolloutConfig

EVERY_ADVANTAGE = ADVANTAGES | TOKEN_ADVANTAGES
REGISTRIES: dict[str, tuple[Any, dict[str, Any], type, str]] = {
    "advantages": (objectives.ADVANTAGE, EVERY_ADVANTAGE, objectives.AlgorithmConfig, "advantage"),
    "losses": (objectives.LOSS, LOSSES, objectives.AlgorithmConfig, "loss"),
    "aggregations": (objectives.AggregationName, AGGREGATIONS, objectives.AlgorithmConfig,
     "aggregation"),
    "kl": (objectives.KLName, KL_ESTIMATORS, objectives.KLConfig, "estimator"),
    "presets": (objectives.PresetName, {"": None, **PRESETS}, objectives.AlgorithmConfig, "preset"),
    "corrections": (objectives.CORRECTION, CORRECTIONS, objectives.CorrectionConfig, "kind"),
    "methods": (objectives.METHOD, METHODS, objectives.AlgorithmConfig, "method"),
    "filters": (FILTER, {"": None, **FILTERS}, RolloutConfig, "filter"),
}  # fmt: skip


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
