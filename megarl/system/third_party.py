"""Calls of libraries on a user's files: whatever is raised becomes one line.

    with opening(f"model.path '{path}'", fix="fetch the model again"):
        config = AutoConfig.from_pretrained(path)

A damaged file can raise anything: KeyError, RecursionError, a panic of Rust code.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from megarl.errors import shortened

TALKATIVE = ("transformers", "huggingface_hub", "datasets", "tokenizers", "accelerate")
"""Their warnings are held back."""


@contextlib.contextmanager
def opening(what: str, *, fix: str) -> Iterator[None]:
    """Any exception becomes a `ValueError`: `what` (setting and file), the error, `fix` (what to
    set). Ctrl-C passes.
    """
    with quiet():
        try:
            yield
        except BaseException as error:
            # Rust code that panics raises a BaseException of a class that cannot be imported.
            ours = isinstance(error, Exception | SystemExit)
            if not ours and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{what}: {said(error)}; {fix}") from error


def refuse_broken_links(folder: Path) -> None:
    """Raise `ValueError` for a link to nothing: libraries would go on without the file."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.exists():
            raise ValueError(
                f"{path} is a link to {os.readlink(path)}, which is not there; fetch the file"
                " again, or remove the link"
            )


def said(error: BaseException) -> str:
    """Class and message, on one line of at most 300 characters."""
    text = shortened(str(error), 300)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hugging Face's loggers pass on only CRITICAL messages."""
    loggers = [logging.getLogger(name) for name in TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            # A library that was imported meanwhile has set its own level.
            if logger.level == logging.CRITICAL:
                logger.setLevel(level)
