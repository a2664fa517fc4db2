"""Importing large packages without garbage collection."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """A block whose imports are not interrupted by garbage collection.

    Importing torch, transformers and vLLM makes millions of objects, all of which stay. Python
    would look through them again and again, for an eighth of the time. They are left out of later
    collections too.
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
