"""Files in a folder that others may change: an entry may be no regular file, and JSON may be
damaged. And new files that are complete or absent, and work in threads.

A FIFO or a device hangs whoever opens it, and a folder where a file belongs, or the reverse, fails
late. `refuse_unfit` looks at a run folder before anything in it is opened.
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
"""The folders within a run folder whose entries are looked at, as megarl opens them by name."""
FOLDERS = {"activity", "batches", "checkpoints", "eval", "logs", "reference", "replay", "rollout"}
FOLDERS |= {"stacks", "tensorboard"}
"""Names that a run gives to folders."""
FILES = {".html", ".json", ".jsonl", ".log", ".npy", ".safetensors", ".txt", ".yaml"}
"""Ends of the names that a run gives to files."""


def refuse_unfit(folder: Path) -> None:
    """Raise `ValueError` if an entry of the run folder `folder` is neither a regular file nor a
    folder (a FIFO, a broken link), or is a file where a run keeps a folder, or the reverse.
    Symbolic links are followed. Entries that cannot be looked at are passed over; a missing folder
    is no error.
    """
    for place in (folder / name for name in LOOKED_AT):
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError, ValueError):  # none there; no path has such a name
            entries = list(os.scandir(place))
        for entry in entries:
            found, kept = _kind(entry), ""
            if entry.name in FOLDERS:
                kept = "a folder"
            elif Path(entry.name).suffix in FILES:
                kept = "a file"
            if found and found != kept and (kept or found not in ("a file", "a folder")):
                raise ValueError(
                    f"{place / entry.name} is {found}, where a run keeps"
                    f" {kept or 'files and folders'}; move it away"
                )


def _kind(entry: os.DirEntry[str]) -> str:
    """What an entry is, in words; "" where that cannot be seen. Of most, the list of the folder
    tells it already.
    """
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
    """The value of a JSON text. Raises `ValueError` if the text is not JSON, or is nested too
    deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def read_json(path: Path) -> Any:
    """The value of the JSON in the file `path`. Raises `OSError` if there is no regular file that
    can be read, and `ValueError` if its content is not JSON or is nested too deeply.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return parse_json(path.read_bytes())


GET_FLAGS, SET_FLAGS, LOCKED = 0x80086601, 0x40086602, 0x30
"""Calls of ioctl_iflags(2) to read and set the flags of a file, and the flags under which it can be
neither changed nor removed (`chattr +i`, `+a`)."""


def remove_folder(path: str | Path) -> None:
    """Remove the folder `path` with all in it, whatever a program has left there: folders nested to
    any depth, without permissions, or locked by chattr(1). Links are removed and not followed; what
    is no folder stays. Raises nothing: what the kernel does not let go stays.

    Folders are moved up into `path` one after the other, so neither depth nor number takes memory
    or descriptors. `shutil.rmtree` raises `RecursionError` on 1,500 nested folders of an agent,
    which ended its run and every later start of the same user.
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
    """Remove the files in `folder` and move its folders to `top`, both descriptors; folders of
    `top` itself are emptied and removed. Returns whether anything has been removed or moved.
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


def _open_unlocked(name: str | Path, kind: int, above: int | None = None) -> int:
    """A descriptor of `name` in the folder of the descriptor `above`, with which its owner may do
    all. `kind`: O_DIRECTORY for a folder. Raises `OSError`, also for a link.
    """
    held = os.open(name, os.O_PATH | os.O_NOFOLLOW | kind, dir_fd=above)
    opened = f"/proc/self/fd/{held}"
    try:
        if kind:  # a file may have another name outside
            with contextlib.suppress(OSError):  # another user's, or locked
                os.chmod(opened, 0o700)
        descriptor = os.open(opened, os.O_RDONLY | os.O_NONBLOCK | kind)
    finally:
        os.close(held)
    with contextlib.suppress(OSError):  # a file system without flags
        [flags] = struct.unpack("q", fcntl.ioctl(descriptor, GET_FLAGS, bytes(8)))
        if flags & LOCKED:
            fcntl.ioctl(descriptor, SET_FLAGS, struct.pack("q", flags & ~LOCKED))
    return descriptor


def sync(path: Path) -> None:
    """Sync the file or folder `path` to disk (fsync); blocks until that is done. Raises
    `OSError`.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


UNFINISHED = ".writing"
"""End of the name of a file that `new_file` has not finished."""


@contextlib.contextmanager
def new_file(path: Path, before_rename: Callable[[], object] = lambda: None) -> Iterator[BinaryIO]:
    """A context manager that yields a binary file to write; at the end of the block the file is
    synced to disk and renamed to `path`, in place of an earlier file there. So the file at `path`
    is complete or absent at any time. `before_rename` is called just before the renaming. After an
    error in the block or in `before_rename` nothing is changed. Raises `OSError`.
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
    """Call `work` in a new daemon thread of this name; returns at once the future of what it
    returns or raises. As the thread is a daemon, a disk that does not answer does not keep the
    process from ending.
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
    """The value as one line of ASCII JSON with sorted keys, so that equal values give the same
    text. What JSON has no type for is written as the text `str` makes of it.
    """
    return json.dumps(value, sort_keys=True, default=str)
