"""DeepSpeed compiles small extensions on first use, one process at a time, behind a lock file."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

from megarl.system.console import say


def drop_stale_locks(root: Path | None = None, *, older_than_s: float = 240.0) -> list[Path]:
    """Delete the lock files of DeepSpeed's C++ extension builds that are older than `older_than_s`
    seconds, and say so on standard error; returns their paths. A build takes about half a minute,
    and torch leaves the lock file of a killed process, for which later builds would wait for ever.
    `root`: folder of torch's extensions; by default TORCH_EXTENSIONS_DIR or torch's own.
    """
    place = root or _build_root()
    dropped = []
    for lock in place.glob("**/deepspeed_*/lock"):
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            if time.time() - lock.stat().st_mtime > older_than_s:
                lock.unlink()
                dropped.append(lock)
                say(f"megarl: removed {lock}, left by a compilation that was killed")
    return dropped


def _build_root() -> Path:
    """The folder of DeepSpeed's compiled operators."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


@contextlib.contextmanager
def announced(root: Path | None = None, *, after_s: float = 2.0) -> Iterator[None]:
    """A context manager that prints one line on standard error if DeepSpeed compiles a C++
    extension within its block: if the lock file of a build is there for `after_s` seconds. Loading
    a compiled extension takes less. `root`: folder of torch's extensions; by default
    TORCH_EXTENSIONS_DIR or torch's own.
    """
    place, over = root or _build_root(), threading.Event()

    def watch() -> None:
        while not over.wait(after_s / 4):
            for lock in place.glob("**/lock"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - lock.stat().st_mtime > after_s:
                        say(f"compiling DeepSpeed's {lock.parent.name}: about a minute, once")
                        return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
