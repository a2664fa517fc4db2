"""What became of every group of a run, from its ledger, and whether that can be true.

The audit goes through the events once and keeps, of finished steps, only their counts. Each event
must be possible after those before: then every group of the steps that count was trained or
rejected exactly once, in order, none was skipped, and none was older than the run allows. A ledger
that was cut off anywhere passes, since a run may be killed at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from megarl.ledger.events import (
    Accepted,
    Dispatched,
    Ended,
    Event,
    Finished,
    Rejected,
    Restored,
    Started,
    Trained,
)

LISTED = 5
"""Contradictions that are kept; those that follow are often consequences."""


@dataclass
class Life:
    """A group that is neither void nor of a trained step."""

    version: int
    """Trainer version when the group was dispatched."""
    finished: Finished | None = None
    step: int | None = None
    """Step that it was drawn for."""
    is_accepted: bool = False
    why: str = ""
    """Why it was rejected."""


@dataclass
class Step:
    """What is kept of a trained step."""

    cursor: int
    """Ordinal after the step's last group."""
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
        self.first_step, self.first_ordinal = 0, 0
        """Steps and groups before the ledger begins."""
        self.steps: list[Step] = []
        """The trained steps that count, from `first_step` on."""
        self.open: dict[int, Life] = {}
        """Groups of no trained step, by ordinal."""
        self.ended: Ended | None = None
        """The last event, if the run ended and was not killed."""
        self._max_staleness = self._groups_per_step = self._max_draws = 0
        self._is_started = False
        self._next = self._decided = 0
        """Ordinals of the next group to dispatch, and of the next one to accept or reject."""
        self._decided_step = 1
        """Step of the newest decision."""
        self._event = 0

    # -------------------------------------------------------------------------------------- results

    @property
    def done(self) -> int:
        """Steps that are trained."""
        return self.first_step + len(self.steps)

    @property
    def cursor(self) -> int:
        """Ordinal of the first group that no trained step has used."""
        return self.steps[-1].cursor if self.steps else self.first_ordinal

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
            case Dispatched():
                self._dispatch(event)
            case Finished():
                self._finish(event)
            case Accepted() | Rejected():
                self._decide(event)
            case Trained():
                self._train(event)
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
        if not self._is_started:
            self.first_step, self.first_ordinal = event.step, event.cursor
        elif not isinstance(event, Restored):
            self._wrong("a new run starts in the ledger of another")
        if isinstance(event, Restored):
            self.restores += 1
        self.cut_bytes += event.cut_bytes
        self._is_started, self.ended = True, None
        self._max_staleness = event.max_staleness
        self._groups_per_step, self._max_draws = event.groups_per_step, event.max_draws
        self.void += len(self.open)
        if event.step > self.done:
            self._wrong(f"the run goes on after step {event.step}, but {self.done} are trained")
        elif event.step < self.first_step:
            # An older checkpoint than the one that the ledger begins with.
            self.first_step, self.first_ordinal = event.step, event.cursor
            self.void += self._drop(0)
        else:
            self.void += self._drop(event.step - self.first_step)
        if event.cursor != self.cursor:
            self._wrong(
                f"the run goes on at group {event.cursor}, but {self.done} steps have used the"
                f" groups before {self.cursor}"
            )
        self.open = {}
        self._next = self._decided = event.cursor
        self._decided_step = event.step + 1

    def _drop(self, keep: int) -> int:
        """Forget the trained steps but the first `keep`; returns the number of their groups."""
        dropped, self.steps = self.steps[keep:], self.steps[:keep]
        return sum(step.trained + step.rejected.total() for step in dropped)

    def _dispatch(self, event: Dispatched) -> None:
        self.dispatched += 1
        if event.ordinal != self._next:
            self._wrong(f"group {event.ordinal} is dispatched where {self._next} is next")
        if event.version != self.done:
            self._wrong(
                f"group {event.ordinal} is dispatched at version {event.version}, but {self.done}"
                " steps are trained"
            )
        self._next = max(self._next, event.ordinal + 1)
        self.open[event.ordinal] = Life(event.version)

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
        if event.ordinal != self._decided:
            self._wrong(
                f"group {event.ordinal} is {verb}, but the next one to decide on is {self._decided}"
            )
        if event.step not in (self._decided_step, self._decided_step + 1):
            self._wrong(f"group {event.ordinal} is {verb} for step {event.step} out of order")
        self._decided = max(self._decided, event.ordinal + 1)
        self._decided_step = max(self._decided_step, event.step)
        life = self.open.get(event.ordinal)
        if life is None or life.step is not None:
            what = "decided on already" if life else "not in flight"
            self._wrong(f"group {event.ordinal} is {verb}, but is {what}")
            return
        if life.finished is None:
            self._wrong(f"group {event.ordinal} is {verb}, but is not finished")
        life.step, life.is_accepted = event.step, isinstance(event, Accepted)
        life.why = event.why if isinstance(event, Rejected) else ""

    def _train(self, event: Trained) -> None:
        if event.step != self.done + 1 or event.version != event.step:
            self._wrong(
                f"step {event.step} is trained to version {event.version}, but the next one is"
                f" step {self.done + 1}"
            )
        drawn = sorted(o for o, life in self.open.items() if life.step == event.step)
        made = Step(cursor=drawn[-1] + 1 if drawn else self.cursor)
        for ordinal in drawn:
            life = self.open.pop(ordinal)
            if not life.is_accepted:
                made.rejected[life.why] += 1
                continue
            made.trained += 1
            rollouts = life.finished.rollouts if life.finished is not None else []
            oldest = [min((v for v, _ in one.versions), default=0) for one in rollouts]
            made.ages.update(event.step - 1 - version for version in oldest)
            age = event.step - 1 - min([life.version, *oldest])
            if age > self._max_staleness:
                self._wrong(
                    f"group {ordinal} is trained at an age of {age} versions, but"
                    f" {self._max_staleness} are allowed"
                )
        if made.trained != self._groups_per_step and len(drawn) != self._max_draws:
            self._wrong(
                f"step {event.step} is trained on {made.trained} groups of {len(drawn)} drawn, but"
                f" a batch has {self._groups_per_step}, or fewer of {self._max_draws} drawn"
            )
        self.steps.append(made)

    def _wrong(self, what: str) -> None:
        self.num_contradictions += 1
        if len(self.contradictions) < LISTED:
            self.contradictions.append(f"event {self._event}: {what}")


def audit(events: Iterable[Event]) -> Audit:
    """The audit of a whole ledger."""
    found = Audit()
    for event in events:
        found.take(event)
    found.finish()
    return found
