"""The rollout service: which groups are generated, by which engine, and which step trains them.

    prompts --dispatch rule--> engines --Segment--> environment --Verdict--> Group --in order-->
    SharePlan per data rank

One asyncio process owns all of it. A failure is kept and raised from whatever the trainer asks
next.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.data.source import PromptList
from megarl.engines.remote import RemoteEngine
from megarl.environments.scoring import Environment
from megarl.environments.user_code import function_of
from megarl.ledger.events import Carried, Dispatched, Published, Started
from megarl.ledger.recorder import EQUAL_REWARDS, NO_VERDICTS, Recorder
from megarl.rollout.attempts import Attempts
from megarl.rollout.batch import SharePlan, StepGroups
from megarl.rollout.dispatch.policy_table import POLICIES, limits_of
from megarl.rollout.evaluation import Evaluated, answers, evaluate_problems, failure_warning
from megarl.rollout.requests import EnginePool
from megarl.rollout.transcripts import group_records
from megarl.rollout.waits import Waits
from megarl.settings.config import RunConfig
from megarl.types import START, Cursor, Group, Prompt, Rollout


def differing(group: Group) -> bool:
    """Whether a group's rewards, without length penalty, differ."""
    # Without the length penalty: answers that are all wrong stay a group to reject, however long
    # they are.
    rewards = {round(rollout.reward - rollout.verdict.penalty, 9) for rollout in group.rollouts}
    return len(rewards) > 1


def every(group: Group) -> bool:
    return True


FILTERS: dict[str, Callable[[Group], bool]] = {"differing": differing, "all": every}
"""{name in `rollout.filter`: function of a finished group without tokens: whether to train on
it}
"""


@dataclass
class FinishedGroups:
    """Keeps the finished groups until they are trained, also the rejected ones."""

    open: dict[int, Group] = field(default_factory=dict)
    """{ordinal: group} of the open batch or later ones."""
    closed: dict[int, list[Group]] = field(default_factory=dict)
    """{step: groups of its complete batch, accepted and rejected}"""
    _kept: dict[int, list[Group]] = field(default_factory=dict)
    """{steps done: what `after` has returned}"""

    def close(self, step: int, drawn: Sequence[int]) -> list[Group]:
        """Note that the batch of `step` is complete; returns its groups."""
        self.closed[step] = [self.open.pop(ordinal) for ordinal in drawn]
        return self.closed[step]

    def release(self, version: int) -> None:
        """Forget the groups of the steps before `version`."""
        for step in [step for step in self.closed if step < version]:
            del self.closed[step]
        for done in [done for done in self._kept if done < version]:
            del self._kept[done]

    def after(self, done: int) -> list[Group]:
        """The finished groups that the first `done` steps have not used, ascending, the same at
        each call: all ranks write one checkpoint. Rejected ones are among them: a later step
        could not replace them, as the replacement might be too old.
        """
        if done not in self._kept:
            unused = [*self.open.values()]
            for step, groups in self.closed.items():
                unused += groups if step >= done else ()
            self._kept[done] = sorted(unused, key=lambda group: group.ordinal)
        return self._kept[done]


def by_version(groups: Collection[Group]) -> list[tuple[int, Group]]:
    """(weight version at its start, group), ascending: the order in which steps use groups."""
    pairs = [(group.members[0].dispatched_at, group) for group in groups]
    return sorted(pairs, key=lambda pair: (pair[0], pair[1].ordinal))


GREEDY = -1
"""Number of a group's greedy response."""


class RolloutService:
    """Turns prompts into scored groups: engines generate the responses, the environment scores
    them. Keeps the batch of a step until every trainer rank has taken its share. Steps count from
    0; step k trains weights of version k.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        prompts: PromptList,
        engines: Sequence[RemoteEngine],
        environment: Environment,
        num_data_ranks: int,
        deal: Callable[..., StepGroups],
        held_out: Sequence[Prompt] = (),
        cursor: Cursor = START,
        first_step: int = 0,
        carried: Sequence[Group] = (),
        max_together: int = 0,
        ledger: Recorder | None = None,
        keep: Callable[[Group], Awaitable[Group]] | None = None,
    ) -> None:
        """`deal`: `megarl.rollout.batch.shares` with the run's settings. `held_out`: problems of
        evaluations. `first_step`: earlier ones have used the groups of `cursor`. `carried`:
        finished groups of the checkpoint, ascending. `max_together`: as in `Attempts`. `keep`:
        moves a finished group's token arrays to where ranks read them.
        """
        rollout, ordinals = config.rollout, [group.ordinal for group in carried]
        is_new = all(ordinal >= cursor.first for ordinal in ordinals)
        assert is_new and not set(ordinals) & set(cursor.beyond), (
            "the checkpoint has a group that its steps have used"
        )
        self._greedy_baseline, self._deal = config.greedy_baseline, deal
        self.config, self.prompts, self.environment = rollout, prompts, environment
        self.num_data_ranks, self._held_out = num_data_ranks, held_out
        kept = config.group_filter if rollout.dynamic_sampling.enabled else "all"
        self._filter = function_of(kept, FILTERS, "rollout.filter")
        self._reason = EQUAL_REWARDS if kept == "differing" else "rollout.filter"
        self.limits = limits_of(rollout, rejects=kept != "all", last_step=config.steps - 1)
        self.window = POLICIES[rollout.dispatch].restore(self.limits, cursor, first_step)
        self.engines = EnginePool(engines, rollout)
        self._attempts = Attempts(
            *(self.engines, environment, config.seed, rollout.max_new_tokens),
            *(config.environment.max_turns, max_together, config.environment.max_failure_share),
            penalises_cut_off=config.algorithm.truncated == "penalise",
        )
        self._waits = Waits()
        self.ledger, self._keep = ledger or Recorder(), keep
        self._finished = FinishedGroups()
        self._carried = list(carried)
        self._adopted = set[int]()
        """Ordinals of the groups that came with the checkpoint."""
        self._published = -1
        """Newest version that the ledger has as published."""
        self._ready: dict[int, StepGroups] = {}
        self._transcripts: dict[int, asyncio.Task[list[dict[str, Any]]]] = {}
        self._cursors: dict[int, Cursor] = {first_step: cursor}
        self._closed_at = time.monotonic()
        """When generation started, or the newest batch was complete."""
        self._released_at = {first_step: self._closed_at}
        """When weight versions were on the engines, as far as later batches need it."""
        self._taken = first_step - 1
        """Newest step that a rank has taken."""
        self._is_early_stop = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """{ordinal: task} of the groups in flight."""
        self._evaluations: dict[tuple[str, int], asyncio.Task[Evaluated]] = {}
        self._given: set[tuple[str, int]] = set()
        """(name, version) of evaluations of which a rank has the result: the others get it too."""

    # ------------------------------------------------------------------------- asked by the trainer

    async def start(self, receipts: Sequence[str] = ()) -> None:
        """Start to generate, once the engines have the first weights. The first steps also use the
        finished groups of the checkpoint that are not too old. `receipts`: digests of the weights,
        for the ledger.
        """
        self._closed_at = time.monotonic()  # from which the first batch is timed
        self.engines.version = self.window.version
        cursor = self.window.cursor()
        started = Started(
            step=self.window.step,
            cursor=cursor.first,
            max_staleness=self.limits.staleness,
            groups_per_step=self.limits.per_step,
            max_draws=self.limits.max_draws,
            dispatch=self.config.dispatch,
            used=list(cursor.beyond),
            max_open=self.limits.max_open,
        )
        self.ledger.start(started)
        self._publish(self.window.version, receipts)
        for version, group in by_version(self._carried):
            if self.window.adopt(group.ordinal, version, self._accepts(group)):  # not too old
                seed = self._attempts.seed(group.ordinal, 0)
                self.ledger.put(Carried(group.ordinal, group.prompt.index, version, seed))
                self._adopted.add(group.ordinal)
                await self._add(group)
        self._carried = []
        await self._dispatch()

    async def interrupt(self, is_early_stop: bool = False) -> None:
        """End the run: give out no further batch or evaluation. A step that one rank has taken is
        still given to the others. `is_early_stop`: asked for by `stop_early`, not by a signal; the
        first call decides.
        """
        if not self._waits.is_interrupted:
            self._is_early_stop = is_early_stop
        self._waits.is_interrupted = True
        await self._waits.notify()

    def is_early_stop(self) -> bool:
        return self._is_early_stop

    async def take(self, step: int, data_rank: int) -> SharePlan | None:
        """Wait for a rank's samples of `step`; None if the run was interrupted before any rank took
        it. Raises `RuntimeError` if generation failed before, `UserError` if the verifier failed
        too often.
        """
        await self._waits.until(lambda: step in self._ready)
        if step > self._taken:
            if self._waits.is_interrupted:
                return None
            self._waits.raise_failure()
            self._taken = step
        plan = self._ready[step].plans[data_rank]
        if data_rank == 0:
            transcripts = await asyncio.shield(self._transcripts[step])
            plan = replace(plan, batch=replace(plan.batch, transcripts=transcripts))
        return plan

    async def release(self, version: int, receipts: Sequence[str] = ()) -> None:
        """Note that weights of `version` are on the engines, forget what only the steps before it
        needed, and start the groups that this allows. `receipts`: digests of these weights, for the
        ledger; empty if unknown.
        """
        self.ledger.release(version)
        self._publish(version, receipts)
        self.window.release(version)
        self._finished.release(version)
        self.engines.version = self.window.version
        self._released_at.setdefault(version, time.monotonic())
        oldest = min(self.window.step, version) - self.limits.staleness  # for later batches
        for past in [past for past in self._released_at if past < oldest]:
            del self._released_at[past]
        for step in [step for step in self._ready if step < version]:  # all ranks have it
            del self._ready[step]
            self._transcripts.pop(step).cancel()
        for step in [step for step in self._cursors if step < version]:
            del self._cursors[step]
        for key in [key for key in self._evaluations if key[1] < version]:
            self._evaluations.pop(key).cancel()
            self._given.discard(key)
        await self._dispatch()

    def _publish(self, version: int, receipts: Sequence[str]) -> None:
        """Write the receipts of weights that are on the engines to the ledger, once."""
        if receipts and version > self._published:
            self._published = version
            self.ledger.put(Published(version, list(receipts)))

    async def cursor(self, step: int) -> Cursor:
        """Which prompts the first `step` steps have used, as positions in the training order: all
        below `first`, and those in `beyond`; all that a checkpoint needs to know of its position in
        the data. Waits until the ledger, the record of what became of each group, has these steps
        on the disk.
        """
        await self.ledger.durable()
        return self._cursors[step]

    async def unused(self, step: int, data_rank: int) -> list[Group]:
        """The finished groups that the first `step` steps have not used and that `data_rank` is to
        write into a checkpoint: those whose ordinal (position in the training order) modulo the
        number of data ranks is `data_rank`.
        """
        groups = self._finished.after(step)
        await self.ledger.durable()
        return [group for group in groups if group.ordinal % self.num_data_ranks == data_rank]

    async def evaluate(self, temperature: float, name: str) -> Evaluated | None:
        """One scored response to each held-out problem, for all ranks by `name` and version; None
        if the run was interrupted. Raises as `take`.
        """
        key = (name, self.window.version)
        if key not in self._evaluations:
            asked = self._attempts, self._held_out, temperature, name
            work = self._waits.noticed(lambda: evaluate_problems(*asked))
            self._evaluations[key] = asyncio.create_task(work)
        task = self._evaluations[key]
        await self._waits.until(task.done)
        if self._waits.is_interrupted and key not in self._given:
            return None
        if not task.done():
            self._waits.raise_failure()
        self._given.add(key)
        return task.result()

    async def answers(
        self,
        prompts: Sequence[Prompt],
        temperature: float,
        name: str,
        inspects: bool = False,
    ) -> list[dict[str, Any]]:
        """As `megarl.rollout.evaluation.answers`."""
        asked = prompts, temperature, name
        return await self._waits.result(
            lambda: answers(self._attempts, *asked, num_texts=len(prompts), inspects=inspects)
        )

    async def stop(self) -> None:
        """Cancel all tasks, and end the ledger."""
        tasks = [*self._tasks.values(), *self._evaluations.values(), *self._transcripts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.ledger.end(self._waits.failure)

    # ----------------------------------------------------------------------------------- collection

    def _has_verdicts(self, group: Group) -> bool:
        """Whether enough rollouts have a verdict to be compared."""
        has_baseline = group.greedy is not None or not self._greedy_baseline
        return has_baseline and len(group.rollouts) >= min(2, self.config.group_size)

    def _accepts(self, group: Group) -> bool:
        return self._has_verdicts(group) and self._filter(group)

    async def _dispatch(self) -> None:
        """Start every group that the dispatch policy allows."""
        while self._waits.failure is None and self.window.may_start():
            ordinal, version = self.window.start(), self.window.version
            prompt, seed = self.prompts.at(ordinal), self._attempts.seed(ordinal, 0)
            self.ledger.put(Dispatched(ordinal, prompt.index, version, seed))
            task = asyncio.create_task(self._collect(ordinal, prompt, version))
            self._tasks[ordinal] = task
            task.add_done_callback(lambda _, ordinal=ordinal: self._tasks.pop(ordinal))
            await asyncio.sleep(0)  # hundreds of groups at once would block the event loop

    async def _collect(self, ordinal: int, prompt: Prompt, version: int) -> None:
        """Generate a group, and once more what has no verdict; then complete the batches that have
        it.
        """
        try:
            group = await self._generate(Group(ordinal, prompt, []), 0, version)
            if group.rollouts:  # else the row or the verifier is to blame
                group = await self._generate(group, self.config.group_size, version)
            if self._keep is not None:
                group = await self._keep(group)
            self.window.finish(ordinal, self._accepts(group))
            await self._add(group)
            await self._dispatch()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            await self._waits.fail(error)

    async def _generate(self, group: Group, first: int, version: int) -> Group:
        """Generate the rollouts that `group` lacks, with numbers from `first` on, which decide
        their seeds.
        """
        samples = [*range(first, first + self.config.group_size - len(group.rollouts))]
        if self._greedy_baseline and group.greedy is None:
            samples.append(GREEDY)
        running = [self._rollout(group.prompt, group.ordinal, n, version) for n in samples]
        rollouts, greedy, left_out = [*group.rollouts], group.greedy, [*group.left_out]
        for rollout in await asyncio.gather(*running):
            if rollout.verdict.left_out:
                left_out.append(rollout)
            elif rollout.sample == GREEDY:
                greedy = rollout
            else:
                rollouts.append(rollout)
        return Group(group.ordinal, group.prompt, rollouts, greedy, left_out)

    async def _add(self, group: Group) -> None:
        self._finished.open[group.ordinal] = group
        self.ledger.finish(group)
        while (closing := self._close()) is not None:
            # In a thread: thousands of samples are dealt out in a tenth of a second.
            closed = await asyncio.to_thread(closing)
            self._ready[closed.step] = closed
            written = group_records(closed.step, closed.shown, self.environment.texts)
            self._transcripts[closed.step] = asyncio.create_task(written)
            await self._waits.notify()

    def _close(self) -> Callable[[], StepGroups] | None:
        """If the open batch is complete, a function that divides it over the ranks."""
        step, batch = self.window.step, self.window.close()
        if batch is None:
            return None
        drawn = self._finished.close(step, batch.drawn)
        chosen = set(batch.accepted)
        without = {group.ordinal for group in drawn if not self._has_verdicts(group)}
        reasons = {n: NO_VERDICTS if n in without else self._reason for n in batch.drawn}
        self.ledger.close(step, reasons, chosen, batch.swept)
        for ordinal in batch.swept:
            self._tasks[ordinal].cancel()
        verdicts = [rollout.verdict for group in drawn for rollout in group.members]
        limit = self._attempts.max_failure_share
        warning = failure_warning(verdicts, limit, f"step {step + 1}")
        self._cursors[step + 1] = self.window.cursor()
        return functools.partial(
            self._deal,
            step=step,
            drawn=drawn,
            accepted=[group for group in drawn if group.ordinal in chosen],
            seconds=self._seconds(step),
            warning="; ".join(filter(None, [warning, *(verdict.warning for verdict in verdicts)])),
            stale=len(batch.swept) if self.config.dispatch != "ordered" else None,
            carried=self._adopted,
        )

    def _seconds(self, step: int) -> float:
        """Since the step's groups might start, or the batch before it was complete, whichever is
        later.
        """
        before, self._closed_at = self._closed_at, time.monotonic()
        allowed = self._released_at.get(step - self.limits.staleness, before)
        return self._closed_at - max(before, min(allowed, self._closed_at))

    async def _rollout(self, prompt: Prompt, ordinal: int, sample: int, version: int) -> Rollout:
        temperature = 0.0 if sample == GREEDY else self.config.temperature
        segments, verdict = await self._attempts.attempt(
            prompt, ordinal, sample, temperature=temperature
        )
        return Rollout(
            sample=sample,
            seed=self._attempts.seed(ordinal, sample),
            segments=segments,
            verdict=verdict,
            dispatched_at=version,
        )
