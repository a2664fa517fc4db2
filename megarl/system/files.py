"""Folders that are removed whatever is in them, new files that are complete or absent, threads."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

ROOT = Path(__file__).resolve().parents[2]
"""Folder in which the package megarl lies: the checkout, or site-packages."""
RECIPES = Path(__file__).parents[1] / "recipes"
"""Folder of the recipes that come with megarl."""

T = TypeVar("T")


def parse_json(text: str | bytes) -> Any:
    """Raises `ValueError` for no JSON, or brackets nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def read_json(path: Path) -> Any:
    """Raises `OSError` for no regular file, `ValueError` as `parse_json`."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return parse_json(path.read_bytes())


def remove_folder(path: str | Path) -> None:
    """Remove a folder with all in it: nested to any depth, or without permissions. Links are not
    followed. Raises nothing: what the kernel does not let go stays.

    Folders are moved up into `path`, so depth takes no memory. `shutil.rmtree` raises
    `RecursionError` on 1,500 nested folders of an agent, which ended its run and every later start.
    """
    with contextlib.suppress(OSError):
        top = _open_folder(path)
        try:
            while _empty(top, top):
                pass
        finally:
            os.close(top)
        os.rmdir(path)


def _empty(folder: int, top: int) -> bool:
    """Remove the files in `folder`, move its folders to `top`, or empty those of `top`. Returns
    whether anything changed.
    """
    is_changed = False
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                below = _open_folder(entry.name, folder)
                try:
                    if folder == top:
                        is_changed |= _empty(below, top)
                        os.rmdir(entry.name, dir_fd=top)
                    else:
                        name = secrets.token_hex(16)
                        os.rename(entry.name, name, src_dir_fd=folder, dst_dir_fd=top)
                finally:
                    os.close(below)
            else:
                os.unlink(entry.name, dir_fd=folder)
            is_changed = True
    return is_changed


def _open_folder(name: str | Path, above: int | None = None) -> int:
    """A descriptor with which the owner may do all. Raises `OSError`, also for a link."""
    held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=above)
    opened = f"/proc/self/fd/{held}"
    try:
        with contextlib.suppress(OSError):  # another user's
            os.chmod(opened, 0o700)
        return os.open(opened, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(held)


def sync(path: Path) -> None:
    """fsync a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


UNFINISHED = ".writing"
"""End of the name of an unfinished file of `new_file`."""


@contextlib.contextmanager
def new_file(path: Path, before_rename: Callable[[], object] = lambda: None) -> Iterator[BinaryIO]:
    """Yields a binary file, which is synced and renamed to `path` at the end of the block, after
    `before_rename()`. After an error nothing is changed. Raises `OSError`.
    """
    # A name of its own: a run that was suspended may write beside the one that took its folder.
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}")
    try:
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        before_rename()
        aside.rename(path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Call `work` in a daemon thread: a disk that does not answer does not keep the process from
    ending.
    """
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def canonical_json(value: Any) -> str:
    """One line of ASCII JSON with sorted keys; other types by `str`."""
    return json.dumps(value, sort_keys=True, default=str)
