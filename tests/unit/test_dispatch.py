"""The dispatch policies against one model of a run, in any order of finishing, training and
resuming; and what the rollout service makes of them.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.rollouts import Prompts, rollout_service, segment

from megarl.apps.runs.audit import audit
from megarl.checkpoints.group_files import read_groups, segments_of, with_arrays, write_groups
from megarl.checkpoints.progress import Progress, read_progress, write_progress
from megarl.ledger.events import Carried, Dispatched, Rejected, from_record
from megarl.ledger.journal import FILE, Reader
from megarl.ledger.recorder import Recorder
from megarl.rollout.batch import SharePlan
from megarl.rollout.dispatch.contract import Batch, DispatchPolicy, Limits
from megarl.rollout.dispatch.policy_table import POLICIES, limits_of, refusal
from megarl.rollout.service import RolloutService, by_version
from megarl.settings.rollout import DynamicSamplingConfig, RolloutConfig
from megarl.types import START, Cursor, Group, Prompt, Rollout, Segment, Verdict

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
        self.finished: dict[int, bool] = {}
        """{ordinal: accepted} of the groups that no batch has used."""
        self.used: dict[int, int] = {}
        """{ordinal: step} of the groups that are part of a batch, or swept with it."""
        self.num_accepted: dict[int, int] = {}
        """{step: groups trained on} of the closed batches."""
        self.cursors: dict[int, Cursor] = {0: START}
        """{steps: cursor after them}, as checkpoints have it."""
        self.carried: dict[int, dict[int, tuple[int, bool]]] = {}
        """{steps: {ordinal: (version at dispatch, accepted)} of the finished groups that the steps
        have not used}, as checkpoints have it."""
        self.outcomes: dict[int, bool] = {}
        """{ordinal: accepted} of every finished group since the newest start of the run."""

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

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), count=st.integers(1, 4), accepted=st.booleans())
    def finish(self, data: st.DataObject, count: int, accepted: bool) -> None:
        for _ in range(count):
            if able := sorted(self.flying):
                self.end(data.draw(st.sampled_from(able)), accepted)
                accepted = True

    @precondition(lambda self: self.policy.version < self.policy.step)
    @rule(late=st.integers(0, 3))
    def train(self, late: int) -> None:
        """Every rank releases each version, and a slow rank comes late."""
        self.save()
        version = self.policy.version + 1
        self.policy.release(version)
        self.policy.release(max(0, version - late))
        assert self.policy.version == version

    @rule()
    def save(self) -> None:
        """A checkpoint of the present version; several ranks write the same one."""
        done = self.policy.version
        unused = {o for o in self.outcomes if self.used.get(o, done) >= done}
        self.carried.setdefault(done, {o: (self.versions[o], self.outcomes[o]) for o in unused})

    @precondition(lambda self: self.policy.version > 0)
    @rule(data=st.data(), wants_gaps=st.booleans())
    def resume(self, data: st.DataObject, wants_gaps: bool) -> None:
        """The run is killed, and goes on from the checkpoint of a step that is trained."""
        trained = range(self.policy.version + 1)
        gaps = [step for step in trained if self.cursors[step].beyond]
        step = data.draw(st.sampled_from(gaps if gaps and wants_gaps else trained))
        self.policy = POLICIES[self.name].restore(self.limits, self.cursors[step], step)
        self.versions, self.flying, self.finished = {}, set(), {}
        self.used = {ordinal: at for ordinal, at in self.used.items() if at < step}
        self.produced = set(self.used)
        self.num_accepted = {at: count for at, count in self.num_accepted.items() if at < step}
        assert (self.policy.step, self.policy.version) == (step, step)
        self.carried = {done: groups for done, groups in self.carried.items() if done <= step}
        self.outcomes = {}
        carried = [(version, o, ok) for o, (version, ok) in self.carried.get(step, {}).items()]
        for version, ordinal, accepted in sorted(carried):
            assert ordinal not in self.used
            if self.policy.adopt(ordinal, version, accepted):
                self.versions[ordinal] = version
                self.produced.add(ordinal)
                self.end(ordinal, accepted, adopted=True)

    # --------------------------------------------------------------------------------- the model

    def end(self, ordinal: int, accepted: bool, adopted: bool = False) -> None:
        """A group finishes, and the batches that are complete then are closed. `adopted`: it was
        finished before the run was resumed.
        """
        self.finished[ordinal] = self.outcomes[ordinal] = accepted
        if not adopted:
            self.flying.remove(ordinal)
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
        in_order = (limits.staleness + 1) * limits.per_step  # that steps can use
        assert num_open <= (in_order if self.name == "ordered" else limits.max_open)
        assert len(self.finished) <= (limits.staleness + 1) * limits.max_draws

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


MACHINES: dict[str, type[Run]] = {"ordered": OrderedRun, "windowed": WindowedRun}
"""The machines of policies for which more holds than for every policy."""

for policy_name in POLICIES:
    machine = MACHINES.get(policy_name) or type(policy_name, (Run,), {"name": policy_name})
    machine.TestCase.settings = settings(
        max_examples=120,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),  # a busy machine is slow
    )
    globals()[f"Test{policy_name.title()}"] = machine.TestCase


def test_a_resumed_run_passes_over_groups_that_its_first_gap_leaves_behind() -> None:
    """Once the gap is closed, the cursor no longer lists the groups beyond; they stay used."""
    limits = Limits(per_step=1, max_draws=1, staleness=1, last_step=3, max_open=2)
    policy = POLICIES["windowed"].restore(limits, Cursor(0, (1, 2)), 2)
    assert policy.start() == 0
    policy.finish(0, True)
    assert policy.close() == Batch([0], [0]) and policy.cursor() == Cursor(3)
    assert policy.start() == 3


# ------------------------------------------------------------------------------- with the service


class Engine:
    """Answers at once with one token of the weights that the service has; the request of one group
    never ends.
    """

    def __init__(self, stuck: int) -> None:
        self.stuck, self.cancelled = stuck, 0
        self.asked: set[int] = set()
        """Ordinals of the groups that requests came for."""
        self.service: Any = None

    async def generate(self, prompt_ids: np.ndarray, *args: Any, **settings: Any) -> Segment:
        version = self.service.window.version
        self.asked.add(int(prompt_ids[0]))
        if prompt_ids[0] == self.stuck:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        return segment([1], version)


PROMPTS = Prompts(lambda ordinal: Prompt(ordinal, "", [ordinal], ""))


def service(path: Path, dispatch: Any, engine: Any, **more: Any) -> RolloutService:
    config = RolloutConfig(
        groups_per_step=3,
        group_size=2,
        max_staleness=1,
        dispatch=dispatch,
        dynamic_sampling=DynamicSamplingConfig(enabled=False),
    )
    engine.service = rollout_service([engine], config, PROMPTS, ledger=Recorder(path), **more)
    return engine.service


async def test_a_group_that_never_ends_is_swept_and_the_run_goes_on(tmp_path: Path) -> None:
    """Its requests are cancelled, the ledger says why it is not trained, and the run resumes at a
    gap that it left.
    """
    path, engine = tmp_path / FILE, Engine(stuck=1)

    async def run(first_step: int, cursor: Cursor, until: int) -> dict[int, Cursor]:
        made = service(path, "windowed", engine, first_step=first_step, cursor=cursor)
        await made.start()
        cursors = {}
        for step in range(first_step, until):
            plan = await asyncio.wait_for(made.take(step, 0), 20)
            assert plan is not None and plan.batch.metrics["groups/stale"] in (0, 1)
            await made.release(step + 1)
            cursors[step + 1] = await made.cursor(step + 1)
        async with asyncio.timeout(20):  # swept, and not only ended by stop
            while engine.cancelled <= 2 * bool(first_step):
                await asyncio.sleep(0.01)
        await made.stop()
        assert not made._tasks and (until < 6 or not made._finished.open)
        return cursors

    cursors = await run(0, START, 1)
    assert cursors == {1: Cursor(1, (2, 3))}
    assert engine.cancelled == 2
    cursors = await run(1, cursors[1], 6)
    assert cursors[6].beyond == () and engine.cancelled == 4
    told = [from_record(record) for record in Reader(path)]
    found = audit(told)
    assert found.contradictions == [] and found.rejected == {"stale": 1}
    assert (found.trained, found.cursor, found.in_flight) == (18, Cursor(19), [])
    assert {one.ordinal for one in told if isinstance(one, Rejected)} == {1}
    again = [one for one in told if isinstance(one, Dispatched)]
    assert len({one.seed for one in again if one.ordinal == 1}) == 1, "resuming changes no seed"
    assert max(found.ages) <= 1


@pytest.mark.parametrize("dispatch", ["ordered", "windowed"])
async def test_a_resumed_run_trains_on_the_finished_groups(dispatch: str, tmp_path: Path) -> None:
    """Six groups are started and one of them does not end; the other five come with the checkpoint,
    and are not generated again.
    """
    path = tmp_path / FILE

    made = service(path, dispatch, Engine(stuck=1))
    await made.start()
    async with asyncio.timeout(20):
        while len(made._tasks) > 1 or made.window.may_start():
            await asyncio.sleep(0.01)
    written = await made.unused(0, 0)
    await made.stop()
    assert [group.ordinal for group in written] == [0, 2, 3, 4, 5]
    write_groups(tmp_path / "groups" / "rank_00000.safetensors", written, "settings")
    assert read_groups(tmp_path, "other settings", PROMPTS.at) == ([], 5)
    groups, left_out = read_groups(tmp_path, "settings", PROMPTS.at)
    assert left_out == 0 and [group.ordinal for group in groups] == [0, 2, 3, 4, 5]
    for one, other in zip(segments_of(written), segments_of(groups), strict=True):
        assert replace(one, arrays=None) == replace(other, arrays=None)
        assert all(map(np.array_equal, one.arrays, other.arrays))
    assert with_arrays(groups, [0] * 10)[4].rollouts[1].segments[0].arrays == 0

    engine = Engine(stuck=-1)
    made = service(path, dispatch, engine, carried=groups)
    await made.start()
    generated_now = 0.0
    for step in range(6):
        plan = await asyncio.wait_for(made.take(step, 0), 20)
        assert isinstance(plan, SharePlan)
        metrics = plan.batch.metrics
        assert metrics["tokens/generated"] == 6
        generated_now += metrics["tokens/generated_per_s"] * metrics["time/rollout_s"]
        await made.release(step + 1)
    await made.stop()
    assert round(generated_now) == 26, "those of the checkpoint do not count for the rate"
    assert engine.asked == {1, *range(6, 18)}
    told = [from_record(record) for record in Reader(path)]
    found = audit(told)
    assert found.contradictions == [] and (found.trained, found.cursor) == (18, Cursor(18))
    assert [one.ordinal for one in told if isinstance(one, Carried)] == [0, 2, 3, 4, 5]
    assert max(found.ages) <= 1
    with pytest.raises(AssertionError, match="a group that its steps have used"):
        service(path, dispatch, Engine(stuck=-1), carried=groups, cursor=Cursor(1))


def test_groups_are_adopted_in_the_order_in_which_they_are_due() -> None:
    """After a second resume the lower ordinals may be the newer groups."""
    limits = Limits(per_step=2, max_draws=2, staleness=1, last_step=30, max_open=8)
    groups = [
        Group(o, PROMPTS.at(o), [Rollout(0, 0, [], Verdict(0.0, False), dispatched_at=version)])
        for o, version in ((20, 11), (21, 11), (24, 10), (25, 10))
    ]
    policy = POLICIES["windowed"].restore(limits, Cursor(20, (22, 23)), 11)
    for version, group in by_version(groups):
        assert policy.adopt(group.ordinal, version, accepted=True)
        policy.close()
    assert policy.step == 13 and policy.cursor() == Cursor(26)


# ----------------------------------------------------------------------------- settings and files


def test_what_could_not_work_is_refused_with_the_smallest_value_that_does() -> None:
    for message, more in (
        ("set it to 4 or more", {"max_open_groups": 3, "max_staleness": 1}),
        ("max_staleness to 1 or more, or max_open_groups above 4", {}),
        ("as many as a step needs", {"max_open_groups": 4, "max_staleness": 1}),
        ("set dispatch to 'ordered'", {"placement": "colocated", "max_staleness": 1}),
        ("which does not use it; leave it out", {"dispatch": "ordered", "max_open_groups": 9}),
    ):
        wanted: Any = {"groups_per_step": 4, "dispatch": "windowed"} | more
        with pytest.raises(ValueError, match=message):
            RolloutConfig(**wanted)
    config = RolloutConfig(groups_per_step=4, dispatch="windowed", max_open_groups=5)
    assert limits_of(config, rejects=True, last_step=9) == Limits(4, 12, 0, 9, 5)
    assert limits_of(config, rejects=False, last_step=9).max_draws == 4
    assert RolloutConfig(groups_per_step=4, max_staleness=2).most_open_groups == 12


def test_a_checkpoint_keeps_the_groups_beyond_the_first_gap(tmp_path: Path) -> None:
    progress = Progress(2, 5, 1, "layout", "model", "data", used=[7, 9])
    write_progress(tmp_path, progress)
    assert read_progress(tmp_path) == progress
    assert progress.cursor == Cursor(5, (7, 9))
    write_progress(tmp_path, replace(progress, used=[]))
    assert read_progress(tmp_path).cursor == Cursor(5)


def test_only_a_policy_that_takes_gaps_resumes_with_them() -> None:
    for name, policy in POLICIES.items():
        assert refusal(name, Cursor(5)) == ""
        assert bool(refusal(name, Cursor(5, (7,)))) == (not policy.takes_gaps)
    said = refusal("ordered", Cursor(5, (7, 9)))
    assert "has used 2 groups beyond group 5" in said
    assert said.endswith("set rollout.dispatch to 'windowed'")
