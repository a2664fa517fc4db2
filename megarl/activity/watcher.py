"""The thread of each process that writes what lasts long, answers requests for stacks, and reports
waits that have passed their deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from megarl.activity import stacks
from megarl.activity.overdue import Overdue, last_report, report
from megarl.activity.spans import Recorder, Span
from megarl.console import say

POLL_S = 0.25
"""Seconds between two looks of the thread."""
QUIET_S = 1.0
"""Seconds after which a quiet span is written."""
PROGRESS_S = 10.0
"""Seconds between two lines about the requests of a `Busy` span, if there is news."""
REPORT_WITHIN_S = 5.0
"""Seconds for which a wait that fails after its deadline is held back for its report."""
SAYS = "rank0"
"""The process that prints the line of a report: its standard error is the user's."""


class Watcher:
    """Watches the spans of one process. `start` starts its thread, which ends with the process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stacks = recorder.folder / stacks.FOLDER
        self._ended, self._looks = threading.Event(), threading.Event()
        self._looked = threading.Condition()
        self._late: list[Span] = []
        self._told: dict[int, tuple[float, int, int]] = {}
        """Of each `Busy` span: (when a line was written, open requests, answered requests)."""
        self._reported: set[tuple[int, float]] = set()
        """(id of a `Busy`, when the wait began) of those that are reported."""
        self._asked = stacks.asked(self._stacks)
        self._said = last_report(recorder.folder)
        self._thread = threading.Thread(target=self._run, name="megarl activity", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._recorder.late = self.late
        self._thread.start()

    def stop(self) -> None:
        """End the thread. The signal for stacks stays: another process may be about to send it."""
        self._ended.set()
        self._looks.set()
        self._thread.join(timeout=REPORT_WITHIN_S)
        self._recorder.late = None

    def late(self, span: Span) -> None:
        """Report `span`, which ends by an error after its deadline. Holds the error back until the
        report is written, since the process may end by it; not in an event loop.
        """
        with self._looked:
            self._late.append(span)
            self._looks.set()
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                return
            self._looked.wait_for(lambda: span not in self._late, REPORT_WITHIN_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._looks.wait(POLL_S)
            self._looks.clear()
            try:
                self._look(time.monotonic())
            except OSError as error:
                # Such as a full disk, or a run folder that is removed. The run goes on.
                say(f"megarl: {self._recorder.process} watches its waits no more: {error}")
                return

    def _look(self, now: float) -> None:
        recorder = self._recorder
        self._answer()
        for span in list(recorder.open.values()):
            if span.is_quiet and now - span.since >= QUIET_S:
                recorder.begin(span)
        self._tell_progress(now)
        found = self._overdue(now)
        if found:
            report(recorder.folder, recorder.process, found, self._answer)
        with self._looked:
            self._late = [span for span in self._late if not span.is_reported]
            self._looked.notify_all()
        said = last_report(recorder.folder)
        if recorder.process == SAYS and said is not None and said != self._said:
            self._said = said
            say(said[1])

    def _answer(self) -> None:
        """Write the stacks of this process if they are asked for."""
        if (asked := stacks.asked(self._stacks)) != self._asked:
            self._asked = asked
            stacks.answer(self._stacks, self._recorder.process, asked)

    def _tell_progress(self, now: float) -> None:
        for busy in list(self._recorder.busy):
            busy.tidy(now)
            span = busy.span
            if span is None:
                continue
            at, *before = self._told.get(span.number, (span.since, 0, 0))
            if now - at >= PROGRESS_S and before != [len(busy.requests), busy.done]:
                self._told = {span.number: (now, len(busy.requests), busy.done)} | {
                    number: told
                    for number, told in self._told.items()
                    if number in self._recorder.open and number != span.number
                }
                self._recorder.write(
                    {
                        "busy": span.number,
                        "open": len(busy.requests),
                        "done": busy.done,
                        "t": round(now, 6),
                    }
                )

    def _overdue(self, now: float) -> list[Overdue]:
        """The waits that have passed their deadline and are not reported yet; they are marked."""
        found = []
        for span in [*self._recorder.open.values(), *self._late]:
            waited_s = now - span.moved_at
            if 0 < span.deadline_s <= waited_s and not span.is_reported:
                span.is_reported = True
                self._recorder.begin(span)
                found.append(_overdue(span, waited_s, span.deadline_s))
        for busy in list(self._recorder.busy):
            begun, waited_s, deadline_s = busy.overdue(now)
            span, key = busy.span, (id(busy), begun)
            if deadline_s:
                busy.missed = None
            if deadline_s and key not in self._reported:
                self._reported.add(key)
                span = span or Span(busy.what, busy.kind, busy.of, 0.0, False)
                found.append(_overdue(span, waited_s, deadline_s))
        return found


def _overdue(span: Span, waited_s: float, deadline_s: float) -> Overdue:
    return Overdue(span.number, span.what, span.names(), waited_s, deadline_s)
