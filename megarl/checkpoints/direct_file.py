"""Writing large files past the page cache (O_DIRECT), where the file system can.

A checkpoint that goes through the page cache is copied there page by page, on CPU time and memory
that training needs. Here a buffer of 16 MiB is written to the disk as a whole, again and again.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

BUFFER_BYTES = 16 * 2**20
"""Bytes of a write; a multiple of every disk's sector."""


class DirectFile:
    """A new file to append bytes to. Where the file system refuses O_DIRECT, and for what is left
    at the end, the page cache is used. Methods raise `OSError`.
    """

    def __init__(self, path: Path) -> None:
        """Create the file, or empty an old one."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self.is_direct = True
        """Whether the next write goes past the page cache."""
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.is_direct = False
            self._file = os.open(path, flags, 0o666)
        # A mapping begins at a page, as O_DIRECT asks of memory.
        self._buffer, self._filled = memoryview(mmap.mmap(-1, BUFFER_BYTES)), 0

    def write(self, content: memoryview) -> None:
        """Append bytes."""
        while content:
            part = content[: BUFFER_BYTES - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            content = content[len(part) :]
            if self._filled == BUFFER_BYTES:
                self._empty()

    def sync(self) -> None:
        """Bring everything to the disk; nothing may be appended afterwards."""
        self._use_page_cache()  # the rest need not be whole sectors
        self._empty()
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _empty(self) -> None:
        """Write what is in the buffer."""
        rest = self._buffer[: self._filled]
        while rest:
            try:
                rest = rest[os.write(self._file, rest) :]
            except OSError as error:
                # Also after a write that ended within a sector.
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise
                self._use_page_cache()
        self._filled = 0

    def _use_page_cache(self) -> None:
        if self.is_direct:
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self.is_direct = False
