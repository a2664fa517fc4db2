"""The packages that adapters use, each with the version that its adapter is written for. None is
installed with megarl; setup.py has an extra for each.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from megarl.settings.schema import require

PINNED = {
    "reasoning_gym": ("reasoning-gym", "0.1.25"),
    "gymnasium": ("gymnasium", "1.4.0"),
    "textarena": ("textarena", "0.7.4"),
    "openenv": ("openenv-core", "0.3.0"),
}
"""{module: (name of its package for pip, version)}"""


def package(module: str) -> Any:
    """Import `module`, a key of `PINNED`, and return it. Raises `ValueError` that says what to
    install if its package is missing or has another version.
    """
    name, version = PINNED[module]
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = ""
    require(
        found == version,
        f"{name} {found or 'is not installed'}{found and ' is installed'}, but '{module}' in the"
        f" recipe needs {name} {version}; install it: pip install {name}=={version}",
    )
    return importlib.import_module(module)
