"""Writes the page `report.html` while a run goes on; `megarl.apps.runs.report` makes the page."""

from __future__ import annotations

import time
from pathlib import Path

from megarl.system.lookup import of_app


class LiveReport:
    """Writes `report.html`, a page with charts of the metrics and example rollouts, in the run
    folder `folder` as a run goes: call `refresh` after each step, `write` at the end. `refresh`
    writes at most every `every_s` seconds, and takes at most a fiftieth of the run's time.
    """

    def __init__(self, folder: Path, *, every_s: float = 10.0) -> None:
        self._folder, self._every_s = Path(folder), every_s
        self._next = float("-inf")

    def refresh(self) -> None:
        """Write `report.html` in the run folder, unless the last one was written less than
        `every_s` seconds ago, or less than fifty times as long ago as writing it took. Blocks while
        it writes.
        """
        started_at = time.monotonic()
        if started_at >= self._next:
            self.write()
            ended_at = time.monotonic()
            self._next = ended_at + max(self._every_s, 50 * (ended_at - started_at))

    def write(self) -> None:
        """Write `report.html` now, in place of an earlier one, from the metrics in the run folder.
        Blocks until it is written.
        """
        of_app("write_report")(self._folder, title=self._folder.name)
