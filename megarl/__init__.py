# ruff: noqa: F405
"""megarl: reinforcement learning of language models, under any parallel layout.

From Python: `from megarl import Trainer` and so on; see docs/api.md. Names are imported at first
use, so that `import megarl` imports nothing but the version.
"""

from typing import TYPE_CHECKING, Any

from megarl.system.version import __version__ as __version__

if TYPE_CHECKING:
    from megarl.api import *  # noqa: F403

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
    """The public names, from `megarl.api`."""
    if name not in __all__:
        raise AttributeError(f"module 'megarl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("megarl.api"), name)


def __dir__() -> list[str]:
    """The public names, for completion in notebooks."""
    return __all__
