"""Which command a recipe is for, by its keys."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from megarl import presets
from megarl.config import COMMANDS, AnyConfig, PreferenceConfig, unknown_keys
from megarl.recipe_file import override


def recipe_kind(tree: dict[str, Any], overrides: Sequence[str] = ()) -> type[AnyConfig]:
    """The configuration class of a recipe, given as nested dicts: the class that lacks the fewest
    of its keys, `RunConfig` before the others. `overrides`: words of a command line that replace
    settings. Preferences that a reward model could learn from as well are for `PreferenceConfig`.
    """
    lacked = {
        kind: len(unknown_keys(kind, tree)) for kind in COMMANDS if issubclass(kind, AnyConfig)
    }
    kinds = [kind for kind, count in lacked.items() if count == min(lacked.values())]
    if kinds[0] is not PreferenceConfig:
        return kinds[0]
    # The two differ in what they may set: the one that accepts more of the recipe is meant.
    return min(kinds, key=lambda kind: _count_mistakes(kind, tree, overrides))


def _count_mistakes(kind: type[AnyConfig], tree: dict[str, Any], words: Sequence[str]) -> int:
    """Number of errors that configuration class `kind` finds in the recipe `tree`, after the words
    `words` of a command line have replaced settings in a copy of it.
    """
    changed = copy.deepcopy(tree)
    override(changed, kind, [presets.long_word(word) for word in words])
    try:
        kind.model_validate(changed)
    except ValidationError as error:
        return error.error_count()
    return 0
