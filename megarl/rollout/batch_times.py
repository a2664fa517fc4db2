"""How long the rollouts of each batch took."""

from __future__ import annotations

import time


class BatchTimes:
    """Times the batches of a rollout service. The time of a batch begins when its groups might
    first start, or when the batch before it was complete.
    """

    def __init__(self, staleness: int, first_step: int) -> None:
        """`staleness`: versions that a group may be old; a batch of step k may begin once version
        k - staleness is on the engines.
        """
        self._staleness = staleness
        self._closed_at = time.monotonic()
        self._released_at: dict[int, float] = {first_step: self._closed_at}
        """Time at which each weight version was on the engines. Versions that no later batch needs
        are removed."""

    def start(self) -> None:
        """Generation starts now."""
        self._closed_at = time.monotonic()

    def release(self, version: int, oldest_step: int) -> None:
        """Weights `version` are on the engines; batches of steps before `oldest_step` will not be
        timed any more.
        """
        self._released_at.setdefault(version, time.monotonic())
        oldest = oldest_step - self._staleness
        for known in [known for known in self._released_at if known < oldest]:
            del self._released_at[known]

    def close(self, step: int) -> float:
        """The batch of `step` is complete; returns its time in seconds."""
        now = time.monotonic()
        allowed = min(self._released_at.get(step - self._staleness, self._closed_at), now)
        started_at = max(self._closed_at, allowed)
        self._closed_at = now
        return now - started_at
