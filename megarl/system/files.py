"""Files in a folder that others may change, new files that are complete or absent, work in threads.

A FIFO hangs whoever opens it, and a folder where a file belongs fails late: `refuse_unfit` looks
first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import struct
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

LOOKED_AT = ("", "activity", "activity/stacks", "batches", "reference")
"""Folders of a run folder from which megarl opens entries by name."""
FOLDERS = {"activity", "batches", "checkpoints", "eval", "logs", "reference", "replay", "rollout"}
FOLDERS |= {"stacks", "tensorboard"}
"""Names that a run gives to folders."""
FILES = {".html", ".json", ".jsonl", ".log", ".npy", ".safetensors", ".txt", ".yaml"}
"""Ends of names that a run gives to files."""


def refuse_unfit(folder: Path) -> None:
    """Raise `ValueError` if an entry of a run folder is neither file nor folder, or the wrong one
    of these. Links are followed; a missing folder is no error.
    """
    for subfolder in (folder / name for name in LOOKED_AT):
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError, ValueError):  # none there; no path has such a name
            entries = list(os.scandir(subfolder))
        for entry in entries:
            entry_type, kept = _kind(entry), ""
            if entry.name in FOLDERS:
                kept = "a folder"
            elif Path(entry.name).suffix in FILES:
                kept = "a file"
            if (
                entry_type
                and entry_type != kept
                and (kept or entry_type not in ("a file", "a folder"))
            ):
                raise ValueError(
                    f"{subfolder / entry.name} is {entry_type}, where a run keeps"
                    f" {kept or 'files and folders'}; move it away"
                )


def _kind(entry: os.DirEntry[str]) -> str:
    """What an entry is, in words; "" where that cannot be seen."""
    try:
        if entry.is_file():
            return "a file"
        if entry.is_dir():
            return "a folder"
        mode = stat.S_IFMT(entry.stat().st_mode)
    except FileNotFoundError:
        return "a symbolic link to nothing" if entry.is_symlink() else ""
    except OSError as error:
        return "a loop of symbolic links" if error.errno == errno.ELOOP else ""
    return {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}.get(mode, "a device")


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


GET_FLAGS, SET_FLAGS, LOCKED = 0x80086601, 0x40086602, 0x30
"""Calls of ioctl_iflags(2), and the flags of a file that cannot be changed or removed (`chattr +i`,
`+a`).
"""


def remove_folder(path: str | Path) -> None:
    """Remove a folder with all in it: nested to any depth, without permissions, or locked by
    chattr(1). Links are not followed. Raises nothing: what the kernel does not let go stays.

    Folders are moved up into `path`, so depth takes no memory. `shutil.rmtree` raises
    `RecursionError` on 1,500 nested folders of an agent, which ended its run and every later start.
    """
    with contextlib.suppress(OSError):
        top = _open_unlocked(path, os.O_DIRECTORY)
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
                below = _open_unlocked(entry.name, os.O_DIRECTORY, folder)
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
                try:
                    os.unlink(entry.name, dir_fd=folder)
                except PermissionError:
                    os.close(_open_unlocked(entry.name, 0, folder))
                    os.unlink(entry.name, dir_fd=folder)
            is_changed = True
    return is_changed


def _open_unlocked(name: str | Path, directory_flag: int, above: int | None = None) -> int:
    """A descriptor with which the owner may do all. `directory_flag`: O_DIRECTORY or 0. Raises
    `OSError`, also for a link.
    """
    held = os.open(name, os.O_PATH | os.O_NOFOLLOW | directory_flag, dir_fd=above)
    opened = f"/proc/self/fd/{held}"
    try:
        if directory_flag:  # a file may have another name outside
            with contextlib.suppress(OSError):  # another user's, or locked
                os.chmod(opened, 0o700)
        descriptor = os.open(opened, os.O_RDONLY | os.O_NONBLOCK | directory_flag)
    finally:
        os.close(held)
    with contextlib.suppress(OSError):  # a file system without flags
        [flags] = struct.unpack("q", fcntl.ioctl(descriptor, GET_FLAGS, bytes(8)))
        if flags & LOCKED:
            fcntl.ioctl(descriptor, SET_FLAGS, struct.pack("q", flags & ~LOCKED))
    return descriptor


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
