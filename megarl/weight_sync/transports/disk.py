"""Transport `disk`: files in a folder that trainer ranks and engines see under the same path.

    <weight_sync.folder>/weights-<run>/version-<v>.<attempt>/from-<trainer rank>

Each trainer rank writes one file with its messages, bucket after bucket: two hosts that write one
page of a network file overwrite each other. `index-<trainer rank>-<engine rank>` in the run folder
says where an engine rank's messages begin in it, which is the same in all versions.

A version is written under another name and renamed once all of it is on disk. It is removed when
the next one begins; `Sender.close` removes the last.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from megarl.parallel.collectives import barrier, broadcast_object
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.weight_sync.route import Route
from megarl.weight_sync.transports.base import (
    Direct,
    Message,
    Watch,
    incoming,
    length,
    longest,
    outgoing,
    parts,
    unpack,
)
from megarl.weight_sync.transports.shared_counters import wait_until

LONGEST_PAUSE_S = 0.02
"""Longest pause between two checks of the folder."""


def _write(path: Path, text: str) -> None:
    """Write a small file in one atomic rename."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def _read(path: Path) -> Any:
    """The file's JSON, or None where there is no file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _index(root: Path, source: int, destination: int) -> Path:
    """File that says where the messages for engine rank `destination` begin in a rank's file."""
    return root / f"index-{source}-{destination}"


class _Attempt:
    """Paths of one attempt to send a weight version; sending it again is a new attempt."""

    def __init__(self, root: Path, version: int, number: int) -> None:
        self.root, self.version, self.number = root, version, number
        self.folder = root / f"version-{version}.{number}"
        self.partial = root / f"version-{version}.{number}.partial"
        self.stop = root / f"aborted.{number}"

    def until(self, ready: Callable[[], bool], watch: Watch) -> None:
        """Poll until `ready()` is true. Raises `Aborted` if the attempt was aborted, or what
        `watch` raises.
        """
        wait_until(ready, self.stop.exists, watch, longest_pause_s=LONGEST_PAUSE_S)


class Sender(Direct):
    """Trainer rank's half of the transport `disk`; rank 0 makes and removes folders."""

    SHARED = True
    LOCAL = False

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
        problem, root = "", Path(folder).absolute() / f"weights-{secrets.token_hex(4)}"
        if axis.rank == 0:
            try:
                root.mkdir(parents=True)
            except OSError as error:
                problem = f"weight_sync.folder {folder} cannot be written: {error}"
        problem, root = broadcast_object((problem, root), axis)
        if problem:
            raise ValueError(problem)
        self._attempt = _Attempt(root, -1, 0)
        self._messages, self._is_indexed = outgoing(route), False
        self._memory = torch.empty(longest(self._messages), dtype=route.dtype)
        self._file: BinaryIO | None = None

    def init_info(self) -> dict[str, Any]:
        """Path of the run's weight folder, for receivers."""
        return {"root": str(self._attempt.root)}

    def begin(self, version: int) -> None:
        """Prepare to send a weight version: remove older ones and make its folder.

        Raises `RuntimeError`, on all ranks, where the disk lacks space for it.
        """
        self._close_file()
        self._attempt = attempt = _Attempt(self._attempt.root, version, self._attempt.number + 1)
        barrier(self._axis)
        problem = ""
        if self._axis.rank == 0:
            try:
                for old in attempt.root.glob("version-*"):
                    shutil.rmtree(old)
                for old in attempt.root.glob("aborted.*"):
                    old.unlink()
                attempt.partial.mkdir()
                _write(attempt.root / "now", json.dumps([version, attempt.number]))
                needed, free = self._route.written, shutil.disk_usage(attempt.root).free
                problem = self._disk_full() if free < needed else ""
            except OSError as error:
                problem = f"version {version} cannot be written to {attempt.root}: {error}"
        problem = broadcast_object(problem, self._axis)
        if problem:
            raise RuntimeError(problem)

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        """Where this rank must write its part of a bucket: a buffer in host memory. Never waits."""
        found, start = [], 0
        for message in self._messages[bucket.number].values():
            found += parts(message, self._memory[start : start + length(message)])
            start += length(message)
        return found

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        """Append a written bucket to this rank's file; after the last bucket complete the version.

        Raises `RuntimeError` where the file cannot be written, for example on a full disk.
        """
        size = sum(map(length, self._messages[bucket.number].values()))
        watch()
        try:
            if self._file is None:
                self._file = open(self._own_path(".partial"), "wb")  # noqa: SIM115 - many commits
            self._file.write(memoryview(self._memory[:size].view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
            if self._route.is_last(bucket):
                self._publish(self._file, watch)
        except OSError as error:
            raise self._write_error(error) from error

    def _write_index(self) -> None:
        """Write where in this rank's file each engine rank's messages begin, [byte], by bucket."""
        self._is_indexed, filled, found = True, 0, {}
        for messages in self._messages:
            for destination, message in messages.items():
                found.setdefault(destination, []).append(filled)
                filled += length(message) * self._route.dtype.itemsize
        for destination, starts in found.items():
            _write(_index(self._attempt.root, self._axis.rank, destination), json.dumps(starts))

    def _publish(self, file: BinaryIO, watch: Watch) -> None:
        """Flush this rank's file to disk.

        Rank 0 waits for all files, then renames the version's folder.
        """
        attempt = self._attempt
        if not self._is_indexed:
            self._write_index()
        file.flush()
        os.fsync(file.fileno())
        self._close_file()
        self._own_path(".partial").rename(self._own_path())
        if self._axis.rank == 0:
            files = [attempt.partial / f"from-{rank}" for rank in range(self._axis.size)]
            attempt.until(lambda: all(file.exists() for file in files), watch)
            _sync(attempt.partial)
            attempt.partial.rename(attempt.folder)
            _sync(attempt.root)

    def abort(self) -> None:
        """Create the file that tells all ranks that this version is aborted."""
        self._close_file()
        with contextlib.suppress(OSError):  # without the folder every other rank fails by itself
            self._attempt.stop.touch()

    def progress(self, engine: int) -> int:
        """Number of buckets of this version that all ranks of an engine have read."""
        tensor, found = self._route.spec.engine_tensor, []
        for rank in range(tensor):
            number, count = _read(self._attempt.root / f"read-{engine}-{rank}") or (0, 0)
            found.append(count if number == self._attempt.number else 0)
        return min(found)

    def close(self) -> None:
        """Remove the run's folder."""
        self._close_file()
        if self._axis.rank == 0:
            shutil.rmtree(self._attempt.root, ignore_errors=True)

    def _own_path(self, suffix: str = "") -> Path:
        """Path of the file that this rank writes."""
        return self._attempt.partial / f"from-{self._axis.rank}{suffix}"

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # a failed write has been reported already
                file.close()

    def _write_error(self, error: OSError) -> RuntimeError:
        """The error to raise for a failed write."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return RuntimeError(self._disk_full())
        return RuntimeError(
            f"version {self._attempt.version} cannot be written to {self._attempt.root}: {error}"
        )

    def _disk_full(self) -> str:
        """Error message for a disk without space for the version."""
        needed, free = self._route.written, shutil.disk_usage(self._attempt.root).free
        return (
            f"no disk space for version {self._attempt.version} in {self._attempt.root}: it takes"
            f" {needed / 2**20:.1f} MiB, and {free / 2**20:.1f} MiB are free; free some or set"
            " weight_sync.folder to another folder"
        )


class Receiver:
    """Engine rank's half of the transport `disk`."""

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        """Find the sender's folder. Raises `ValueError` where this host does not see it."""
        self._route, self._destination, self._root = (
            route,
            route.spec.destination(engine, rank),
            Path(init_info["root"]),
        )
        if not self._root.is_dir():
            raise ValueError(
                f"{self._root} is not there on {socket.gethostname()}: weight_sync.folder must be"
                " one that trainer ranks and engines see under the same name"
            )
        self._read = self._root / f"read-{engine}-{rank}"
        self._messages: list[list[tuple[int, int, Message]]] = []
        self._bytes = torch.empty(route.largest_bytes, dtype=torch.uint8)

    def receive(self, version: int, watch: Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Iterate over the buckets of a version with their memory blocks, once the version is
        completely written.
        """
        attempt = self._find_attempt(version, watch)
        attempt.until(attempt.folder.exists, watch)
        self._messages = self._messages or self._find_messages(self._route)
        for bucket in self._route.buckets:
            block = self._bytes[: bucket.num_bytes]
            buffers = bucket.buffers(block, self._route.dtype)
            for source, start, message in self._messages[bucket.number]:
                size = length(message) * self._route.dtype.itemsize
                # Copy on write, though nothing writes: torch warns of read-only memory.
                found = np.memmap(
                    attempt.folder / f"from-{source}",
                    dtype=np.uint8,
                    mode="c",
                    offset=start,
                    shape=(size,),
                )
                unpack(message, torch.from_numpy(found).view(self._route.dtype), buffers)
            yield bucket, block
            _write(self._read, json.dumps([attempt.number, bucket.number + 1]))

    def close(self) -> None:
        """Does nothing: no file is open between weight versions."""

    def _find_messages(self, route: Route) -> list[list[tuple[int, int, Message]]]:
        """By bucket, this rank's messages: (source rank, first byte in its file, message)."""
        by_bucket, starts = incoming(route), {}
        for source in sorted({source for messages in by_bucket for source in messages}):
            found = _read(_index(self._root, source, self._destination))
            assert found is not None, "an index is written before the first version"
            starts[source] = iter(found)
        return [
            [(source, next(starts[source]), message) for source, message in messages.items()]
            for messages in by_bucket
        ]

    def _find_attempt(self, version: int, watch: Watch) -> _Attempt:
        """Wait until the sender has begun `version`; returns its newest attempt."""

        def now() -> Any:
            return _read(self._root / "now") or [-1, 0]

        wait_until(
            lambda: now()[0] == version, lambda: False, watch, longest_pause_s=LONGEST_PAUSE_S
        )
        return _Attempt(self._root, *now())
