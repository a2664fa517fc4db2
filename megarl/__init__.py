# ruff: noqa: F405
"""megarl: reinforcement learning of language models on long chains of thought, under any parallel
layout.

From Python: `from megarl import Trainer` and so on; see docs/api.md. Names are imported at first
use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.api import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [
    "DistillConfig",
    "KeptEngines",
    "PreferenceConfig",
    "Result",
    "RewardModelConfig",
    "RunConfig",
    "SftConfig",
    "Trainer",
    "distill",
    "evaluate",
    "load_recipe",
    "open_run",
    "preference",
    "reward_model",
    "sample",
    "sft",
    "train",
]


def __getattr__(name: str) -> Any:
    """Public names, from `megarl.api`."""
    if name not in __all__:
        raise AttributeError(f"module 'megarl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("megarl.api"), name)


def __dir__() -> list[str]:
    """For completion in notebooks."""
    return __all__
