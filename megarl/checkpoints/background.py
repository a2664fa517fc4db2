"""The writing of one checkpoint: a thread of each rank writes the rank's files, and the thread of
rank 0 commits the checkpoint once all ranks have reported theirs.

    .writing_000010.<run>/                             the files
    .writing_000010.<run>.reports/rank_00001.json      what rank 1 has on the disk: {file: digest}

The reports are beside the files, since a network file system may show them late, and the checkpoint
must have nothing that is not its own. The threads need no collective, and so wait for nobody who
trains.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megarl.console import say

LOOK_S = 0.1
"""Seconds between two looks for the reports of other ranks."""
PROBLEM = "problem"
"""Key of a report that tells what went wrong, in the place of files."""


def reports_of(folder: Path) -> Path:
    """The folder of the reports of the checkpoint that is written into `folder`."""
    return folder.with_name(f"{folder.name}.reports")


Digests = Mapping[str, str]
"""{path within the checkpoint: digest}"""


class Writing:
    """A checkpoint that a thread of this rank is writing. The constructor starts the thread."""

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
        """`folder`: the temporary folder. `write`: writes this rank's files and syncs them to the
        disk. `commit`: makes the checkpoint of all ranks' files, called on rank 0. Both raise
        `OSError` where they fail.
        """
        self.step = step
        self.digests: Digests = {}
        """Of this rank's files, once they are written."""
        self.committed_s = 0.0
        """On rank 0, seconds from the start until the checkpoint was committed."""
        self._reports, self._rank, self._num_ranks = reports_of(folder), rank, num_ranks
        self._write, self._commit = write, commit
        self._reported: dict[int, Digests] = {}
        self._problem = self._not_committed = ""
        self._is_written, self._is_told, self._gives_up = (threading.Event() for _ in range(3))
        self._started_at = time.monotonic()
        self._thread = threading.Thread(
            target=self._run, name=f"checkpoint of step {step}", daemon=True
        )
        self._thread.start()

    def wait_written(self, timeout_s: float) -> str:
        """Wait until this rank's files are on the disk; returns what went wrong, or ""."""
        if not self._is_written.wait(timeout_s):
            return f"its files were not on the disk after {timeout_s:.0f} s"
        return self._problem

    def wait_committed(self, reported: Sequence[Digests], timeout_s: float) -> str:
        """On rank 0, wait until the checkpoint is committed; returns what went wrong, or "".
        `reported`: the digests of all ranks, for a file system that does not show reports yet.
        """
        self._reported = dict(enumerate(reported))
        self._is_told.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return f"it was not committed after {timeout_s:.0f} s"
        return self._problem or self._not_committed

    def give_up(self, timeout_s: float) -> bool:
        """Keep this rank's thread from committing the checkpoint, and wait until the thread ends,
        for `timeout_s` seconds at most. Returns whether the thread has ended.
        """
        self._gives_up.set()
        self._is_told.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def linger(self, timeout_s: float) -> None:
        """Before this process ends by an error, wait until the checkpoint is committed, or cannot
        be; rank 0 says what became of it. The other ranks wait too: torchrun ends rank 0 soon after
        them. On rank 0 a signal ends the wait only by force, as `megarl.signals.guard` does.
        """
        if self._rank > 0:
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
            problem = self._problem or self._not_committed
            if self._thread.is_alive():
                problem = f"not on the disk after {timeout_s:.0f} s"
            what = f"is not saved: {problem}" if problem else "is saved"
            say(f"the checkpoint of step {self.step} {what}")

    def _is_over(self, timeout_s: float) -> bool:
        """Wait until rank 0 has committed the checkpoint or given up; returns whether it has."""
        deadline = time.monotonic() + timeout_s
        self._thread.join(max(0.0, timeout_s))
        # Rank 0 removes the reports when it is done.
        while not self._thread.is_alive() and self._rank > 0 and self._reports.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # Any error, so that the ranks that wait for this thread learn of it.
        try:
            self.digests = self._write()
            if self._rank > 0:
                self._report(self.digests)
        except Exception as error:
            self._problem = str(error) or repr(error)
            if self._rank > 0:
                with contextlib.suppress(OSError):
                    self._report({PROBLEM: self._problem})
        self._is_written.set()
        if self._rank > 0:
            return
        try:
            if not self._problem and self._collect():
                self._commit({k: v for one in self._reported.values() for k, v in one.items()})
        except Exception as error:
            self._not_committed = str(error) or repr(error)
        self.committed_s = time.monotonic() - self._started_at
        shutil.rmtree(self._reports, ignore_errors=True)

    def _report(self, report: Digests) -> None:
        place = self._report_of(self._rank)
        aside = place.with_suffix(".writing")
        aside.write_text(json.dumps(report))
        aside.rename(place)

    def _report_of(self, rank: int) -> Path:
        return self._reports / f"rank_{rank:05d}.json"

    def _collect(self) -> bool:
        """On rank 0, wait until all ranks have reported; returns False if the checkpoint is given
        up. Raises `OSError` if a rank reports a problem.
        """
        reported = {self._rank: self.digests}
        while len(reported) < self._num_ranks:
            for rank in range(self._num_ranks):
                path = self._report_of(rank)
                if rank not in reported and path.exists():
                    reported[rank] = json.loads(path.read_text())
                    if PROBLEM in reported[rank]:
                        raise OSError(f"rank {rank}: {reported[rank][PROBLEM]}")
            if len(reported) < self._num_ranks and self._is_told.wait(LOOK_S):
                break
        else:
            self._reported = reported
        return not self._gives_up.is_set()
