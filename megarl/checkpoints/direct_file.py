"""Writing large files past the page cache (O_DIRECT), where the file system can.

Bytes are copied into a buffer of 16 MiB, which the disk reads itself. Without O_DIRECT the system
copies them into pages that it first has to find and to clear, and writes these to the disk in its
own time: CPU time and memory that training needs.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

BUFFER_BYTES = 16 * 2**20
"""Bytes of a write; a multiple of every disk's sector."""


def new_buffer() -> np.ndarray:
    """[BUFFER_BYTES] uint8, which begins at a page, as O_DIRECT asks of memory."""
    return np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), np.uint8)


class DirectFile:
    """A new file to append bytes to. Where the file system refuses O_DIRECT, and for what is left
    at the end, the page cache is used. Methods raise `OSError`; what failed may be tried again.
    """

    def __init__(self, path: Path, buffer: np.ndarray) -> None:
        """Create the file, or empty an old one. `buffer`: from `new_buffer`, for this file alone
        until it is closed.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self.is_direct = True
        """Whether the next write goes past the page cache."""
        try:
            number = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.is_direct = False
            number = os.open(path, flags, 0o666)
        self._file = os.fdopen(number, "wb", buffering=0)  # which closes itself if it is forgotten
        self.buffer, self._filled, self._sent = buffer, 0, 0

    def write(self, content: memoryview) -> None:
        """Append bytes."""
        rest = np.frombuffer(content, np.uint8)
        while len(rest):
            part = rest[: len(self.buffer) - self._filled]
            # numpy lets other threads run meanwhile.
            self.buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == len(self.buffer):
                self._empty()

    def sync(self) -> None:
        """Bring everything to the disk; nothing may be appended afterwards."""
        self._use_page_cache()  # the rest need not be whole sectors
        self._empty()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _empty(self) -> None:
        """Write what is in the buffer."""
        while self._sent < self._filled:
            try:
                self._sent += self._file.write(self.buffer[self._sent : self._filled].data) or 0
            except OSError as error:
                # Also after a write that ended within a sector.
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise
                self._use_page_cache()
        self._filled = self._sent = 0

    def _use_page_cache(self) -> None:
        if self.is_direct:
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self.is_direct = False
