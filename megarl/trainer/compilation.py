"""DeepSpeed compiles extensions on first use, one process at a time, behind a lock file."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

from megarl.system.console import say
from megarl.system.files import in_thread


def drop_stale_locks(root: Path | None = None, *, older_than_s: float = 240.0) -> list[Path]:
    """Delete the lock files of extension builds that are older than `older_than_s`, and return
    their paths. torch leaves the lock of a killed process, for which later builds would wait for
    ever. `root`: folder of torch's extensions.
    """
    folder = root or _build_root()
    dropped = []
    for lock in folder.glob("**/deepspeed_*/lock"):
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            if time.time() - lock.stat().st_mtime > older_than_s:
                lock.unlink()
                dropped.append(lock)
                say(f"megarl: removed {lock}, left by a compilation that was killed")
    return dropped


def _build_root() -> Path:
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


@contextlib.contextmanager
def announced(root: Path | None = None, *, after_s: float = 2.0) -> Iterator[None]:
    """A context that prints a line if DeepSpeed compiles an extension in it: if a lock file is
    there for `after_s`. Loading a compiled one takes less.
    """
    folder, over = root or _build_root(), threading.Event()

    def watch() -> None:
        while not over.wait(after_s / 4):
            for lock in folder.glob("**/lock"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - lock.stat().st_mtime > after_s:
                        say(f"compiling DeepSpeed's {lock.parent.name}: about a minute, once")
                        return

    watching = in_thread("compilation", watch)
    try:
        yield
    finally:
        over.set()
        wait([watching])
