"""The files of a checkpoint that one rank writes: straight to the disk, or first into memory, from
where a thread writes them while training goes on.

    files = RankFiles(folder, in_background=True)
    torch.save(state, files.create(folder / "state" / "x.pt"))    # a copy of the state as it is now
    digests = files.finish()                      # in a thread: write, sync, {name: digest}

A digest is that of the bytes that were handed over, so that a fault of the disk shows later. An
error meanwhile is kept in `problem` for `finish`, since other ranks wait.

Files are written past the page cache (O_DIRECT), where the file system can: finding and clearing
pages would cost CPU time and memory that training needs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import xxhash

from megarl.checkpoints.manifest import digest_files
from megarl.parallel.launcher import ranks_per_host
from megarl.system.host_memory import free_memory

LOOK_BYTES = 256 * 2**20
"""Kept between two looks at the free memory."""
BUFFER_BYTES = 16 * 2**20
"""Of a write; a multiple of every disk's sector."""


class RankFiles:
    def __init__(self, folder: Path, *, in_background: bool = False) -> None:
        """`folder`: the checkpoint's, to which the paths of digests are relative. `in_background`:
        keep files in memory until `finish`, as long as a tenth of the host's memory stays free.
        """
        self.folder, self.in_background = folder, in_background
        self.problem = ""
        """Of the first error so far."""
        self._files: list[RankFile] = []
        self._later: list[Callable[[], Iterable[Path]]] = []
        self._unseen = LOOK_BYTES
        """Bytes since the last look at the free memory."""

    def create(self, path: Path) -> RankFile:
        """A file of the checkpoint, which `torch.save` takes too. Its folder must exist when it is
        written. All calls come from one thread.
        """
        self._files.append(RankFile(path, self))
        return self._files[-1]

    def add_later(self, write: Callable[[], Iterable[Path]]) -> None:
        """Have `finish` call `write`, which writes files and returns their paths, from unchanged
        data.
        """
        self._later.append(write)

    def finish(self) -> dict[str, str]:
        """Write what is kept and sync all files; returns {path relative to the folder: xxh3-128
        digest}. May be called in a thread. Raises `OSError`, also for `problem`.
        """
        files, self._files = self._files, []
        with contextlib.ExitStack() as stack:
            for file in files:
                # Also after an error: a deleted file takes up the disk as long as it is open.
                stack.callback(file.close)
            if self.problem:
                raise OSError(self.problem)
            digests = {str(file.path.relative_to(self.folder)): file.finish() for file in files}
        for write in self._later:
            digests |= digest_files(self.folder, write())
        return digests

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many more bytes may be kept, even if each other rank of the host keeps as
        many. False after it was once.
        """
        self._unseen += num_bytes
        if self.in_background and self._unseen > LOOK_BYTES:
            free, total = free_memory()
            self.in_background = free - ranks_per_host() * self._unseen > total // 10
            self._unseen = 0
        return self.in_background


class RankFile:
    """Made by `RankFiles.create`."""

    def __init__(self, path: Path, files: RankFiles) -> None:
        self.path, self._files = path, files
        self._kept: list[bytes] = []
        self._file: DirectFile | None = None
        self._hasher = xxhash.xxh3_128()

    def write(self, content: bytes | memoryview) -> int:
        """Append a copy of `content`; returns its size. An error of the disk is kept in
        `RankFiles.problem`, after which nothing is written.
        """
        rest = memoryview(content).cast("B")
        size = rest.nbytes
        try:
            while self._file is None and rest and self._files.has_room(min(len(rest), LOOK_BYTES)):
                self._kept.append(bytes(rest[:LOOK_BYTES]))
                rest = rest[LOOK_BYTES:]
        except MemoryError:
            self._files.in_background = False
        if rest and not self._files.problem:
            try:
                self._put(self._written(), rest)
            except OSError as error:
                self._files.problem = str(error)
        return size

    def flush(self) -> None:
        """Does nothing: `finish` brings the file to the disk."""

    def finish(self) -> str:
        """Write and sync; returns the digest of all bytes. Raises `OSError`."""
        self._written().sync()
        self.close()
        return self._hasher.hexdigest()

    def close(self) -> None:
        """Whether all of it is written or not."""
        file, self._file = self._file, None  # with its buffer
        if file is not None:
            file.close()

    def _written(self) -> DirectFile:
        """The file on the disk, with all that was kept."""
        self._file = self._file or DirectFile(self.path)
        kept, self._kept = self._kept[::-1], []
        while kept:
            self._put(self._file, memoryview(kept.pop()))  # whose memory is free afterwards
        return self._file

    def _put(self, file: DirectFile, content: memoryview) -> None:
        self._hasher.update(content)
        file.write(content)


class DirectFile:
    """A new file, to append to past the page cache, which is used for the rest at the end, and
    where the file system refuses O_DIRECT. Methods raise `OSError`.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            number = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            number = os.open(path, flags, 0o666)
        self._file = os.fdopen(number, "wb", buffering=0)  # which closes itself if it is forgotten
        self.close = self._file.close
        # Begins at a page, as O_DIRECT asks of memory.
        self._buffer, self._filled = np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), np.uint8), 0

    def write(self, content: memoryview) -> None:
        """Bytes reach the disk in pieces of 16 MiB, the rest by `sync`."""
        rest = np.frombuffer(content, np.uint8)
        while len(rest):
            block = rest[: BUFFER_BYTES - self._filled]
            # numpy lets other threads run meanwhile.
            self._buffer[self._filled : self._filled + len(block)] = block
            self._filled += len(block)
            rest = rest[len(block) :]
            if self._filled == BUFFER_BYTES:
                self._empty()

    def sync(self) -> None:
        """Wait until everything is on the disk; nothing may be appended afterwards."""
        self._use_page_cache()  # the rest need not be whole sectors
        self._empty()
        os.fsync(self._file.fileno())

    def _empty(self) -> None:
        left, self._filled = self._buffer[: self._filled].data, 0
        while left:
            try:
                left = left[self._file.write(left) or 0 :]
            except OSError as error:
                # Also after a write that ended within a sector.
                if error.errno != errno.EINVAL or not self._use_page_cache():
                    raise

    def _use_page_cache(self) -> bool:
        """Returns whether O_DIRECT was in use until now."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)
