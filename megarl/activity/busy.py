"""Records many concurrent requests to the same process as one span, and the deadline of each
request.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megarl.activity.spans import POLL_S, RECORDERS, Kind, Span, Whom, micros, now

PROGRESS_S = 10.0
"""Least seconds between two events about the number of requests of a `Busy` span."""


@dataclass(eq=False)
class Busy:
    """Records overlapping requests to another process as one span in the activity trace of this
    process, the file RUN/activity/PROCESS.json. The span begins with the first open request and
    ends once none has been open for a quarter of a second. `what`: the span's name; `kind`:
    "generate", "score" and so on; `of`: name of the process that answers, or several names. A
    request that is open for `deadline_s` seconds (0: no deadline) is reported in a file
    RUN/waits-TIME.txt and on standard error.

        busy = Busy("responses", kind="generate")
        with busy.request(): ...  # in any number of asyncio tasks of one event loop
    """

    what: str
    kind: Kind
    of: Whom = ()
    deadline_s: float = 0.0
    """Seconds after which an open request is reported; 0 for none."""
    judge_s: float = 0.0
    """Seconds after a deadline within which the code that waits must tell by `judged` whether the
    request is late, where a deadline does not count all of a request's time. 0: a request is late
    at its deadline."""
    requests: dict[int, float] = field(default_factory=dict, init=False)
    """{number of an open request: when it began, in seconds since the epoch}, in that order."""

    def __post_init__(self) -> None:
        self._span: Span | None = None
        self._late: Span | None = None
        """The newest wait that has passed its deadline, as a span of its own."""
        self._done = self._most = 0
        self._ended_at = self._judged_at = 0.0
        """When the last request was answered, and when `judged` was called last."""
        self._told = 0.0, 0, 0
        """Of the newest event about progress: its time, open requests, answered requests."""
        self._numbers, self._lock = itertools.count(), threading.Lock()

    @contextmanager
    def request(self) -> Iterator[None]:
        """A context manager for one request, which counts as open while the block runs. Nothing is
        recorded if this process has not called `Recording.open`.
        """
        number, begun = next(self._numbers), now()
        with self._lock:
            self._tidy(begun)
            for recorder in RECORDERS if self._span is None else ():
                self._span = Span(self.what, self.kind, self.of)
                recorder.start(self._span)
                if self not in recorder.busy:
                    recorder.busy.append(self)
                self._done, self._most, self._told = 0, 0, (begun, 0, 0)
            self.requests[number] = begun
            self._most = max(self._most, len(self.requests))
        try:
            yield
        finally:
            with self._lock:
                self._done, self._ended_at = self._done + 1, now()
                del self.requests[number]

    def judged(self, waited_s: float, paused_s: float) -> None:
        """For requests whose deadline does not count all of their time: tell that an open request
        has waited `waited_s` seconds, of which `paused_s` do not count. The request is reported as
        late if the difference is `deadline_s` or more.
        """
        with self._lock:
            self._judged_at = now()
            if 0 < self.deadline_s <= waited_s - paused_s:
                self._is_late(self._judged_at - waited_s, self.deadline_s + paused_s)

    def look(self, at: float) -> Span | None:
        """Called by the thread that watches open spans, every quarter of a second, with the time
        `at` in seconds since the epoch. Ends the span if no request has been open for a quarter of
        a second. Writes to the trace, at most every 10 seconds, how many requests are open and
        done. Returns a `Span` for the request that was last found to have passed its deadline, or
        None.
        """
        with self._lock:
            self._tidy(at)
            counts = len(self.requests), self._done
            if self._span and at - self._told[0] >= PROGRESS_S and counts != self._told[1:]:
                self._told = at, *counts
                args = {"open": counts[0], "done": counts[1]}
                about = {"name": self.what, "ph": "C", "span": self._span.number, "ts": micros(at)}
                for recorder in RECORDERS:
                    recorder.write({**about, "args": args})
            oldest = next(iter(self.requests.values()), at)
            # Only a request that nobody has judged in time is late by itself.
            since = max(oldest, self._judged_at)
            if self.deadline_s and at - since >= self.deadline_s + self.judge_s:
                self._is_late(oldest, self.deadline_s)
            return self._late

    def _is_late(self, begun: float, deadline_s: float) -> None:
        """A wait that began at `begun` has passed its deadline."""
        if self._late is None or self._late.begin != begun:
            number = self._span.number if self._span else 0
            self._late = Span(self.what, self.kind, self.of, deadline_s, begin=begun, number=number)
            self._late.moved_at = begun
            self._late.is_written = True  # as the span of all requests

    def _tidy(self, at: float) -> None:
        """End the span if there has been no request for `POLL_S`."""
        if self._span is not None and not self.requests and at - self._ended_at > POLL_S:
            for recorder in RECORDERS:
                recorder.finish(self._span, self._ended_at, done=self._done, most=self._most)
            self._span = None
