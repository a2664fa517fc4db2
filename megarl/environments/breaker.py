"""A circuit breaker: a server that fails is left alone for a while, and then probed.

    closed --`failures` in a row--> open --after `pause_s`, one probe--> closed, or open again

Times are seconds of `time.monotonic`, given by the caller.
"""

from __future__ import annotations


class Breaker:
    """Decides when a request may be sent to one server. Not for several threads."""

    def __init__(self, failures: int, pause_s: float) -> None:
        """`failures`: failed requests in a row that open the breaker. `pause_s`: seconds between
        two probes while it is open.
        """
        self._limit, self._pause_s = failures, pause_s
        self._row = 0
        self._next_probe, self._probing = 0.0, False
        self.open_since: float | None = None
        """When the breaker opened; None while it is closed."""
        self.openings = 0
        """Times that the breaker has opened."""

    def may_send(self, now: float) -> bool:
        """Whether a request may be sent at `now`. If the breaker is open, True is the permission
        for the one probe, and must be followed by `succeeded` or `failed`.
        """
        if self.open_since is None:
            return True
        if self._probing or now < self._next_probe:
            return False
        self._probing = True
        return True

    def wait_s(self, now: float) -> float:
        """Seconds after which `may_send` is worth asking again; 0 while a probe is under way."""
        return 0.0 if self._probing else max(0.0, self._next_probe - now)

    def succeeded(self) -> None:
        """Note that the server has answered: the breaker is closed."""
        self._row, self._probing, self.open_since = 0, False, None

    def failed(self, now: float, *, sent_at: float) -> bool:
        """Note that a request sent at `sent_at` has failed; returns True if that opens the breaker.
        A failed probe begins another pause; a request that was under way when the breaker opened
        changes nothing.
        """
        if self.open_since is not None:
            if self._probing and sent_at >= self._next_probe:
                self._probing, self._next_probe = False, now + self._pause_s
            return False
        self._row += 1
        if self._row < self._limit:
            return False
        self.open_since, self._next_probe = now, now + self._pause_s
        self.openings += 1
        return True
