"""What the rollout service tells the ledger."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.ledger.events import (
    ORDERED,
    STALE,
    Accepted,
    Carried,
    Dispatched,
    Ended,
    Event,
    Finished,
    Published,
    Rejected,
    Restored,
    RolloutRecord,
    Started,
    Trained,
    to_record,
)
from megarl.ledger.journal import Journal, LostError
from megarl.types import Cursor, Group, Rollout

EQUAL_REWARDS = "equal rewards"
"""Why dynamic sampling rejects a group with `rollout.filter: differing`."""

LONGEST_FAILURE = 300
"""Characters that are kept of the reason why generation failed."""


class Recorder:
    """Writes the events of a rollout service, which counts steps from 0; the file counts them from
    1. Every method but `durable` and `end` returns at once.

    No method waits for the disk before a batch is trained. A batch whose events are lost in a crash
    is of no checkpoint yet: the resumed run makes it void and generates it again. What a checkpoint
    says must be in the ledger, though, so the service awaits `durable` before it tells the cursor
    that a checkpoint will hold.

    Methods raise `UserError` where the file cannot be written.
    """

    def __init__(self, path: Path | None = None, lost: Callable[[], str] = str) -> None:
        """`path`: the ledger's file; None to record nothing. `lost`: see `Journal`. Raises
        `OSError` or `ValueError` for a file that cannot be continued, as `Journal` does.
        """
        self._journal = Journal(path, lost) if path is not None else None
        self._version = 0
        self._is_started = False

    def start(
        self,
        *,
        step: int,
        cursor: Cursor,
        max_staleness: int,
        groups_per_step: int,
        max_draws: int,
        dispatch: str = ORDERED,
        max_open: int = 0,
    ) -> None:
        """Generation starts after `step` steps, which have used the groups of `cursor`; see
        `megarl.ledger.events.Started`.
        """
        if self._journal is not None:
            kind = Started if self._journal.is_new and step == 0 else Restored
            cut = self._journal.cut_bytes
            started = kind(step, cursor.first, max_staleness, groups_per_step, max_draws, cut)
            if dispatch != ORDERED:
                used = list(cursor.beyond)
                started = replace(started, dispatch=dispatch, used=used, max_open=max_open)
            self._put(started)
            self._version, self._is_started = step, True

    def dispatch(self, ordinal: int, prompt: int, version: int, seed: int) -> None:
        """Record that the requests of a group are sent to the engines. `ordinal`: position of the
        group's prompt in the training order; `prompt`: index of its row in the data set;
        `version`: of the trainer's weights now; `seed`: of the group's first rollout.
        """
        self._put(Dispatched(ordinal, prompt, version, seed))

    def carry(self, ordinal: int, prompt: int, version: int, seed: int) -> None:
        """Record that a finished group comes from the checkpoint that the run goes on from.
        `version`: of the trainer's weights when the group was sent to the engines; the other
        arguments are those of `dispatch`. Called after `start` and before the first `dispatch`.
        """
        self._put(Carried(ordinal, prompt, version, seed))

    def finish(self, group: Group) -> None:
        """Record that all rollouts of `group` are generated and scored."""
        rollouts = group.rollouts if group.greedy is None else [*group.rollouts, group.greedy]
        self._append(functools.partial(_finished, group.ordinal, rollouts))

    def close(
        self,
        step: int,
        drawn: Sequence[int],
        accepted: Collection[int],
        swept: Sequence[int] = (),
        reason: str = EQUAL_REWARDS,
    ) -> None:
        """Record that the batch of `step` (from 0) is complete. `drawn`: ordinals of all groups
        that the step has looked at; `accepted`: ordinals of those that are trained on, the others
        are rejected for `reason`; `swept`: ordinals of unfinished groups that are rejected too,
        because every later step would find them too old.
        """
        for ordinal in drawn:
            self._put(
                Accepted(ordinal, step + 1)
                if ordinal in accepted
                else Rejected(ordinal, step + 1, reason)
            )
        for ordinal in swept:
            self._put(Rejected(ordinal, step + 1, STALE))

    def release(self, version: int) -> None:
        """Record that the steps before `version` are trained, since the weights that came of them
        are on the engines. Every rank releases each version; only the first call counts.
        """
        for done in range(self._version + 1, version + 1):
            self._put(Trained(done, done))
        self._version = max(self._version, version)

    def publish(self, version: int, receipts: Sequence[str]) -> None:
        """Record the receipts of the weights `version`, which are on the engines
        (`megarl.weight_sync.weight_receipts`).
        """
        self._put(Published(version, list(receipts)))

    async def durable(self) -> None:
        """Wait until every event so far is on the disk."""
        if self._journal is not None:
            try:
                await asyncio.to_thread(self._journal.sync)
            except OSError as error:
                raise unwritten(error) from error

    async def end(self, failure: BaseException | None) -> None:
        """Generation has ended, by `failure` if one is given. A second call does nothing."""
        if self._journal is None:
            return
        journal, self._journal = self._journal, None
        reason = str(failure) or type(failure).__name__ if failure is not None else ""
        if self._is_started:
            try:
                ended = Ended(self._version, reason[:LONGEST_FAILURE])
                journal.append(functools.partial(to_record, ended))
            except OSError:
                pass  # said where it came up
        await asyncio.to_thread(journal.close)

    def _put(self, event: Event) -> None:
        self._append(functools.partial(to_record, event))

    def _append(self, record: Callable[[], Mapping[str, Any]]) -> None:
        if self._journal is not None:
            try:
                self._journal.append(record)
            except OSError as error:
                raise unwritten(error) from error


def unwritten(error: OSError) -> UserError:
    """The `UserError` with which a run ends after writing its ledger has failed with `error`: the
    disk is full, or, for `LostError`, another run has taken the folder.
    """
    if isinstance(error, LostError):
        return UserError(str(error))
    return UserError(
        f"the run's ledger cannot be written ({error}); free space on its disk, and resume the run"
    )


def _finished(ordinal: int, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return to_record(Finished(ordinal, [_kept(one) for one in rollouts]))


def _kept(rollout: Rollout) -> RolloutRecord:
    """What the ledger keeps of a rollout; neighbouring spans of one version become one."""
    spans: list[tuple[int, int]] = []
    for part in rollout.segments:
        for version, count in part.versions:
            if spans and spans[-1][0] == version:
                count += spans.pop()[1]
            spans.append((int(version), int(count)))
    return RolloutRecord(rollout.sample, rollout.num_tokens, spans, rollout.verdict.failure)
