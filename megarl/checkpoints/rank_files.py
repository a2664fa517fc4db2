"""The files of a checkpoint that one rank writes: straight to the disk, or first into memory, from
where a thread writes them while training goes on.

    files = RankFiles(folder, in_background=True)
    with files.create(folder / "state" / "x.pt") as file:
        torch.save(state, file)                   # a copy of the state as it is now
    digests = files.finish()                      # in a thread: write, sync, {name: digest}

A digest is that of the bytes that were handed over, so that a fault of the disk shows when the
files are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from megarl.checkpoints.direct_file import DirectFile, new_buffer
from megarl.checkpoints.manifest import digest_files
from megarl.host_memory import free_memory
from megarl.parallel.launcher import ranks_per_host

LOOK_BYTES = 256 * 2**20
"""Bytes that are kept between two looks at the free memory."""


class RankFiles:
    """Collects the files of one checkpoint on this rank. Every file is created by one thread."""

    def __init__(self, folder: Path, *, in_background: bool = False) -> None:
        """`folder`: what digests are named within. `in_background`: keep the content of files in
        memory until `finish`, as long as a tenth of the host's memory stays free; what is above
        that is written at once.
        """
        self.folder, self.in_background = folder, in_background
        self._files: list[RankFile] = []
        self._later: list[Callable[[], Iterable[Path]]] = []
        self.buffers: list[np.ndarray] = []
        """Buffers of files that are closed, for the next ones."""
        self._unseen = LOOK_BYTES
        """Bytes that were kept since the last look at the free memory."""

    def create(self, path: Path) -> RankFile:
        """A file to write bytes into, as `torch.save` does. Its folder must exist when the file is
        written. Raises `OSError`.
        """
        file = RankFile(path, self)
        self._files.append(file)
        return file

    def add(self, path: Path, content: bytes) -> None:
        """A file with `content`. Raises `OSError`."""
        with self.create(path) as file:
            file.write(content)

    def add_later(self, write: Callable[[], Iterable[Path]]) -> None:
        """Have `finish` call `write`, which writes files by itself and returns their paths. What it
        reads must not change until then.
        """
        self._later.append(write)

    def finish(self) -> dict[str, str]:
        """Write what is kept, in the order of creation, and sync all files to the disk; returns
        {path within the folder: digest}. Raises `OSError`.
        """
        found = dict[str, str]()
        try:
            while self._files:
                file = self._files.pop(0)
                found[str(file.path.relative_to(self.folder))] = file.finish()
        finally:
            # After an error: a deleted file takes up the disk as long as it is open.
            while self._files:
                self._files.pop().close()
        for write in self._later:
            found |= digest_files(self.folder, write())
        return found

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many more bytes may be kept in memory. The host's other ranks are expected to
        keep as many at the same time.
        """
        self._unseen += num_bytes
        if self.in_background and self._unseen > LOOK_BYTES:
            free, total = free_memory()
            self.in_background = free - ranks_per_host() * self._unseen > total // 10
            self._unseen = 0
        return self.in_background


class RankFile:
    """One file of `RankFiles`."""

    def __init__(self, path: Path, files: RankFiles) -> None:
        self.path, self._files = path, files
        self._kept: list[bytes] = []
        self._file: DirectFile | None = None
        self._hasher = xxhash.xxh3_128()
        self.problem: OSError | None = None
        """The first error of the disk. `torch.save` raises another one in its place."""

    def write(self, content: bytes | memoryview) -> int:
        """Append bytes, of which a copy is kept; returns their number. Raises `OSError`."""
        rest = memoryview(content).cast("B")
        size = rest.nbytes
        try:
            while self._file is None and rest and self._files.has_room(min(len(rest), LOOK_BYTES)):
                self._kept.append(bytes(rest[:LOOK_BYTES]))
                rest = rest[LOOK_BYTES:]
        except MemoryError:
            self._files.in_background = False
        try:
            if rest:
                self._write_kept()
                self._put(rest)
        except OSError as error:
            self.problem = self.problem or error
            raise
        return size

    def flush(self) -> None:
        """Does nothing: `finish` brings the file to the disk."""

    def finish(self) -> str:
        """Write what is kept and sync the file to the disk; returns the file's digest. Raises
        `OSError`.
        """
        with contextlib.closing(self):
            self._write_kept()
            assert self._file is not None
            self._file.sync()
        return self._hasher.hexdigest()

    def close(self) -> None:
        """Close the file, if it is open, whatever of it is written."""
        if self._file is not None:
            self._file.close()
            self._files.buffers.append(self._file.buffer)
            self._file = None

    def _write_kept(self) -> None:
        if self._file is None:
            buffers = self._files.buffers
            self._file = DirectFile(self.path, buffers.pop() if buffers else new_buffer())
        kept, self._kept = self._kept[::-1], []
        while kept:
            self._put(kept.pop())  # whose memory is free afterwards

    def _put(self, content: bytes | memoryview) -> None:
        assert self._file is not None
        rest = memoryview(content).cast("B")
        self._hasher.update(rest)
        self._file.write(rest)

    def __enter__(self) -> RankFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Does nothing: `finish` closes the file."""
