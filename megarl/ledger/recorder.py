"""How the rollout service writes the run's ledger."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.ledger.events import (
    STALE,
    Accepted,
    Ended,
    Event,
    Finished,
    Rejected,
    Restored,
    RolloutRecord,
    Started,
    Trained,
    to_record,
)
from megarl.ledger.journal import Journal
from megarl.types import Group, Rollout

EQUAL_REWARDS = "equal rewards"
NO_VERDICTS = "no verdicts"
"""Fewer than two rollouts of a group have a verdict."""

LONGEST_FAILURE = 300
"""Characters that are kept of why generation failed."""


class Recorder:
    """Writes `start`, then what happens to groups, then `end`. The service counts steps from 0, the
    file from 1.

    Only `durable` and `end` wait for the disk. After a crash the resumed run generates a lost batch
    again; the service therefore awaits `durable` before it gives out what a checkpoint stores.
    Methods raise `UserError` where the file cannot be written.
    """

    def __init__(self, path: Path | None = None, lost: Callable[[], str] = str) -> None:
        """Without `path` nothing is recorded. `lost` and errors as in `Journal`."""
        self._journal = Journal(path, lost) if path is not None else None
        self._version = 0
        self._is_started = False

    def start(self, settings: Started) -> None:
        """`Started` in a new run, else `Restored`, with the bytes that were cut off."""
        if self._journal is not None:
            event_class = Started if self._journal.is_new and settings.step == 0 else Restored
            fields: dict[str, Any] = vars(settings) | {"cut_bytes": self._journal.cut_bytes}
            self.put(event_class(**fields))
            self._version, self._is_started = settings.step, True

    def put(self, event: Event) -> None:
        self._append(functools.partial(to_record, event))

    def finish(self, group: Group) -> None:
        self._append(functools.partial(_finished, group))

    def close(
        self,
        step: int,
        drawn: Mapping[int, str],
        accepted: Collection[int],
        swept: Sequence[int] = (),
    ) -> None:
        """The batch of `step` (from 0) is complete. `drawn`: {ordinal: why it is rejected} of all
        looked at; `accepted`: those trained on; `swept`: unfinished, rejected as stale.
        """
        for ordinal, reason in drawn.items():
            rejected = Rejected(ordinal, step + 1, reason)
            self.put(Accepted(ordinal, step + 1) if ordinal in accepted else rejected)
        for ordinal in swept:
            self.put(Rejected(ordinal, step + 1, STALE))

    def release(self, version: int) -> None:
        """Record `Trained` for each step whose weights, up to `version`, are on the engines. Every
        rank may call it: a step is recorded once.
        """
        for done in range(self._version + 1, version + 1):
            self.put(Trained(done, done))  # step k, counted from 1, makes version k
        self._version = max(self._version, version)

    async def durable(self) -> None:
        if self._journal is not None:
            await asyncio.to_thread(self._journal.sync)

    async def end(self, failure: BaseException | None) -> None:
        """Close the file, with everything on the disk. May be called twice."""
        if self._journal is None:
            return
        if self._is_started:
            reason = str(failure) or type(failure).__name__ if failure is not None else ""
            with contextlib.suppress(UserError):  # said where it came up
                self.put(Ended(self._version, reason[:LONGEST_FAILURE]))
        journal, self._journal = self._journal, None
        await asyncio.to_thread(journal.close)

    def _append(self, record: Callable[[], Mapping[str, Any]]) -> None:
        if self._journal is not None:
            self._journal.append(record)


def _finished(group: Group) -> dict[str, Any]:
    left_out = [*map(_kept, group.left_out)]
    rollouts = [*map(_kept, group.members)]
    return to_record(Finished(group.ordinal, rollouts[: len(rollouts) - len(left_out)], left_out))


def _kept(rollout: Rollout) -> RolloutRecord:
    """Neighbouring spans of one version become one."""
    spans: list[tuple[int, int]] = []
    for segment in rollout.segments:
        for version, count in segment.versions:
            if spans and spans[-1][0] == version:
                count += spans.pop()[1]
            spans.append((int(version), int(count)))
    return RolloutRecord(rollout.sample, rollout.num_tokens, spans, rollout.verdict.missing)
