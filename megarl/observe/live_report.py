"""Writes the page `report.html` while a run goes on; `megarl.apps.runs.report` makes the page."""

from __future__ import annotations

import time
from pathlib import Path

from megarl.system.lookup import of_app


class LiveReport:
    """Writes `report.html` in the run folder: `refresh` after each step, at most every `every_s`
    seconds and in at most a fiftieth of the run's time, and `write` at the end.
    """

    def __init__(self, folder: Path, *, every_s: float = 10.0) -> None:
        self._folder, self._every_s = Path(folder), every_s
        self._next = float("-inf")

    def refresh(self) -> None:
        started_at = time.monotonic()
        if started_at >= self._next:
            self.write()
            ended_at = time.monotonic()
            self._next = ended_at + max(self._every_s, 50 * (ended_at - started_at))

    def write(self) -> None:
        of_app("write_report")(self._folder, title=self._folder.name)
