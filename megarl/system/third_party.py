"""Calls of other people's code on a user's files: whatever is raised becomes one line.

    with opening(f"model.path '{path}'", fix="fetch the model again"):
        config = AutoConfig.from_pretrained(path)

A damaged file can raise anything in a library: KeyError, AssertionError, RecursionError, a panic of
Rust code. The user is told which file it is and what to set; the library's words follow.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from megarl.errors import shortened

TALKATIVE = ("transformers", "huggingface_hub", "datasets", "tokenizers", "accelerate")
"""Libraries whose warnings are held back while they open a file."""


@contextlib.contextmanager
def opening(what: str, *, fix: str) -> Iterator[None]:
    """A context manager in which any exception becomes a `ValueError` of one line: `what` (setting
    and file), what was raised, and `fix` (what to set). Warnings of Hugging Face's libraries are
    not shown. Ctrl-C passes through.
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
    """Raise `ValueError` if an entry of `folder` is a symbolic link to nothing, as after a download
    that was moved. Libraries go on without the file, as if it had never been there.
    """
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.exists():
            raise ValueError(
                f"{path} is a link to {os.readlink(path)}, which is not there; fetch the file"
                " again, or remove the link"
            )


def said(error: BaseException) -> str:
    """The kind and message of an exception, on one line of at most 300 characters."""
    text = shortened(str(error), 300)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context manager in which the loggers of Hugging Face's libraries (transformers, datasets,
    ...) pass on neither warnings nor errors, only messages of level CRITICAL.
    """
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
