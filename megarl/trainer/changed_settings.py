"""Which settings of a run folder's recipe differ from those with which a run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.config import AnyConfig, as_plain
from megarl.recipe_file import read_tree
from megarl.schema import shortened

OF_THE_CHECKPOINT = ("folder", "resume", "training.lora.adapter")
"""Settings of a resumed run whose change is no news: what they say counts for a new run only."""


def changed_settings(recipe: Path, config: AnyConfig) -> list[str]:
    """The settings of `config` that are not those of the run folder's file `recipe`, each as
    "section.key (old -> new)"; none where that file cannot be read.
    """
    before, now = _settings(recipe), dict(_leaves(as_plain(config)))
    return [
        f"{name} ({shortened(str(before[name]))} -> {shortened(str(value))})"
        for name, value in now.items()
        if name in before and before[name] != value and name not in OF_THE_CHECKPOINT
    ]


def unknown_settings(recipe: Path, config: AnyConfig) -> list[str]:
    """Names of the settings in the run folder's file `recipe` that `config` has no place for; none
    where that file cannot be read.
    """
    now = {name for name, _ in _leaves(as_plain(config))}
    return [name for name in _settings(recipe) if name not in now]


def _settings(recipe: Path) -> dict[str, object]:
    """{dotted name: value} of the file `recipe`; empty where it cannot be read, which
    `megarl.checks.run_files` tells.
    """
    try:
        return dict(_leaves(read_tree(recipe)))
    except ValueError:
        return {}


def _leaves(tree: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Each value of nested mappings under its dotted name."""
    if not isinstance(tree, dict) or not tree:
        yield prefix.removesuffix("."), tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{prefix}{key}.")
