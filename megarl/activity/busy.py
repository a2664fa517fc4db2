"""One span for many requests to the same process, and the deadline of each."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megarl.activity.spans import RECORDERS, Kind, Span, Whom, micros, now

GAP_S = 0.1
"""A pause between requests that is shorter does not end a span of `Busy`."""
PROGRESS_S = 10.0
"""Seconds between two events about the requests of a `Busy` span, if there is news."""


@dataclass(eq=False)
class Busy:
    """One span from the first open request to none open, however many there are in between.

    busy = Busy("responses", kind="generate")
    with busy.request(): ...        # in any number of asyncio tasks of one event loop
    """

    what: str
    kind: Kind
    of: Whom = ()
    deadline_s: float = 0.0
    """Seconds after which an open request is reported; 0 for none."""
    quiet_s: float = 0.0
    """Seconds without any answer after which open requests are reported; 0 for none."""
    judge_s: float = 0.0
    """For deadlines that do not count all of a request's time: whoever waits says by `judged`, at
    most so many seconds after a deadline, whether it has passed. 0 if all time counts."""
    requests: dict[int, float] = field(default_factory=dict, init=False)
    """Open requests: when they began, in that order."""

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
        """A context manager for one request."""
        number, begun, is_answered = next(self._numbers), now(), False
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
            is_answered = True
        finally:
            with self._lock:
                self._done, self._ended_at = self._done + 1, now()
                del self.requests[number]
                if not (is_answered or self.judge_s) and 0 < self.deadline_s <= now() - begun:
                    self._is_late(begun, self.deadline_s)

    def judged(self, waited_s: float, paused_s: float) -> None:
        """A request has waited `waited_s` seconds, of which its deadline does not count `paused_s`.
        It is reported if it is late all the same.
        """
        with self._lock:
            self._judged_at = now()
            if 0 < self.deadline_s <= waited_s - paused_s:
                self._is_late(self._judged_at - waited_s, self.deadline_s + paused_s)

    def look(self, at: float) -> Span | None:
        """What the thread that watches does at `at`: end the span after a pause, write what is new,
        and return the newest wait that has passed its deadline.
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
            heard = max(oldest, self._ended_at)
            # Where a deadline is judged, only one that nobody has judged in time is late by itself.
            since = max(oldest, self._judged_at) if self.judge_s else oldest
            if self.deadline_s and at - since >= self.deadline_s + self.judge_s:
                self._is_late(oldest, self.deadline_s)
            elif 0 < self.quiet_s <= at - heard:
                self._is_late(heard, self.quiet_s)
            return self._late

    def _is_late(self, begun: float, deadline_s: float) -> None:
        """A wait that began at `begun` has passed its deadline."""
        if self._late is None or self._late.begin != begun:
            number = self._span.number if self._span else 0
            self._late = Span(
                self.what, self.kind, self.of, deadline_s, False, begun, begun, number
            )
            self._late.is_written = True  # as the span of all requests

    def _tidy(self, at: float) -> None:
        """End the span if there has been no request for `GAP_S`."""
        if self._span is not None and not self.requests and at - self._ended_at > GAP_S:
            for recorder in RECORDERS:
                recorder.finish(self._span, self._ended_at, done=self._done, most=self._most)
            self._span = None
