"""The writing of one checkpoint: a thread of each rank writes its files, and the thread of rank 0
commits the checkpoint once all ranks have reported theirs.

    .writing_000010.<run>/                             the files
    .writing_000010.<run>.reports/rank_00001.json      what rank 1 has on the disk: {file: digest}

The reports are beside the files, since a network file system may show them late, and a checkpoint
has only its own files. The threads need no collective, and so wait for nobody who trains.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from megarl.settings.limits import POLL_S
from megarl.system.console import say
from megarl.system.files import in_thread

PROBLEM = "problem"
"""Key of a report that tells what went wrong, in the place of files."""


def reports_of(folder: Path) -> Path:
    """Beside the temporary folder of a checkpoint."""
    return folder.with_name(f"{folder.name}.reports")


Digests = Mapping[str, str]
"""{path within the checkpoint: xxh3-128 digest}"""


class Writing:
    """Writes one checkpoint while training goes on, in threads that the constructor starts."""

    def __init__(
        self,
        step: int,
        *,
        folder: Path,
        rank: int,
        num_ranks: int,
        write: Callable[[], Digests],
        commit: Callable[[Digests], None],
    ) -> None:
        """Start the threads.

        Args:
            step: for messages.
            folder: the temporary folder of the checkpoint.
            rank, num_ranks: of the ranks that write.
            write: writes and syncs this rank's files; may raise `OSError`.
            commit: on rank 0, gives the checkpoint its final name; may raise `OSError`.
        """
        self.step = step
        self.committed_s = 0.0
        """On rank 0, from the start."""
        self._reports, self._rank, self._num_ranks = reports_of(folder), rank, num_ranks
        self._gathered: Sequence[Digests] | None = None
        self._has_reports = threading.Event()
        name = f"checkpoint of step {step}"
        self._written = in_thread(name, lambda: self._write(write))
        self._committed = in_thread(name, lambda: self._collect(commit)) if rank == 0 else None

    def wait_written(self, timeout_s: float) -> str:
        """Wait for this rank's files; returns what went wrong, a time-out too, or ""."""
        late = f"its files were not on the disk after {timeout_s:.0f} s"
        return _outcome(self._written, timeout_s, late)

    @property
    def digests(self) -> Digests:
        """Of this rank's files; blocks until they are written."""
        return self._written.result()

    def wait_committed(self, reported: Sequence[Digests], timeout_s: float) -> str:
        """On rank 0, wait for the commit; returns as `wait_written`. `reported`: by rank, for a
        file system that does not show the reports yet.
        """
        self._gathered = reported
        self._has_reports.set()
        assert self._committed is not None
        return _outcome(self._committed, timeout_s, f"it was not committed after {timeout_s:.0f} s")

    def give_up(self, timeout_s: float) -> bool:
        """Keep this rank's threads from committing; returns whether they have ended in time."""
        self._gathered = None
        self._has_reports.set()
        threads: list[Future[Any]] = [self._written, self._committed or self._written]
        return not wait(threads, timeout_s).not_done

    def linger(self, timeout_s: float) -> None:
        """Before this process ends by an error, wait until the checkpoint is committed, or cannot
        be; rank 0 tells. The other ranks wait too: torchrun ends rank 0 soon after them.
        """
        if self._committed is None:
            self._is_over(timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        try:
            if not self._is_over(1.0):
                say(f"writing the checkpoint of step {self.step} to the disk before the end")
                self._is_over(timeout_s)
        except KeyboardInterrupt:
            self._is_over(deadline - time.monotonic())
            raise
        finally:
            problem = _outcome(self._committed, 0, f"not on the disk after {timeout_s:.0f} s")
            outcome = f"is not saved: {problem}" if problem else "is saved"
            say(f"the checkpoint of step {self.step} {outcome}")

    def _is_over(self, timeout_s: float) -> bool:
        """Wait until rank 0 has committed the checkpoint or given up; returns whether it has."""
        if self._committed is not None:
            return not wait([self._committed], max(0.0, timeout_s)).not_done
        deadline = time.monotonic() + timeout_s
        # Rank 0 removes the reports when it is done.
        while not self._written.done() or self._reports.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _write(self, write: Callable[[], Digests]) -> Digests:
        """Tells rank 0, which waits for this thread, also of any error."""
        try:
            digests = write()
            self._report(digests)
        except Exception as error:
            with contextlib.suppress(OSError):
                self._report({PROBLEM: str(error) or repr(error)})
            raise
        return digests

    def _report(self, report: Digests) -> None:
        if self._rank == 0:
            return
        path = self._report_of(self._rank)
        aside = path.with_suffix(".writing")
        aside.write_text(json.dumps(report))
        aside.rename(path)

    def _report_of(self, rank: int) -> Path:
        return self._reports / f"rank_{rank:05d}.json"

    def _collect(self, commit: Callable[[Digests], None]) -> None:
        """On rank 0. Raises `OSError` if a rank reports a problem."""
        started_at = time.monotonic()
        try:
            reported = {self._rank: self._written.result()}
            while len(reported) < self._num_ranks:
                for rank in range(self._num_ranks):
                    path = self._report_of(rank)
                    if rank not in reported and path.exists():
                        reported[rank] = json.loads(path.read_text())
                        if PROBLEM in reported[rank]:
                            raise OSError(f"rank {rank}: {reported[rank][PROBLEM]}")
                if len(reported) < self._num_ranks and self._has_reports.wait(POLL_S):
                    reported = dict(enumerate(self._gathered or ()))
                    break
            if self._gathered is not None or not self._has_reports.is_set():
                commit(
                    {name: digest for rank in reported.values() for name, digest in rank.items()}
                )
        finally:
            self.committed_s = time.monotonic() - started_at
            shutil.rmtree(self._reports, ignore_errors=True)


def _outcome(future: Future[Any], timeout_s: float, late: str) -> str:
    """What went wrong in a thread, "" if nothing did, or `late` after `timeout_s` seconds."""
    if wait([future], timeout_s).not_done:
        return late
    error = future.exception()
    return (str(error) or repr(error)) if error is not None else ""
