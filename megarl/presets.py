"""Algorithms by name: `algorithm: dapo` in a recipe stands for the settings that the paper uses.

    algorithm: gspo                    algorithm: {preset: gspo, entropy_coefficient: 0.01}

A preset fills in the settings that the recipe leaves out. A setting that contradicts it is refused:
the run would be called by a name that it is not. `megarl train RECIPE.yaml --print-config` prints
what a preset means.

To add one, add its settings to `PRESETS` and its name to `PresetName` in `objectives/config.py`.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from megarl.objectives.config import AlgorithmConfig
from megarl.rollout.config import RolloutConfig
from megarl.schema import require

PRESETS: dict[str, dict[str, Any]] = {
    # arXiv:2503.14476; its dynamic sampling and overlong penalty are rollout and environment
    # settings.
    "dapo": {
        "advantage": "grpo",
        "loss": "ppo_clip",
        "aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
    },
    # arXiv:2402.03300, eq. 3, without its KL penalty, for which set algorithm.kl.
    "grpo": {
        "advantage": "grpo",
        "loss": "ppo_clip",
        "aggregation": "sequence",
        "clip_low": 0.2,
        "clip_high": 0.2,
    },
    # arXiv:2503.20783; constant_tokens, if it is left out, is rollout.max_new_tokens.
    "dr_grpo": {
        "advantage": "dr_grpo",
        "loss": "ppo_clip",
        "aggregation": "constant",
        "clip_low": 0.2,
        "clip_high": 0.2,
    },
    # arXiv:2402.14740, whose loss sums a sequence's tokens; here they are averaged, which keeps
    # the learning rate's scale. For the sum: aggregation 'constant', without the preset.
    "rloo": {"advantage": "rloo", "loss": "ppo_clip", "aggregation": "sequence"},
    # arXiv:2310.10505, algorithm 1, whose loss sums a sequence's tokens; averaged here as for rloo.
    "remax": {"advantage": "remax", "loss": "reinforce", "aggregation": "sequence"},
    # arXiv:2501.03262, eq. 8 to 10: a token is charged for the KL from itself on.
    "reinforce_pp": {
        "advantage": "reinforce_plus_plus_tokens",
        "loss": "ppo_clip",
        "aggregation": "token",
    },
    "reinforce_pp_baseline": {
        "advantage": "reinforce_plus_plus_baseline",
        "loss": "ppo_clip",
        "aggregation": "token",
    },
    # arXiv:1707.06347, with a critic
    "ppo": {
        "advantage": "gae",
        "loss": "ppo_clip",
        "aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
    },
    # arXiv:2507.18071, 5.1
    "gspo": {
        "advantage": "grpo",
        "loss": "gspo",
        "aggregation": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    # arXiv:2506.13585, 3.1: no lower bound
    "cispo": {"advantage": "grpo", "loss": "cispo", "aggregation": "token", "clip_low": 1.0},
    # arXiv:2511.20347, 3
    "sapo": {"advantage": "grpo", "loss": "sapo", "aggregation": "sequence"},
    # arXiv:2504.02546
    "gpg": {"advantage": "gpg", "loss": "reinforce", "aggregation": "token"},
}
"""{name of the preset: settings of `algorithm`}"""


def spelled_out(tree: dict[str, Any]) -> dict[str, Any]:
    """A recipe's tree with `algorithm: NAME` written as `algorithm: {preset: NAME}`."""
    name = tree.get("algorithm")
    return tree | {"algorithm": {"preset": name}} if isinstance(name, str) else tree


def long_word(word: str) -> str:
    """A word of a command line with `--algorithm NAME` written as `--algorithm.preset NAME`."""
    name, equals, value = word.partition("=")
    return f"--algorithm.preset{equals}{value}" if name == "--algorithm" else word


def filled_in(tree: Any) -> Any:
    """A recipe's tree with the settings of its `algorithm.preset` filled in. Trees without a known
    preset come back unchanged. Raises `ValueError` for settings that contradict the preset.
    """
    algorithm = tree.get("algorithm") if isinstance(tree, dict) else None
    name = algorithm.get("preset") if isinstance(algorithm, dict) else None
    if not isinstance(name, str) or name not in PRESETS:
        return tree
    assert isinstance(algorithm, dict)
    refuse_contradictions(name, algorithm)
    filled = copy.deepcopy(tree)
    filled["algorithm"] = PRESETS[name] | algorithm
    if filled["algorithm"].get("aggregation") == "constant":
        rollout = tree.get("rollout") or {}
        limit = rollout.get("max_new_tokens") if isinstance(rollout, dict) else None
        limit = RolloutConfig().max_new_tokens if limit is None else limit
        filled["algorithm"].setdefault("constant_tokens", limit)
    return filled


def refuse_contradictions(name: str, algorithm: dict[str, Any]) -> None:
    """Raise `ValueError` if a setting in `algorithm` is not the one that preset `name` means."""
    for key, value in PRESETS[name].items():
        require(
            algorithm.get(key, value) == value,
            f"algorithm.preset is '{name}', which means algorithm.{key} {value}, but"
            f" algorithm.{key} is {algorithm.get(key)}; leave one of the two out",
        )


def check_preset(algorithm: AlgorithmConfig) -> None:
    """Raise `ValueError` if `algorithm` names a preset and has other settings than it means."""
    if algorithm.preset:
        given = {
            field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)
        }
        refuse_contradictions(algorithm.preset, given)
