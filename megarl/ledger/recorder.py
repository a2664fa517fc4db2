"""How the rollout service, which generates the rollouts of a run, writes the run's ledger."""

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
"""Reason why dynamic sampling (`rollout.filter: differing`) rejects a group."""
NO_VERDICTS = "no verdicts"
"""Reason why a group is rejected of which fewer than two rollouts have a verdict."""

LONGEST_FAILURE = 300
"""Characters that are kept of the reason why generation failed."""


class Recorder:
    """Writes the events of the rollout service, the process that generates a run's rollouts, to the
    run's ledger, the file `path`: `start` first, then what happens to groups (all rollouts of one
    prompt), then `end`. The service counts steps from 0; the file counts them from 1. Without a
    `path` nothing is recorded.

    Every method but `durable` and `end` returns at once, before the event is on the disk. If a
    crash loses the events of a batch, no checkpoint has that batch, and the resumed run generates
    it again. For this the service must await `durable` before it gives out what a checkpoint will
    store, such as the position in the data.

    Methods raise `UserError` where the file cannot be written.
    """

    def __init__(self, path: Path | None = None, lost: Callable[[], str] = str) -> None:
        """`path`: the ledger's file; None to record nothing. `lost`: returns a sentence why this
        process must not write, "" while it may. Raises `OSError`, `UserError` or `ValueError` for a
        file that cannot be continued.
        """
        self._journal = Journal(path, lost) if path is not None else None
        self._version = 0
        self._is_started = False

    def start(self, settings: Started) -> None:
        """Write to the run's ledger that generation of rollouts starts after `settings.step` steps:
        a `Started` event in a new run, `Restored` in a resumed one. The event also tells how many
        bytes of an incomplete last line were cut off the file.
        """
        if self._journal is not None:
            kind = Started if self._journal.is_new and settings.step == 0 else Restored
            fields: dict[str, Any] = vars(settings) | {"cut_bytes": self._journal.cut_bytes}
            self.put(kind(**fields))
            self._version, self._is_started = settings.step, True

    def put(self, event: Event) -> None:
        """Write `event`, which happened to a group (all rollouts of one prompt) or to the run, to
        the run's ledger.
        """
        self._append(functools.partial(to_record, event))

    def finish(self, group: Group) -> None:
        """Write to the run's ledger that all rollouts of `group`, a prompt with its rollouts, are
        generated and scored; a greedy response to the prompt, as a baseline, is listed too.
        """
        self._append(functools.partial(_finished, group))

    def close(
        self,
        step: int,
        drawn: Mapping[int, str],
        accepted: Collection[int],
        swept: Sequence[int] = (),
    ) -> None:
        """Write to the run's ledger that the batch of `step` (from 0) is complete. Groups (all
        rollouts of one prompt) are named by the position of their prompt in the training order.
        `drawn`: {group: why it is rejected, if it is} of all that were looked at for the batch;
        `accepted`: those of them that are trained on; `swept`: unfinished groups that are rejected
        too, because every later step would find their weights too old.
        """
        for ordinal, reason in drawn.items():
            rejected = Rejected(ordinal, step + 1, reason)
            self.put(Accepted(ordinal, step + 1) if ordinal in accepted else rejected)
        for ordinal in swept:
            self.put(Rejected(ordinal, step + 1, STALE))

    def release(self, version: int) -> None:
        """Call this when the weights of version `version` (the number of steps done) are on the
        engines: writes to the run's ledger (the file that tells what became of every group of
        rollouts) that all steps up to this version are trained. Every rank reports each version;
        only the first call for a version counts.
        """
        for done in range(self._version + 1, version + 1):
            self.put(Trained(done, done))
        self._version = max(self._version, version)

    async def durable(self) -> None:
        """Wait until every event recorded so far is on the disk (fsync), in the ledger's file."""
        if self._journal is not None:
            await asyncio.to_thread(self._journal.sync)

    async def end(self, failure: BaseException | None) -> None:
        """Write to the run's ledger that generation of rollouts has ended, because of the error
        `failure` if one is given; wait until everything is on the disk, and close the file. A
        second call does nothing.
        """
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
    """What the ledger keeps of a rollout; neighbouring spans of one version become one."""
    spans: list[tuple[int, int]] = []
    for part in rollout.segments:
        for version, count in part.versions:
            if spans and spans[-1][0] == version:
                count += spans.pop()[1]
            spans.append((int(version), int(count)))
    return RolloutRecord(rollout.sample, rollout.num_tokens, spans, rollout.verdict.missing)
