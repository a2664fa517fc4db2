"""One span for many requests to the same process, and the deadline of each."""

from __future__ import annotations

import itertools
import threading
import time
from types import TracebackType

from megarl.activity.spans import Kind, Span, Whom, recorder

GAP_S = 0.1
"""A pause between requests that is shorter does not end a span of `Busy`."""


class Busy:
    """One span from the first open request to none open, however many there are in between.

    busy = Busy("responses", kind="generate")
    with busy.request(): ...        # in any number of asyncio tasks of one event loop
    """

    def __init__(
        self,
        what: str,
        *,
        kind: Kind,
        of: Whom = (),
        deadline_s: float = 0.0,
        quiet_s: float = 0.0,
        judge_s: float = 0.0,
    ) -> None:
        """`deadline_s`: seconds after which an open request is reported; 0 for none. `quiet_s`:
        seconds without any answer after which open requests are reported; 0 for none. `judge_s`:
        for deadlines that do not count all of a request's time: whoever waits says by `judged`, at
        most so many seconds after a deadline, whether it has passed. 0 if all time counts.
        """
        self.what, self.of = what, of
        self.kind: Kind = kind
        self.deadline_s, self.quiet_s, self.judge_s = deadline_s, quiet_s, judge_s
        self.requests: dict[int, float] = {}
        """Open requests: when they began, in that order."""
        self.done = self.most = 0
        self.span: Span | None = None
        self.ended_at = 0.0
        """When the last request was answered."""
        self.missed: tuple[float, float, float] | None = None
        """(begin, seconds that it lasted, deadline) of a request that failed after its deadline and
        is not reported yet."""
        self._judged_at = 0.0
        """When `judged` was called last."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def request(self) -> _Request:
        """A context manager for one request."""
        return _Request(self)

    def opened(self) -> int:
        """A request begins; returns its number."""
        now, number = time.monotonic(), next(self._numbers)
        with self._lock:
            if self.span is not None and not self.requests and now - self.ended_at > GAP_S:
                self._end()
            if self.span is None and (found := recorder()) is not None:
                span = self.span = Span(self.what, self.kind, self.of, 0.0, False)
                span.number, span.since = found.number(), now
                self.done = self.most = 0
                if self not in found.busy:
                    found.busy.append(self)
                found.open[span.number] = span
                found.begin(span)
            self.requests[number] = now
            self.most = max(self.most, len(self.requests))
        return number

    def answered(self, number: int, *, failed: bool = False) -> None:
        """The request `number` is over."""
        with self._lock:
            self.done, self.ended_at = self.done + 1, time.monotonic()
            begun = self.requests.pop(number)
            if failed and not self.judge_s and 0 < self.deadline_s <= self.ended_at - begun:
                self.missed = begun, self.ended_at - begun, self.deadline_s

    def judged(self, waited_s: float, paused_s: float) -> None:
        """A request has waited `waited_s` seconds, of which its deadline does not count `paused_s`.
        It is reported if it is late all the same.
        """
        with self._lock:
            self._judged_at = time.monotonic()
            if 0 < self.deadline_s <= waited_s - paused_s:
                begun = self._judged_at - waited_s
                self.missed = begun, waited_s, self.deadline_s + paused_s

    def tidy(self, now: float) -> None:
        """End the span if there has been no request for `GAP_S`; the watcher calls it."""
        with self._lock:
            if self.span is not None and not self.requests and now - self.ended_at > GAP_S:
                self._end()

    def overdue(self, now: float) -> tuple[float, float, float]:
        """(when the wait began, seconds that it lasts, its deadline) of the wait that has passed
        its deadline; zeros if none has.
        """
        if self.missed is not None:
            return self.missed
        with self._lock:
            oldest = next(iter(self.requests.values()), now)
        heard = max(oldest, self.ended_at)
        # Where a deadline is judged, only one that nobody has judged in time is late by itself.
        since = max(oldest, self._judged_at) if self.judge_s else oldest
        if self.deadline_s and now - since >= self.deadline_s + self.judge_s:
            return oldest, now - oldest, self.deadline_s
        if 0 < self.quiet_s <= now - heard:
            return heard, now - heard, self.quiet_s
        return 0.0, 0.0, 0.0

    def _end(self) -> None:
        found = recorder()
        if found is not None and self.span is not None:
            found.end(self.span, self.ended_at, done=self.done, most=self.most)
        self.span = None


class _Request:
    """Context manager of `Busy.request`."""

    __slots__ = ("_busy", "_number")

    def __init__(self, busy: Busy) -> None:
        self._busy = busy

    def __enter__(self) -> None:
        self._number = self._busy.opened()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._busy.answered(self._number, failed=kind is not None)
