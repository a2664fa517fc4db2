"""DeepSpeed compiles small extensions on first use, one process at a time, behind a lock file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root


def drop_stale_locks(root: Path | None = None, *, older_than_s: float = 240.0) -> list[Path]:
    """Remove lock files of DeepSpeed's extension builds whose process was killed. With such a file,
    later builds would wait for ever.

    A build takes about half a minute. torch does not remove the lock file of a killed process.
    """
    place = root or Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    dropped = []
    for lock in place.glob("**/deepspeed_*/lock"):
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            if time.time() - lock.stat().st_mtime > older_than_s:
                lock.unlink()
                dropped.append(lock)
                print(
                    f"megarl: removed {lock}, left by a compilation that was killed",
                    file=sys.stderr,
                    flush=True,
                )
    return dropped
