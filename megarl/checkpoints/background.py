"""The writing of one checkpoint: a thread of each rank writes the rank's files, and the thread of
rank 0 commits the checkpoint once all ranks have reported theirs.

    .writing_000010.<run>/reports/rank_00001.json     what rank 1 has on the disk: {file: digest}

The threads need no collective, and so wait for nobody who trains.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megarl.console import say

REPORTS = "reports"
"""Folder of the reports, within the temporary folder of the checkpoint."""
LOOK_S = 0.1
"""Seconds between two looks for the reports of other ranks."""

Digests = Mapping[str, str]
"""{path within the checkpoint: digest}"""


class Writing:
    """A checkpoint that is being written; the thread starts at once."""

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
        self.written_s = self.committed_s = 0.0
        """Seconds from the start until the files were written, and until they were committed."""
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._write, self._commit = write, commit
        self._reported: dict[int, Digests] = {}
        self._problem = ""
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
        return self._problem

    def give_up(self, timeout_s: float) -> None:
        """Do not commit; wait for the end of the thread."""
        self._gives_up.set()
        self._is_told.set()
        self._thread.join(timeout_s)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the end of the thread, and say so if that takes longer than a second; returns
        whether it has ended.
        """
        self._thread.join(min(1.0, timeout_s))
        if self._thread.is_alive() and timeout_s > 1.0:
            say(f"writing the checkpoint of step {self.step} to the disk before the end")
            self._thread.join(timeout_s - 1.0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # Any error, so that the ranks that wait for this thread learn of it.
        try:
            self.digests = self._write()
            if self._num_ranks > 1 and self._rank > 0:
                self._report()
        except Exception as error:
            self._problem = str(error) or repr(error)
        self.written_s = time.monotonic() - self._started_at
        self._is_written.set()
        if self._rank > 0 or self._problem:
            return
        try:
            if self._collect():
                shutil.rmtree(self._folder / REPORTS, ignore_errors=True)
                self._commit({k: v for one in self._reported.values() for k, v in one.items()})
        except Exception as error:
            self._problem = str(error) or repr(error)
        self.committed_s = time.monotonic() - self._started_at

    def _report(self) -> None:
        place = self._folder / REPORTS / f"rank_{self._rank:05d}.json"
        aside = place.with_suffix(".writing")
        aside.write_text(json.dumps(self.digests))
        aside.rename(place)

    def _collect(self) -> bool:
        """On rank 0, wait until all ranks have reported; False if the checkpoint is given up."""
        reported = {self._rank: self.digests}
        while len(reported) < self._num_ranks:
            for path in (self._folder / REPORTS).glob("rank_*.json"):
                reported[int(path.stem.removeprefix("rank_"))] = json.loads(path.read_text())
            if len(reported) < self._num_ranks and self._is_told.wait(LOOK_S):
                break
        else:
            self._reported = reported
        return not self._gives_up.is_set()
