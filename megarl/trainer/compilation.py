"""DeepSpeed compiles extensions on first use, one process at a time, behind a lock file."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

from megarl.system.console import say

OLDER_THAN_S = 240.0
"""Age of a lock that no compilation can have."""


def drop_stale_locks(root: Path | None = None) -> None:
    """Delete old lock files of extension builds. torch leaves the lock of a killed process, for
    which later builds would wait for ever. `root`: folder of torch's extensions.
    """
    folder = root or Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in folder.glob("**/deepspeed_*/lock"):
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            if time.time() - lock.stat().st_mtime > OLDER_THAN_S:
                lock.unlink()
                say(f"megarl: removed {lock}, left by a compilation that was killed")
