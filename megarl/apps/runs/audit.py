"""Audit of a run's ledger: what became of every group of rollouts, and whether that can be true.

A group is the rollouts of one prompt; its ordinal is the position of the prompt in the run's
training order, from 0. The ledger is the run's file of events: groups are dispatched to the
engines, finished, accepted for a step or rejected, and trained on.

The audit goes through the events once and keeps, of finished steps, only their counts. Each event
must be possible after those before: then every group of the steps that count was trained or
rejected exactly once, none was skipped or older than the run allows, and groups that were sent out
again after a resume have kept prompt and seed. Under `rollout.dispatch: ordered` groups are
accepted or rejected in the order of their ordinals. Under any other policy a group may overtake
others, one that is too old for every step to come must be rejected as stale, no other may be, and
at most `max_open` groups are open. Under `windowed` a batch has every group that finished before
the batch was complete. A ledger that was cut off anywhere passes, since a run may be killed at any
time.
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
"""Number of contradictions that are kept as text; those that follow are often consequences."""


@dataclass
class UntrainedGroup:
    """A group (the rollouts of one prompt) that no trained step has used: it is being generated, is
    finished, or was accepted or rejected for a step that is not trained yet.
    """

    version: int
    """Weight version of the trainer, which is the number of trained steps, when the group was
    dispatched."""
    finished: Finished | None = None
    due: int | None = None
    """Under `windowed`, the step (from 1) whose batch must have the group, because the group was
    finished before that batch was complete."""
    step: int | None = None
    """Step (from 1) for whose batch the group was accepted or rejected; None before that."""
    is_accepted: bool = False
    why: str = ""
    """Why the group was rejected, such as "stale"; empty if it was not."""


@dataclass
class Step:
    """Counts that are kept of a trained step: groups (rollouts of one prompt) trained on, and
    groups rejected.
    """

    cursor: Cursor
    """Which groups the steps up to this one have used: all ordinals below `first`, and those in
    `beyond`."""
    trained: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """{why: number of groups rejected for this step}"""
    ages: Counter[int] = field(default_factory=Counter)
    """{age: number of rollouts trained on}; the age of a rollout is the number of weight versions
    that its oldest token is behind the weights with which the step began."""


class Audit:
    """What became of a run's groups (rollouts of one prompt), as its ledger, the file of events,
    tells it, and the contradictions in it. Call `take` with each event in order, then `finish`, and
    read the attributes; the function `audit` does all of it.
    """

    def __init__(self) -> None:
        self.contradictions: list[str] = []
        """The first `LISTED` contradictions, as text; empty if the ledger can be true."""
        self.num_contradictions = 0
        self.dispatched = self.void = self.restores = self.cut_bytes = 0
        """Numbers of: groups sent to the engines; groups made void by a resume, which generates
        them again; resumes; bytes of an incomplete last line that were cut off the ledger."""
        self.first_step, self.first_cursor = 0, START
        """Number of steps that were trained before the ledger begins, and the groups that these
        steps have used."""
        self.steps: list[Step] = []
        """The trained steps, in order; the first is step `first_step` + 1. Steps that a resume has
        undone are removed."""
        self.open: dict[int, UntrainedGroup] = {}
        """{ordinal: group} of the groups that are part of no trained step."""
        self.ended: Ended | None = None
        """The event with which the run ended in order; None while it runs or if it was killed."""
        self._limits = Started(0, 0, max_staleness=0, groups_per_step=0, max_draws=0)
        """The present start, with the run's limits."""
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
        """{weight version: hex digests of the weights} published to the engines since the last
        start or resume of the run."""
        self._event = 0

    # -------------------------------------------------------------------------------------- results

    @property
    def done(self) -> int:
        """Number of steps that are trained, those before the ledger begins included."""
        return self.first_step + len(self.steps)

    @property
    def cursor(self) -> Cursor:
        """Which groups (rollouts of one prompt) the trained steps have used, by the positions of
        their prompts in the training order, from 0: all below `first`, and those in the tuple
        `beyond`.
        """
        return self.steps[-1].cursor if self.steps else self.first_cursor

    @property
    def trained(self) -> int:
        """Number of groups (rollouts of one prompt) that are trained on, in the steps that the
        ledger has; steps that a resume has undone do not count.
        """
        return sum(step.trained for step in self.steps)

    @property
    def rejected(self) -> Counter[str]:
        """{reason: number of groups, the rollouts of one prompt, that were rejected for it}, also
        for a step that is not trained yet. Reasons are words such as "stale".
        """
        untrained = Counter(group.why for group in self.open.values() if group.why)
        return sum((step.rejected for step in self.steps), untrained)

    @property
    def in_flight(self) -> list[int]:
        """Groups that were sent to the engines and have neither been trained on nor rejected nor
        made void by a resume, as ascending positions of their prompts in the training order.
        """
        return sorted(ordinal for ordinal, group in self.open.items() if not group.why)

    @property
    def ages(self) -> Counter[int]:
        """{age: number of rollouts that are trained on}; the age of a rollout is the number of
        weight versions that its oldest token is behind the weights with which its step began.
        """
        return sum((step.ages for step in self.steps), Counter())

    # --------------------------------------------------------------------------------------- events

    def take(self, event: Event) -> None:
        """Add the next event of the ledger, the run's file of events. An impossible event is
        reported in `num_contradictions` and, as text, in `contradictions`; nothing is raised for
        it.
        """
        self._event += 1
        if not isinstance(event, Started):
            problem = f"{type(event).__name__.lower()} after the run has ended"
            self._check(self.ended is None, problem)
            self._check(self._is_started, "the run has not started")
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
            case Published(version, receipts):
                subject = f"version {version} is published"
                self._check(version == self.done, f"{subject}, but {self.done} steps are trained")
                self._check(version not in self.receipts, f"{subject} twice")
                self.receipts[version] = receipts
            case Ended(step):
                problem = f"the run ended after {step} steps, {self.done} are trained"
                self._check(step == self.done, problem)
                self.ended = event

    def finish(self) -> None:
        """Compare the numbers of groups (rollouts of one prompt), after the last event: those
        dispatched must all be trained, rejected, in flight or void (undone by a resume). A
        difference is reported in `contradictions`.
        """
        parts = self.trained + sum(self.rejected.values()) + len(self.in_flight) + self.void
        self._check(
            parts == self.dispatched,
            f"{self.dispatched} groups were dispatched, but {parts} are trained, rejected, in"
            " flight or void",
        )

    def _start(self, event: Started) -> None:
        cursor, is_restored = Cursor(event.cursor, tuple(event.used)), isinstance(event, Restored)
        # An older checkpoint than the one that the ledger begins with becomes its beginning.
        if not self._is_started or event.step < self.first_step:
            self.first_step, self.first_cursor = event.step, cursor
        is_first = not self._is_started
        self._check(is_restored or is_first, "a new run starts in the ledger of another")
        self._limits, self._is_started, self.ended = event, True, None
        self.restores += is_restored
        self.cut_bytes += event.cut_bytes
        self._drawn = self._drawn if event.step else array("q")  # only checkpoints fix data, seed
        problem = f"the run goes on after step {event.step}, but {self.done} are trained"
        self._check(event.step <= self.done, problem)
        keep = event.step - self.first_step
        dropped, self.steps = self.steps[keep:], self.steps[:keep]
        lost = sum(step.trained + step.rejected.total() for step in dropped)
        self.void += len(self.open) + lost
        self._check(
            cursor == self.cursor,
            f"the run goes on at {_told(cursor)}, but {self.done} steps have used the groups"
            f" before {_told(self.cursor)}",
        )
        self.open, self.receipts = {}, {}
        self._next = self._decided = event.cursor
        self._used, self._has_dispatched = set(event.used), False
        self._decided_step, self._told_step = event.step + 1, 0

    def _carry(self, event: Carried) -> None:
        ordinal, subject = event.ordinal, f"group {event.ordinal} is taken from a checkpoint, but"
        is_at_start = self.restores > 0 and not self._has_dispatched
        self._check(is_at_start, f"{subject} not at the start of a resumed run")
        is_new = ordinal >= self.cursor.first and ordinal not in self._used
        self._check(is_new, f"{subject} is used already, or taken twice")
        problem = f"{subject} is of version {event.version}, and {self.done} steps are trained"
        self._check(event.version <= self.done, problem)
        self._used.add(ordinal)
        self._draw(event)

    def _draw(self, event: Dispatched) -> None:
        self.dispatched += 1
        self.open[event.ordinal] = UntrainedGroup(event.version)
        self._drawn.extend([0] * (event.ordinal + 1 - len(self._drawn)))
        before, drawn = self._drawn[event.ordinal], hash((event.prompt, event.seed)) or 1
        problem = f"group {event.ordinal} has another prompt or seed than before a resume"
        self._check(before in (0, drawn), problem)
        self._drawn[event.ordinal] = drawn

    def _dispatch(self, event: Dispatched) -> None:
        subject = f"group {event.ordinal} is dispatched"
        while self._next in self._used:
            self._next += 1
        self._check(event.ordinal == self._next, f"{subject} where {self._next} is next")
        problem = f"{subject} at version {event.version}, but {self.done} steps are trained"
        self._check(event.version == self.done, problem)
        self._next, self._has_dispatched = max(self._next, event.ordinal + 1), True
        self._draw(event)
        if self._limits.max_open:
            # Finished groups that will be rejected are told only when their batch is complete.
            most, flying = self._limits.max_open + self._limits.max_draws - 1, len(self.in_flight)
            problem = f"{flying} groups are neither trained nor rejected, but {most} may be"
            self._check(flying <= most, problem)

    def _finish(self, event: Finished) -> None:
        group, subject = self.open.get(event.ordinal), f"group {event.ordinal} is finished,"
        if group is None or group.finished is not None:
            self._wrong(f"{subject} {'twice' if group else 'but is not in flight'}")
            return
        group.finished = event
        for rollout in event.rollouts:
            versions = [version for version, _ in rollout.versions]
            self._check(
                min(versions, default=-1) >= group.version,
                f"group {event.ordinal}, dispatched at version {group.version}, has a rollout of"
                f" versions {versions}",
            )

    def _decide(self, event: Accepted | Rejected) -> None:
        policy, verb = self._limits.dispatch, type(event).__name__.lower()
        subject = f"group {event.ordinal} is {verb}"
        is_next = policy != ORDERED or event.ordinal == self._decided
        self._check(is_next, f"{subject}, but the next one to decide on is {self._decided}")
        is_in_order = event.step in (self._decided_step, self._decided_step + 1)
        self._check(is_in_order, f"{subject} for step {event.step} out of order")
        if policy == WINDOWED and event.step != self._told_step:
            for other in self.open.values():
                other.due = event.step if other.finished is not None else None
        self._told_step = event.step
        self._decided = max(self._decided, event.ordinal + 1)
        self._decided_step = max(self._decided_step, event.step)
        group = self.open.get(event.ordinal)
        if group is None or group.step is not None:
            self._wrong(f"{subject}, but is {'decided on already' if group else 'not in flight'}")
            return
        group.why = event.why if isinstance(event, Rejected) else ""
        group.step, group.is_accepted = event.step, isinstance(event, Accepted)
        if group.why != STALE:
            self._check(group.finished is not None, f"{subject}, but is not finished")
            return
        # Steps count from 1 in events: the next one trains weights of version `event.step`.
        age, why = event.step - group.version, ""
        if policy == ORDERED:
            why = "groups are used in order"
        elif age <= self._limits.max_staleness:
            why = f"step {event.step + 1} would find it {age} versions old"
        elif group.finished is not None:
            why = "it is finished"
        self._check(not why, f"{subject} as stale, but {why}")

    def _train(self, event: Trained) -> None:
        self._check(
            event.step == event.version == self.done + 1,
            f"step {event.step} is trained to version {event.version}, but the next one is"
            f" step {self.done + 1}",
        )
        drawn = sorted(o for o, group in self.open.items() if group.step == event.step)
        step = Step(cursor=self._cursor_after(drawn))
        for ordinal in drawn:
            group = self.open.pop(ordinal)
            if group.is_accepted:
                step.trained += 1
                step.ages.update(self._check_ages(ordinal, group, event.step))
            else:
                step.rejected[group.why] += 1
        num_drawn = len(drawn) - step.rejected[STALE]
        self._check(
            step.trained == self._limits.groups_per_step or num_drawn == self._limits.max_draws,
            f"step {event.step} is trained on {step.trained} groups of {num_drawn} drawn, but a"
            f" batch has {self._limits.groups_per_step}, or fewer of {self._limits.max_draws} drawn",
        )
        self.steps.append(step)
        for ordinal, group in self.open.items():
            if group.step is None and group.due is not None and group.due <= event.step:
                self._wrong(
                    f"group {ordinal} was finished before step {group.due}'s batch was complete, but"
                    " is not part of it"
                )
            elif group.step is None and event.step - group.version > self._limits.max_staleness:
                self._wrong(
                    f"group {ordinal} of version {group.version} is too old for step"
                    f" {event.step + 1} and all after it, but was not rejected as stale"
                )

    def _check_ages(self, ordinal: int, group: UntrainedGroup, step: int) -> list[int]:
        """Age in versions of each rollout of a group trained at `step`. Notes contradictions: tokens
        of an unpublished version, or ages above `max_staleness`.
        """
        rollouts = group.finished.rollouts if group.finished is not None else []
        versions = {version for rollout in rollouts for version, _ in rollout.versions}
        # receipts go back to the last start or resume only
        oldest = min(self.receipts, default=step)
        unknown = min((v for v in versions if v >= oldest and v not in self.receipts), default=None)
        problem = f"group {ordinal} has tokens of version {unknown}, not published"
        self._check(unknown is None, problem)
        # step k, counted from 1, trains weights of version k - 1
        ages = [step - 1 - min((v for v, _ in rollout.versions), default=0) for rollout in rollouts]
        age, most = max([step - 1 - group.version, *ages]), self._limits.max_staleness
        self._check(
            age <= most,
            f"group {ordinal} is trained at an age of {age} versions, but {most} are allowed",
        )
        return ages

    def _cursor_after(self, drawn: list[int]) -> Cursor:
        """The groups that are used once a step has used `drawn` too."""
        first, used = self.cursor.first, {*self.cursor.beyond, *drawn}
        while first in used:
            used.remove(first)
            first += 1
        return Cursor(first, tuple(sorted(used)))

    def _check(self, holds: bool, problem: str) -> None:
        if not holds:
            self._wrong(problem)

    def _wrong(self, problem: str) -> None:
        self.num_contradictions += 1
        if len(self.contradictions) < LISTED:
            self.contradictions.append(f"event {self._event}: {problem}")


def _told(cursor: Cursor) -> str:
    """A cursor in words."""
    more = f" without {', '.join(map(str, cursor.beyond))}" if cursor.beyond else ""
    return f"group {cursor.first}{more}"


def audit(events: Iterable[Event]) -> Audit:
    """Audit the ledger of a run, its file of events about groups (the rollouts of one prompt):
    returns an object with what became of the groups (`trained`, `rejected`, `in_flight`, ...) and
    with the `contradictions` between events, as text. `events`: all, oldest first, gone through
    once. Raises nothing for a contradiction.
    """
    sums = Audit()
    for event in events:
        sums.take(event)
    sums.finish()
    return sums
