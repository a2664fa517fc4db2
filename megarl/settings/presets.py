"""Algorithms by name: `algorithm: dapo` in a recipe stands for the settings that the paper uses.

    algorithm: gspo                    algorithm: {preset: gspo, entropy_coefficient: 0.01}

A setting that contradicts the preset is refused. To add one, add its settings to `PRESETS` and its
name to `PresetName` in `settings/objectives.py`.
"""

from typing import Any

from megarl.settings.rollout import RolloutConfig


def _settings(advantage: str, loss: str, aggregation: str, **others: float) -> dict[str, Any]:
    return {"advantage": advantage, "loss": loss, "aggregation": aggregation} | others


PRESETS: dict[str, dict[str, Any]] = {
    # arXiv:2503.14476; its dynamic sampling and overlong penalty are rollout and environment
    # settings.
    "dapo": _settings("grpo", "ppo_clip", "token", clip_low=0.2, clip_high=0.28),
    # arXiv:2402.03300, eq. 3, without its KL penalty, for which set algorithm.kl.
    "grpo": _settings("grpo", "ppo_clip", "sequence", clip_low=0.2, clip_high=0.2),
    # arXiv:2503.20783; constant_tokens, if it is left out, is rollout.max_new_tokens.
    "dr_grpo": _settings("dr_grpo", "ppo_clip", "constant", clip_low=0.2, clip_high=0.2),
    # arXiv:2402.14740, whose loss sums a sequence's tokens; here they are averaged, which keeps
    # the learning rate's scale. For the sum: aggregation 'constant', without the preset.
    "rloo": _settings("rloo", "ppo_clip", "sequence"),
    # arXiv:2310.10505, algorithm 1, whose loss sums a sequence's tokens; averaged here as for rloo.
    "remax": _settings("remax", "reinforce", "sequence"),
    # arXiv:2501.03262, eq. 8 to 10: a token is charged for the KL from itself on.
    "reinforce_pp": _settings("reinforce_plus_plus_tokens", "ppo_clip", "token"),
    "reinforce_pp_baseline": _settings("reinforce_plus_plus_baseline", "ppo_clip", "token"),
    # arXiv:1707.06347, with a critic
    "ppo": _settings("gae", "ppo_clip", "token", clip_low=0.2, clip_high=0.2),
    # arXiv:2507.18071, 5.1
    "gspo": _settings("grpo", "gspo", "sequence", clip_low=3e-4, clip_high=4e-4),
    # arXiv:2506.13585, 3.1: no lower bound
    "cispo": _settings("grpo", "cispo", "token", clip_low=1.0),
    # arXiv:2511.20347, 3
    "sapo": _settings("grpo", "sapo", "sequence"),
    # arXiv:2504.02546
    "gpg": _settings("gpg", "reinforce", "token"),
}
"""{name of the preset: settings of `algorithm`}"""


def spelled_out(tree: dict[str, Any]) -> dict[str, Any]:
    """The recipe `tree` with `algorithm: NAME` written as `algorithm: {preset: NAME}`."""
    name = tree.get("algorithm")
    return tree | {"algorithm": {"preset": name}} if isinstance(name, str) else tree


def long_word(word: str) -> str:
    """A command line's `--algorithm` or `--algorithm=NAME` as `--algorithm.preset...`; other words
    unchanged.
    """
    name, equals, value = word.partition("=")
    return f"--algorithm.preset{equals}{value}" if name == "--algorithm" else word


def filled_in(tree: Any) -> Any:
    """The recipe `tree` with the settings of its preset that it leaves out; others unchanged."""
    tree = spelled_out(tree) if isinstance(tree, dict) else tree
    algorithm = tree.get("algorithm") if isinstance(tree, dict) else None
    name = algorithm.get("preset") if isinstance(algorithm, dict) else None
    if not isinstance(algorithm, dict) or not isinstance(name, str) or name not in PRESETS:
        return tree
    algorithm = PRESETS[name] | algorithm
    if algorithm["aggregation"] == "constant":
        usual = RolloutConfig.model_fields["max_new_tokens"].default
        rollout = tree.get("rollout")
        limit = rollout.get("max_new_tokens") if isinstance(rollout, dict) else None
        algorithm.setdefault("constant_tokens", usual if limit is None else limit)
    return tree | {"algorithm": algorithm}
