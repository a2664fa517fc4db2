"""The dispatch policies against one model of a run, in any order of finishing, training, losing an
engine and resuming; and what the rollout service makes of them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megarl.ledger.audit import audit
from megarl.ledger.events import Dispatched, Rejected, from_record
from megarl.ledger.journal import FILE, Reader
from megarl.ledger.recorder import Recorder
from megarl.rollout.config import DispatchName, DynamicSamplingConfig, RolloutConfig
from megarl.rollout.dispatch.contract import Batch, DispatchPolicy, Limits
from megarl.rollout.dispatch.registry import POLICIES, limits_of, refusal
from megarl.rollout.service import RolloutService
from megarl.types import START, Cursor, Prompt, Segment, TokenArrays, Verdict


def test_the_names_in_recipes_are_the_policies() -> None:
    assert list(get_args(DispatchName)) == list(POLICIES)
    assert RolloutConfig().dispatch in POLICIES
    assert all(policy.__doc__ for policy in POLICIES.values())


# ------------------------------------------------------------------------------- state machines


class Run(RuleBasedStateMachine):
    """A run as its dispatch policy sees it: what must hold for every policy."""

    name = ""

    @initialize(
        per_step=st.integers(1, 4),
        draws=st.floats(1.0, 3.0),
        staleness=st.integers(0, 3),
        last_step=st.integers(0, 6),
        more=st.integers(0, 12),
    )
    def begin(self, per_step: int, draws: float, staleness: int, last_step: int, more: int) -> None:
        self.limits = Limits(
            per_step=per_step,
            max_draws=round(draws * per_step),
            staleness=staleness,
            last_step=last_step,
            max_open=per_step + more,
        )
        self.policy: DispatchPolicy = POLICIES[self.name].restore(self.limits, START, 0)
        self.versions: dict[int, int] = {}
        """{ordinal: version at dispatch} since the newest start of the run."""
        self.produced: set[int] = set()
        """Groups that are dispatched, but those that resuming has made void."""
        self.flying: set[int] = set()
        self.held: set[int] = set()
        """Groups in flight on a lost engine, which finish only once it is replaced."""
        self.finished: dict[int, bool] = {}
        """{ordinal: accepted} of the groups that no batch has used."""
        self.used: dict[int, int] = {}
        """{ordinal: step} of the groups that are part of a batch, or swept with it."""
        self.num_accepted: dict[int, int] = {}
        """{step: groups trained on} of the closed batches."""
        self.cursors: dict[int, Cursor] = {0: START}
        """{steps: cursor after them}, as checkpoints have it."""

    # ------------------------------------------------------------------------------------- rules

    @precondition(lambda self: self.policy.may_start())
    @rule(several=st.booleans())
    def start(self, several: bool) -> None:
        while self.policy.may_start():
            ordinal = self.policy.start()
            known = {*self.used, *self.flying, *self.finished}
            assert ordinal not in known, "a group is generated a second time"
            assert set(range(ordinal)) <= known, "a group is passed over"
            self.produced.add(ordinal)
            self.flying.add(ordinal)
            self.versions[ordinal] = self.policy.version
            if not several:
                break

    @precondition(lambda self: self.flying - self.held)
    @rule(data=st.data(), count=st.integers(1, 4), accepted=st.booleans())
    def finish(self, data: st.DataObject, count: int, accepted: bool) -> None:
        for _ in range(count):
            if able := sorted(self.flying - self.held):
                self.end(data.draw(st.sampled_from(able)), accepted)
                accepted = True

    @precondition(lambda self: self.policy.version < self.policy.step)
    @rule(late=st.integers(0, 3))
    def train(self, late: int) -> None:
        """Every rank releases each version, and a slow rank comes late."""
        version = self.policy.version + 1
        self.policy.release(version)
        self.policy.release(max(0, version - late))
        assert self.policy.version == version

    @precondition(lambda self: self.flying and not self.held)
    @rule(data=st.data())
    def lose_an_engine(self, data: st.DataObject) -> None:
        self.held = set(data.draw(st.lists(st.sampled_from(sorted(self.flying)), unique=True)))

    @precondition(lambda self: self.held)
    @rule()
    def replace_the_engine(self) -> None:
        self.held = set()

    @precondition(lambda self: self.policy.version > 0)
    @rule(data=st.data(), wants_gaps=st.booleans())
    def resume(self, data: st.DataObject, wants_gaps: bool) -> None:
        """The run is killed, and goes on from the checkpoint of a step that is trained."""
        trained = range(self.policy.version + 1)
        gaps = [step for step in trained if self.cursors[step].beyond]
        step = data.draw(st.sampled_from(gaps if gaps and wants_gaps else trained))
        self.policy = POLICIES[self.name].restore(self.limits, self.cursors[step], step)
        self.versions, self.flying, self.held, self.finished = {}, set(), set(), {}
        self.used = {ordinal: at for ordinal, at in self.used.items() if at < step}
        self.produced = set(self.used)
        self.num_accepted = {at: count for at, count in self.num_accepted.items() if at < step}
        assert (self.policy.step, self.policy.version) == (step, step)

    # --------------------------------------------------------------------------------- the model

    def end(self, ordinal: int, accepted: bool) -> None:
        """A group finishes, and the batches that are complete then are closed."""
        self.flying.remove(ordinal)
        self.finished[ordinal] = accepted
        self.policy.finish(ordinal, accepted)
        step = self.policy.step
        while (batch := self.policy.close()) is not None:
            assert self.policy.step == step + 1
            self.look_at(batch, step)
            step += 1
            self.cursors[step] = self.policy.cursor()

    def look_at(self, batch: Batch, step: int) -> None:
        """Whether the batch of `step` can be right."""
        limits, drawn = self.limits, batch.drawn
        assert step <= limits.last_step, "a batch after the last step"
        assert drawn == sorted(drawn)
        assert batch.accepted == [ordinal for ordinal in drawn if self.finished.pop(ordinal)]
        assert len(drawn) <= limits.max_draws and len(batch.accepted) <= limits.per_step
        assert len(batch.accepted) == limits.per_step or len(drawn) == limits.max_draws
        for ordinal in drawn:
            age = step - self.versions[ordinal]
            assert age <= limits.staleness, f"group {ordinal} is trained {age} versions old"
        for ordinal in batch.swept:
            self.flying.remove(ordinal)
            self.held.discard(ordinal)
            age = step + 1 - self.versions[ordinal]
            assert age > limits.staleness, f"group {ordinal} could still be trained"
        for ordinal in self.flying:
            age = step + 1 - self.versions[ordinal]
            assert age <= limits.staleness, f"group {ordinal} is too old and stays in flight"
        self.num_accepted[step] = len(batch.accepted)
        assert not self.used.keys() & {*drawn, *batch.swept}, "a group is used a second time"
        self.used |= dict.fromkeys([*drawn, *batch.swept], step)

    # -------------------------------------------------------------------------------- invariants

    @invariant()
    def every_group_is_somewhere(self) -> None:
        """Produced = trained + rejected + buffered + open, and the cursor names those used."""
        cursor = self.policy.cursor()
        assert {*range(cursor.first), *cursor.beyond} == set(self.used)
        assert cursor.first not in self.used
        assert list(cursor.beyond) == sorted(set(cursor.beyond))
        everything = [*self.used, *self.finished, *self.flying]
        assert sorted(everything) == sorted(self.produced)

    @invariant()
    def a_group_waits_for_a_step_that_may_train_it(self) -> None:
        for ordinal in {*self.finished, *self.flying}:
            assert self.policy.step - self.versions[ordinal] <= self.limits.staleness

    @invariant()
    def little_is_open(self) -> None:
        """What is in memory is bounded, however long groups take and whatever is rejected."""
        limits = self.limits
        untrained = [n for step, n in self.num_accepted.items() if step >= self.policy.version]
        assert len(untrained) <= limits.staleness + 1, "too many batches wait for the trainer"
        num_open = len(self.flying) + sum(self.finished.values()) + sum(untrained)
        assert num_open <= self.most_open()
        assert len(self.finished) <= (limits.staleness + 1) * limits.max_draws

    def most_open(self) -> int:
        return self.limits.max_open

    @invariant()
    def no_group_is_started_that_no_step_uses(self) -> None:
        left = (self.limits.last_step - self.policy.step + 1) * self.limits.per_step
        if self.name == "windowed":
            assert len(self.flying) + sum(self.finished.values()) <= left
        if self.policy.step > self.limits.last_step:
            assert not self.flying and not self.finished and not self.policy.may_start()

    def teardown(self) -> None:
        """From any state, if the groups in flight finish and the trainer trains, the run ends."""
        if not hasattr(self, "policy"):
            return
        self.held = set()
        # Among runs that differ only in this, one trains at once and one as late as possible.
        is_eager, rejects = self.limits.max_open % 2 == 0, self.limits.max_open % 3
        turn = 0
        while self.policy.step <= self.limits.last_step:
            turn += 1
            while self.policy.may_start():
                self.start(several=True)
            if self.flying:
                self.end(max(self.flying) if is_eager else min(self.flying), turn % 4 >= rejects)
            else:
                assert self.policy.version < self.policy.step, "the run is stuck"
            if self.policy.version < self.policy.step and (is_eager or not self.flying):
                self.train(late=0)
        assert not self.flying and not self.finished
        assert self.policy.cursor() == Cursor(len(self.used))


class OrderedRun(Run):
    name = "ordered"

    def most_open(self) -> int:
        """As many as the steps can use that may train them."""
        return (self.limits.staleness + 1) * self.limits.per_step

    def look_at(self, batch: Batch, step: int) -> None:
        first = len(self.used)
        super().look_at(batch, step)
        assert batch.drawn == list(range(first, first + len(batch.drawn))) and not batch.swept


class WindowedRun(Run):
    name = "windowed"

    def look_at(self, batch: Batch, step: int) -> None:
        finished = sorted(self.finished)
        super().look_at(batch, step)
        assert batch.drawn == finished, "a finished group is overtaken"


EXAMPLES = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestOrdered = OrderedRun.TestCase
TestOrdered.settings = EXAMPLES
TestWindowed = WindowedRun.TestCase
TestWindowed.settings = EXAMPLES
