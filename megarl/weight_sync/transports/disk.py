"""Transport `disk`: files in a folder that trainer ranks and engines see under the same path.

    <weight_sync.folder>/weights-<run>/version-<v>.<attempt>/<trainer rank>-<engine rank>

Each trainer rank writes one file for each engine rank with its messages to it, bucket after bucket:
two hosts that write one page of a network file overwrite each other.

A version is written under another name and renamed once all of it is on disk. It is removed when
the next one begins; `Sender.close` removes the last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megarl.parallel.collectives import broadcast_object, on_first
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.weight_sync.route import Route
from megarl.weight_sync.transports import base

LONGEST_PAUSE_S = 0.02
"""Longest pause between two checks of the folder."""


def _write(path: Path, *numbers: int) -> None:
    """Write a file with `numbers` in one atomic rename."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(" ".join(map(str, numbers)))
    partial.replace(path)


class _Attempt:
    """Paths of one attempt to send a weight version. Sending it again is a new attempt, with other
    names: hosts remember for a while what they saw in a network folder.
    """

    def __init__(self, root: Path, version: int, number: int) -> None:
        self.root, self.version = root, version
        self.folder = root / f"version-{version}.{number}"
        self.partial = root / f"version-{version}.{number}.partial"
        self.stop = root / f"aborted.{number}"

    def until(self, ready: Callable[[], bool], watch: base.Watch) -> None:
        """Poll until `ready()` is true; calls `watch` each time, which raises to end the wait.
        Raises `Aborted` if a rank has given this attempt to send a version up.
        """
        base.wait_until(ready, self.stop.exists, watch, longest_pause_s=LONGEST_PAUSE_S)


class Sender(base.Sender):
    """Trainer rank's half of the transport `disk`: writes its part of the weights to files without
    a header (the elements of tensor regions, one after the other), one file for each engine rank.
    Rank 0 makes and removes the folders.
    """

    def __init__(self, route: Route, axis: Axis, folder: str) -> None:
        """Make the run's folder in `folder`. Collective over `axis`, the trainer's world.

        Raises `ValueError` where `folder` is empty or cannot be written.
        """
        if not folder:
            raise ValueError(
                "weight_sync.transport disk needs weight_sync.folder: a folder that trainer ranks"
                " and engines see"
            )
        self._route, self._axis = route, axis
        name = broadcast_object(f"weights-{secrets.token_hex(4)}", axis)
        root = Path(folder).absolute() / name
        if problem := on_first(lambda: root.mkdir(parents=True), axis):
            raise ValueError(f"weight_sync.folder {folder} cannot be written: {problem}")
        self._attempt = _Attempt(root, -1, 0)
        self._messages = base.outgoing(route)
        self._memory = torch.empty(base.longest(self._messages), dtype=route.dtype)
        self._files: dict[int, BinaryIO] = {}
        """{engine rank: the open file of this rank's messages to it}."""

    def init_info(self) -> dict[str, Any]:
        """What receivers need: {"root": absolute path of the run's folder of weights}."""
        return {"root": str(self._attempt.root)}

    def begin(self, version: int, attempt: int) -> None:
        """Prepare to send a weight version in try number `attempt`: rank 0 removes older versions
        and makes this one's folder.

        Raises `RuntimeError` where the disk lacks space for it.
        """
        self._close_files()
        root = self._attempt.root
        self._attempt = _Attempt(root, version, attempt)
        if self._axis.rank > 0:
            return
        try:
            for old in root.glob("version-*"):
                shutil.rmtree(old)
            for old in (*root.glob("aborted.*"), *root.glob("read-*")):
                old.unlink(missing_ok=True)
            self._attempt.partial.mkdir()
            _write(root / "now", version, attempt)
            if shutil.disk_usage(root).free < self._route.written:
                raise OSError(errno.ENOSPC, "")
        except OSError as error:
            raise self._write_error(error) from error

    def reserve(self, bucket: Bucket, watch: base.Watch) -> list[tuple[Copy, torch.Tensor]]:
        """The memory to which this rank must write its part of a bucket (block of weights that is
        sent at once), a buffer on the host: (region of a tensor, view [rows, columns] to write it
        to) for each. Never waits.
        """
        return base.reserved(self._messages[bucket.number], self._memory)

    def commit(self, bucket: Bucket, watch: base.Watch) -> None:
        """Append a bucket (block of weights) that was written to `reserve`'s memory to this rank's
        files. After the last bucket flush them to disk; rank 0 then waits for all ranks, and
        renames the version's folder to the name for which engines wait.

        Raises `RuntimeError` where a file cannot be written, for example on a full disk.
        """
        watch()
        try:
            messages = self._messages[bucket.number]
            for destination, flat in base.flats(messages, self._memory).items():
                if destination not in self._files:
                    path = self._attempt.partial / f"{self._axis.rank}-{destination}"
                    self._files[destination] = open(path, "wb")  # noqa: SIM115 - many commits
                self._files[destination].write(flat.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType, reportCallIssue]
            if self._route.is_last(bucket):
                self._publish(watch)
        except OSError as error:
            raise self._write_error(error) from error

    def _publish(self, watch: base.Watch) -> None:
        """Flush this rank's files to disk.

        Rank 0 waits for those of all ranks, then renames the version's folder.
        """
        attempt = self._attempt
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._close_files()
        (attempt.partial / f"whole-{self._axis.rank}").touch()
        if self._axis.rank == 0:
            whole = [attempt.partial / f"whole-{rank}" for rank in range(self._axis.size)]
            attempt.until(lambda: all(file.exists() for file in whole), watch)
            attempt.partial.rename(attempt.folder)

    def abort(self) -> None:
        """Give this version up: create the file that makes all ranks that wait raise `Aborted`."""
        self._close_files()
        with contextlib.suppress(OSError):  # without the folder every other rank fails by itself
            self._attempt.stop.touch()

    def progress(self, engine: int) -> int:
        """Number of buckets (blocks of weights) of this version that all ranks of the engine at
        position `engine` have read.
        """
        ranks = range(self._route.spec.engine_tensor)
        files = [self._attempt.root / f"read-{engine}-{rank}" for rank in ranks]
        return min(int(file.read_text()) if file.exists() else 0 for file in files)

    def close(self) -> None:
        """Close this rank's files; rank 0 removes the run's folder of weights."""
        self._close_files()
        if self._axis.rank == 0:
            shutil.rmtree(self._attempt.root, ignore_errors=True)

    def _close_files(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            with contextlib.suppress(OSError):  # a failed write has been reported already
                file.close()

    def _write_error(self, error: OSError) -> RuntimeError:
        """The error to raise for a failed write."""
        version, root = self._attempt.version, self._attempt.root
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return RuntimeError(f"version {version} cannot be written to {root}: {error}")
        needed, free = self._route.written, shutil.disk_usage(root).free
        return RuntimeError(
            f"no disk space for version {version} in {root}: it takes"
            f" {needed / 2**20:.1f} MiB, and {free / 2**20:.1f} MiB are free; free some or set"
            " weight_sync.folder to another folder"
        )


class Receiver:
    """Engine rank's half of the transport `disk`: reads weights from the files that trainer ranks
    have written for it.
    """

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        """Find the sender's folder. Raises `ValueError` where this host does not see it."""
        self._route, self._destination = route, route.spec.destination(engine, rank)
        self._root = Path(init_info["root"])
        if not self._root.is_dir():
            raise ValueError(
                f"{self._root} is not there on {socket.gethostname()}: weight_sync.folder must be"
                " one that trainer ranks and engines see under the same name"
            )
        self._read, self._now = self._root / f"read-{engine}-{rank}", self._root / "now"
        self._messages = base.incoming(route)
        self._sizes: Counter[int] = Counter()
        """{trainer rank: elements of its file for this engine rank}."""
        for messages in self._messages:
            self._sizes.update({source: base.length(found) for source, found in messages.items()})
        self._bytes = torch.empty(route.largest_bytes, dtype=torch.uint8)

    def receive(self, version: int, watch: base.Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Iterate over the buckets (blocks of weights) of a version, once the version is completely
        written: (bucket, its memory, uint8 [bucket.num_bytes], valid until the next). `watch` is
        called while waiting and raises to end that; raises `Aborted` if another process gave up.
        """
        dtype = self._route.dtype

        def now() -> list[int]:
            """[version, number of the attempt] that the sender has begun last, as it has written in
            the run's folder; [-1, 0] before the first.
            """
            found = self._now.read_text() if self._now.exists() else "-1 0"
            return [int(one) for one in found.split()]

        base.wait_until(
            lambda: now()[0] == version, lambda: False, watch, longest_pause_s=LONGEST_PAUSE_S
        )
        attempt = _Attempt(self._root, *now())
        attempt.until(attempt.folder.exists, watch)
        files = {  # mapped into memory, so that pages are read as they are needed
            source: torch.from_file(
                str(attempt.folder / f"{source}-{self._destination}"), size=size, dtype=dtype
            )
            for source, size in self._sizes.items()
        }
        for bucket in self._route.buckets:
            block = self._bytes[: bucket.num_bytes]
            buffers = bucket.buffers(block, dtype)
            for source, message in self._messages[bucket.number].items():
                base.unpack(message, files[source][: base.length(message)], buffers)
                files[source] = files[source][base.length(message) :]
            yield bucket, block
            _write(self._read, bucket.number + 1)

    def close(self) -> None:
        """Does nothing: no file is open between weight versions."""
