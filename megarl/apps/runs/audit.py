"""What became of every group of a run, from its ledger, and whether that can be true.

The audit goes through the events once and keeps, of finished steps, only their counts. Each event
must be possible after those before: then every group of the steps that count was trained or
rejected exactly once, none was skipped or older than the run allows, and those sent out again after
a resume have kept prompt and seed. Under `rollout.dispatch: ordered` groups are decided on in
order. Under any other policy a group may overtake others, one that is too old for every step to
come must be rejected as stale, no other may be, and at most `max_open` groups are open. Under
`windowed` a batch has every group that finished before it was complete. A ledger that was cut off
anywhere passes, since a run may be killed at any time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from megarl.ledger.events import (
    ORDERED,
    STALE,
    WINDOWED,
    Accepted,
    Carried,
    Dispatched,
    Ended,
    Event,
    Finished,
    Published,
    Rejected,
    Restored,
    Started,
    Trained,
)
from megarl.types import START, Cursor

LISTED = 5
"""Contradictions that are kept; those that follow are often consequences."""


@dataclass
class Life:
    """A group that is neither void nor of a trained step."""

    version: int
    """Trainer version when the group was dispatched."""
    finished: Finished | None = None
    due: int | None = None
    """Under `windowed`, step whose batch has the group, as it was finished when that was told."""
    step: int | None = None
    """Step that it was drawn for."""
    is_accepted: bool = False
    why: str = ""
    """Why it was rejected."""


@dataclass
class Step:
    """What is kept of a trained step."""

    cursor: Cursor
    """The groups that the steps up to this one have used."""
    trained: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """{why: groups}"""
    ages: Counter[int] = field(default_factory=Counter)
    """{age in versions: rollouts of the groups that were trained on}"""


class Audit:
    """The state of a run after the events so far; `take` adds the next."""

    def __init__(self) -> None:
        self.contradictions: list[str] = []
        """The first contradictions; empty if the ledger can be true."""
        self.num_contradictions = 0
        self.dispatched = self.void = self.restores = self.cut_bytes = 0
        """Groups sent to the engines; those made void by resuming; times that the run was resumed;
        bytes of torn tails that were cut off."""
        self.first_step, self.first_cursor = 0, START
        """Steps before the ledger begins, and the groups that they have used."""
        self.steps: list[Step] = []
        """The trained steps that count, from `first_step` on."""
        self.open: dict[int, Life] = {}
        """Groups of no trained step, by ordinal."""
        self.ended: Ended | None = None
        """The last event, if the run ended and was not killed."""
        self._max_staleness = self._groups_per_step = self._max_draws = self._max_open = 0
        self._dispatch_policy = ORDERED
        self._is_started = False
        self._next = self._decided = 0
        """Ordinals of the next group to dispatch and, in order, of the next one to accept or
        reject."""
        self._used: set[int] = set()
        """Ordinals that the steps before the present start have used beyond their cursor, and those
        that it has taken from its checkpoint."""
        self._drawn = array("q")
        """By ordinal, a hash of prompt and seed of each group; 0 for one that was not sent yet."""
        self._has_dispatched = False
        """Whether the present start has sent a group out."""
        self._decided_step = 1
        """Step of the newest decision."""
        self._told_step = 0
        """Step of the newest decision since the present start; 0 for none."""
        self.receipts: dict[int, list[str]] = {}
        """{version: receipts} of the weights published since the present start."""
        self._event = 0

    # -------------------------------------------------------------------------------------- results

    @property
    def done(self) -> int:
        """Steps that are trained."""
        return self.first_step + len(self.steps)

    @property
    def cursor(self) -> Cursor:
        """The groups that the trained steps have used."""
        return self.steps[-1].cursor if self.steps else self.first_cursor

    @property
    def trained(self) -> int:
        """Groups that are trained on."""
        return sum(step.trained for step in self.steps)

    @property
    def rejected(self) -> Counter[str]:
        """{why: rejected groups}, those drawn for a step that is not trained yet included."""
        total = Counter(life.why for life in self.open.values() if life.why)
        for step in self.steps:
            total += step.rejected
        return total

    @property
    def in_flight(self) -> list[int]:
        """Ordinals of the groups that are dispatched, and neither trained, rejected nor void."""
        return sorted(ordinal for ordinal, life in self.open.items() if not life.why)

    @property
    def ages(self) -> Counter[int]:
        """{age in versions: rollouts that are trained on}. A rollout's age is that of its oldest
        token.
        """
        total: Counter[int] = Counter()
        for step in self.steps:
            total += step.ages
        return total

    # --------------------------------------------------------------------------------------- events

    def take(self, event: Event) -> None:
        """Add the next event."""
        self._event += 1
        if self.ended is not None and not isinstance(event, Started):
            self._wrong(f"{type(event).__name__.lower()} after the run has ended")
        if not self._is_started and not isinstance(event, Started):
            self._wrong("the run has not started")
        match event:
            case Started():
                self._start(event)
            case Carried():
                self._carry(event)
            case Dispatched():
                self._dispatch(event)
            case Finished():
                self._finish(event)
            case Accepted() | Rejected():
                self._decide(event)
            case Trained():
                self._train(event)
            case Published():
                self._publish(event)
            case Ended():
                if event.step != self.done:
                    self._wrong(f"the run ended after {event.step} steps, {self.done} are trained")
                self.ended = event

    def finish(self) -> None:
        """Compare the totals, after the last event."""
        parts = self.trained + sum(self.rejected.values()) + len(self.in_flight) + self.void
        if parts != self.dispatched:
            self._wrong(
                f"{self.dispatched} groups were dispatched, but {parts} are trained, rejected, in"
                " flight or void"
            )

    def _start(self, event: Started) -> None:
        cursor = Cursor(event.cursor, tuple(event.used))
        if not self._is_started:
            self.first_step, self.first_cursor = event.step, cursor
        elif not isinstance(event, Restored):
            self._wrong("a new run starts in the ledger of another")
        if isinstance(event, Restored):
            self.restores += 1
        self.cut_bytes += event.cut_bytes
        self._is_started, self.ended = True, None
        self._max_staleness = event.max_staleness
        self._groups_per_step, self._max_draws = event.groups_per_step, event.max_draws
        self._dispatch_policy, self._max_open = event.dispatch, event.max_open
        self.void += len(self.open)
        self._drawn = self._drawn if event.step else array("q")  # only checkpoints fix data, seed
        if event.step > self.done:
            self._wrong(f"the run goes on after step {event.step}, but {self.done} are trained")
        elif event.step < self.first_step:
            # An older checkpoint than the one that the ledger begins with.
            self.first_step, self.first_cursor = event.step, cursor
            self.void += self._drop(0)
        else:
            self.void += self._drop(event.step - self.first_step)
        if cursor != self.cursor:
            self._wrong(
                f"the run goes on at {_told(cursor)}, but {self.done} steps have used the groups"
                f" before {_told(self.cursor)}"
            )
        self.open = {}
        self._next = self._decided = event.cursor
        self._used = set(event.used)
        self._decided_step, self._told_step = event.step + 1, 0
        self._has_dispatched, self.receipts = False, {}

    def _drop(self, keep: int) -> int:
        """Forget the trained steps but the first `keep`; returns the number of their groups."""
        dropped, self.steps = self.steps[keep:], self.steps[:keep]
        return sum(step.trained + step.rejected.total() for step in dropped)

    def _carry(self, event: Carried) -> None:
        self.dispatched += 1
        what = f"group {event.ordinal} is taken from a checkpoint, but"
        if not self.restores or self._has_dispatched:
            self._wrong(f"{what} not at the start of a resumed run")
        if event.ordinal < self.cursor.first or event.ordinal in self._used:
            self._wrong(f"{what} is used already, or taken twice")
        if event.version > self.done:
            self._wrong(f"{what} is of version {event.version}, and {self.done} steps are trained")
        self._used.add(event.ordinal)
        self._draw(event)

    def _draw(self, event: Dispatched) -> None:
        self.open[event.ordinal] = Life(event.version)
        self._drawn.extend([0] * (event.ordinal + 1 - len(self._drawn)))
        before, drawn = self._drawn[event.ordinal], hash((event.prompt, event.seed)) or 1
        if before not in (0, drawn):
            self._wrong(f"group {event.ordinal} has another prompt or seed than before a resume")
        self._drawn[event.ordinal] = drawn

    def _dispatch(self, event: Dispatched) -> None:
        self.dispatched += 1
        self._has_dispatched = True
        while self._next in self._used:
            self._next += 1
        if event.ordinal != self._next:
            self._wrong(f"group {event.ordinal} is dispatched where {self._next} is next")
        if event.version != self.done:
            self._wrong(
                f"group {event.ordinal} is dispatched at version {event.version}, but {self.done}"
                " steps are trained"
            )
        self._next = max(self._next, event.ordinal + 1)
        self._draw(event)
        # Groups that are finished and will be rejected are told only when their batch is complete.
        most = self._max_open + self._max_draws - 1
        if self._max_open and len(self.in_flight) > most:
            self._wrong(
                f"{len(self.in_flight)} groups are neither trained nor rejected, but {most} may be"
            )

    def _finish(self, event: Finished) -> None:
        life = self.open.get(event.ordinal)
        if life is None or life.finished is not None:
            what = "twice" if life else "but is not in flight"
            self._wrong(f"group {event.ordinal} is finished, {what}")
            return
        life.finished = event
        for one in event.rollouts:
            versions = [version for version, _ in one.versions]
            if not versions or min(versions) < life.version:
                self._wrong(
                    f"group {event.ordinal}, dispatched at version {life.version}, has a rollout of"
                    f" versions {versions}"
                )

    def _decide(self, event: Accepted | Rejected) -> None:
        verb = type(event).__name__.lower()
        if self._dispatch_policy == ORDERED and event.ordinal != self._decided:
            self._wrong(
                f"group {event.ordinal} is {verb}, but the next one to decide on is {self._decided}"
            )
        if event.step not in (self._decided_step, self._decided_step + 1):
            self._wrong(f"group {event.ordinal} is {verb} for step {event.step} out of order")
        if self._dispatch_policy == WINDOWED and event.step != self._told_step:
            for other in self.open.values():
                other.due = event.step if other.finished is not None else None
        self._told_step = event.step
        self._decided = max(self._decided, event.ordinal + 1)
        self._decided_step = max(self._decided_step, event.step)
        life = self.open.get(event.ordinal)
        if life is None or life.step is not None:
            what = "decided on already" if life else "not in flight"
            self._wrong(f"group {event.ordinal} is {verb}, but is {what}")
            return
        if isinstance(event, Rejected) and event.why == STALE:
            self._sweep(event, life)
        elif life.finished is None:
            self._wrong(f"group {event.ordinal} is {verb}, but is not finished")
        life.step, life.is_accepted = event.step, isinstance(event, Accepted)
        life.why = event.why if isinstance(event, Rejected) else ""

    def _sweep(self, event: Rejected, life: Life) -> None:
        """Look at a group that is rejected for its age, before it has finished."""
        # Steps count from 1 in events: the next one trains weights of version `event.step`.
        age = event.step - life.version
        why = "it is finished" if life.finished is not None else ""
        if age <= self._max_staleness:
            why = f"step {event.step + 1} would find it {age} versions old"
        if self._dispatch_policy == ORDERED:
            why = "groups are used in order"
        if why:
            self._wrong(f"group {event.ordinal} is rejected as stale, but {why}")

    def _train(self, event: Trained) -> None:
        if event.step != self.done + 1 or event.version != event.step:
            self._wrong(
                f"step {event.step} is trained to version {event.version}, but the next one is"
                f" step {self.done + 1}"
            )
        drawn = sorted(o for o, life in self.open.items() if life.step == event.step)
        made = Step(cursor=self._cursor_after(drawn))
        for ordinal in drawn:
            life = self.open.pop(ordinal)
            if not life.is_accepted:
                made.rejected[life.why] += 1
                continue
            made.trained += 1
            rollouts = life.finished.rollouts if life.finished is not None else []
            oldest = [min((v for v, _ in one.versions), default=0) for one in rollouts]
            made.ages.update(event.step - 1 - version for version in oldest)
            used = {version for one in rollouts for version, _ in one.versions}
            first = min(self.receipts, default=event.step)
            if unknown := sorted(v for v in used if v >= first and v not in self.receipts):
                self._wrong(f"group {ordinal} has tokens of version {unknown[0]}, not published")
            age = event.step - 1 - min([life.version, *oldest])
            if age > self._max_staleness:
                self._wrong(
                    f"group {ordinal} is trained at an age of {age} versions, but"
                    f" {self._max_staleness} are allowed"
                )
        num_drawn = len(drawn) - made.rejected[STALE]
        if made.trained != self._groups_per_step and num_drawn != self._max_draws:
            self._wrong(
                f"step {event.step} is trained on {made.trained} groups of {num_drawn} drawn, but"
                f" a batch has {self._groups_per_step}, or fewer of {self._max_draws} drawn"
            )
        self.steps.append(made)
        for ordinal, life in self.open.items():
            if life.step is None and life.due is not None and life.due <= event.step:
                self._wrong(
                    f"group {ordinal} was finished before step {life.due}'s batch was complete, but"
                    " is not part of it"
                )
            elif life.step is None and event.step - life.version > self._max_staleness:
                self._wrong(
                    f"group {ordinal} of version {life.version} is too old for step"
                    f" {event.step + 1} and all after it, but was not rejected as stale"
                )

    def _publish(self, event: Published) -> None:
        if event.version != self.done:
            self._wrong(f"version {event.version} is published, but {self.done} steps are trained")
        if self.receipts.setdefault(event.version, event.receipts) is not event.receipts:
            self._wrong(f"version {event.version} is published twice")

    def _cursor_after(self, drawn: list[int]) -> Cursor:
        """The groups that are used once a step has used `drawn` too."""
        first, used = self.cursor.first, {*self.cursor.beyond, *drawn}
        while first in used:
            used.remove(first)
            first += 1
        return Cursor(first, tuple(sorted(used)))

    def _wrong(self, what: str) -> None:
        self.num_contradictions += 1
        if len(self.contradictions) < LISTED:
            self.contradictions.append(f"event {self._event}: {what}")


def _told(cursor: Cursor) -> str:
    """A cursor in words."""
    more = f" without {', '.join(map(str, cursor.beyond))}" if cursor.beyond else ""
    return f"group {cursor.first}{more}"


def audit(events: Iterable[Event]) -> Audit:
    """The audit of a whole ledger."""
    found = Audit()
    for event in events:
        found.take(event)
    found.finish()
    return found
