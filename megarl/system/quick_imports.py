"""Importing large packages without garbage collection."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """A context manager for a block with imports of large packages, in which Python's garbage
    collector is off.

    Importing torch, transformers and vLLM makes millions of objects, all of which stay. The
    collector would look through them again and again, which takes an eighth of the import time. At
    the end of the block all objects of the process are also left out of later collections
    (`gc.freeze`).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else Triton reports what is left at the end as leaks
        if was_enabled:
            gc.enable()
