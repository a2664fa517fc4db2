"""Weights through files in a folder that trainer ranks and engines see under the same name. Both
ends are in this file.

    <weight_sync.folder>/weights-<run>/version-<v>.<attempt>/from-<trainer rank>: its messages,
    bucket after bucket

Each trainer rank writes a file of its own: where two hosts write one page of a network file, one's
part is lost. A version is written aside and renamed when all of it is on disk; it is removed when
the next one begins, and the last one with the sender.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from megarl.parallel.collectives import barrier, broadcast_object
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.weight_sync.route import Route
from megarl.weight_sync.transports.base import Watch
from megarl.weight_sync.transports.messages import (
    length,
    longest,
    messages,
    outgoing,
    parts,
    unpack,
)
from megarl.weight_sync.transports.shared_counters import wait_until

LONGEST_PAUSE_S = 0.02
"""Between two looks into the folder."""


def _write(path: Path, text: str) -> None:
    """A small file, whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def _sync(folder: Path) -> None:
    """Have a folder's names on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Attempt:
    """Names of one try to bring a version across."""

    def __init__(self, root: Path, version: int, number: int) -> None:
        self.root, self.version, self.number = root, version, number
        self.folder = root / f"version-{version}.{number}"
        self.aside = root / f"version-{version}.{number}.partial"
        self.stop = root / f"aborted.{number}"

    def until(self, ready: Any, watch: Watch) -> None:
        wait_until(ready, self.stop.exists, watch, longest_pause_s=LONGEST_PAUSE_S)


class Sender:
    """A trainer rank's end; rank 0 makes and removes folders."""

    SHARED = True
    """Engines read the same files."""
    LOCAL = False

    def __init__(self, route: Route, axis: Axis, folder: str) -> None:
        """All ranks of `axis`, the trainer's world, make theirs together. Raises `ValueError` where
        `folder` is of no use.
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
        self._messages = outgoing(route, axis.rank)
        self._memory = torch.empty(longest(self._messages), dtype=route.dtype)
        self._file: BinaryIO | None = None

    def init_info(self) -> dict[str, Any]:
        return {"root": str(self._attempt.root)}

    def begin(self, version: int) -> None:
        """Raises `RuntimeError`, on all ranks, where there is no room for the version."""
        self._shut()
        self._attempt = attempt = _Attempt(self._attempt.root, version, self._attempt.number + 1)
        barrier(self._axis)
        problem = ""
        if self._axis.rank == 0:
            try:
                for old in attempt.root.glob("version-*"):
                    shutil.rmtree(old)
                for old in attempt.root.glob("aborted.*"):
                    old.unlink()
                attempt.aside.mkdir()
                _write(attempt.root / "now", json.dumps([version, attempt.number]))
                needed, room = self._route.written, shutil.disk_usage(attempt.root).free
                problem = self._full() if room < needed else ""
            except OSError as error:
                problem = f"version {version} cannot be written to {attempt.root}: {error}"
        problem = broadcast_object(problem, self._axis)
        if problem:
            raise RuntimeError(problem)

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        found, start = [], 0
        for message in self._messages[bucket.number].values():
            found += parts(message, self._memory[start : start + length(message)])
            start += length(message)
        return found

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        size = sum(map(length, self._messages[bucket.number].values()))
        watch()
        try:
            if self._file is None:
                self._file = open(self._mine(".partial"), "wb")  # noqa: SIM115 - open until `end`
            self._file.write(memoryview(self._memory[:size].view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
        except OSError as error:
            raise self._failed(error) from error

    def end(self, watch: Watch) -> None:
        """This rank's file is on disk; rank 0 waits for all of them and gives the version its
        name.
        """
        attempt = self._attempt
        try:
            assert self._file is not None
            self._file.flush()
            os.fsync(self._file.fileno())
            self._shut()
            self._mine(".partial").rename(self._mine())
            if self._axis.rank == 0:
                files = [attempt.aside / f"from-{rank}" for rank in range(self._axis.size)]
                attempt.until(lambda: all(file.exists() for file in files), watch)
                _sync(attempt.aside)
                attempt.aside.rename(attempt.folder)
                _sync(attempt.root)
        except OSError as error:
            raise self._failed(error) from error

    def abort(self) -> None:
        self._shut()
        with contextlib.suppress(
            OSError
        ):  # the folder is gone, and everybody who looks for it finds out
            self._attempt.stop.touch()

    def progress(self, engine: int) -> int:
        tensor, found = self._route.spec.engine_tensor, []
        for rank in range(tensor):
            number, count = _read(self._attempt.root / f"read-{engine}-{rank}") or (0, 0)
            found.append(count if number == self._attempt.number else 0)
        return min(found)

    def close(self) -> None:
        self._shut()
        if self._axis.rank == 0:
            shutil.rmtree(self._attempt.root, ignore_errors=True)

    def _mine(self, more: str = "") -> Path:
        return self._attempt.aside / f"from-{self._axis.rank}{more}"

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what could not be written was said before
                file.close()

    def _failed(self, error: OSError) -> RuntimeError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return RuntimeError(self._full())
        return RuntimeError(
            f"version {self._attempt.version} cannot be written to {self._attempt.root}: {error}"
        )

    def _full(self) -> str:
        needed, room = self._route.written, shutil.disk_usage(self._attempt.root).free
        return (
            f"no room for version {self._attempt.version} in {self._attempt.root}: it takes"
            f" {needed / 2**20:.1f} MiB, and {room / 2**20:.1f} MiB are left; make room or set"
            " weight_sync.folder to another folder"
        )


class Receiver:
    """An engine rank's end."""

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        self._route, self._image, self._root = (
            route,
            route.spec.image(engine, rank),
            Path(init_info["root"]),
        )
        if not self._root.is_dir():
            raise ValueError(
                f"{self._root} is not there on {socket.gethostname()}: weight_sync.folder must be"
                " one that trainer ranks and engines see under the same name"
            )
        self._read = self._root / f"read-{engine}-{rank}"
        self._places = self._find(route)
        self._bytes = torch.empty(route.largest_bytes, dtype=torch.uint8)
        self._version = -1
        self._attempt: _Attempt | None = None

    def begin(self, version: int) -> None:
        self._version, self._attempt = version, None

    def wait(self, bucket: Bucket, watch: Watch) -> torch.Tensor:
        attempt = self._attempt = self._attempt or self._find_attempt(watch)
        if bucket.number == 0:
            attempt.until(attempt.folder.exists, watch)
        image = self._bytes[: bucket.num_bytes]
        buffers = bucket.buffers(image, self._route.dtype)
        for source, start, message in self._places[bucket.number]:
            size = length(message) * self._route.dtype.itemsize
            # Copy on write, though nobody writes: torch warns of memory that is read-only.
            found = np.memmap(
                attempt.folder / f"from-{source}",
                dtype=np.uint8,
                mode="c",
                offset=start,
                shape=(size,),
            )
            unpack(message, torch.from_numpy(found).view(self._route.dtype), buffers)
        return image

    def release(self, bucket: Bucket) -> None:
        assert self._attempt is not None
        _write(self._read, json.dumps([self._attempt.number, bucket.number + 1]))

    def close(self) -> None:
        """Nothing is kept open."""

    def _find(self, route: Route) -> list[list[tuple[int, int, list[Copy]]]]:
        """By bucket, this rank's messages: (source, first byte in its file, message)."""
        filled, found = [0] * len(route.plan.sources), []
        for copies in route.copies:
            mine = []
            for (source, destination), message in messages(copies).items():
                if destination == self._image:
                    mine.append((source, filled[source], message))
                filled[source] += length(message) * route.dtype.itemsize
            found.append(mine)
        return found

    def _find_attempt(self, watch: Watch) -> _Attempt:
        """The try at this version that is under way."""

        def now() -> Any:
            return _read(self._root / "now") or [-1, 0]

        wait_until(
            lambda: now()[0] == self._version, lambda: False, watch, longest_pause_s=LONGEST_PAUSE_S
        )
        return _Attempt(self._root, *now())
