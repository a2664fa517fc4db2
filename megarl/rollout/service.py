"""The rollout service: prompts go to engines, finished rollouts are scored, groups fill batches,
ranks take their share.

    prompts --dispatch rule--> engines --Segment--> environment --Verdict--> Group --in order-->
    StepBatch per data rank

One asyncio process owns all of it, so every decision is a plain call. `megarl.cluster.ray_cluster`
makes a Ray actor of it. A failure of any part is kept and raised from whatever the trainer asks
next.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from megarl.errors import EngineLost
from megarl.rollout.batch import StepGroups, shares
from megarl.rollout.config import RolloutConfig
from megarl.rollout.window import Window
from megarl.types import Group, Prompt, Rollout, Segment, StepBatch, Verdict

Evaluated = tuple[dict[str, float], list[dict[str, Any]]]
"""(metrics, transcripts)"""


REPLACEMENT_POLL_S = 0.2
"""Between two looks at whether another engine is in the place of one that died."""


class PromptSource(Protocol):
    """Prompts by ordinal: a pure function of (seed, ordinal), so that a cursor is one number."""

    def __len__(self) -> int: ...

    def at(self, ordinal: int) -> Prompt:
        """The prompt trained as number `ordinal`; each epoch is shuffled anew."""
        ...


class EngineHandle(Protocol):
    """What the service asks of an engine, wherever it runs."""

    async def generate(
        self, prompt_ids: list[int], *, seed: int, max_tokens: int, temperature: float
    ) -> Segment: ...


def request_seed(run_seed: int, *place: int | str) -> int:
    """A request's seed: a function of the run's seed and the request's place alone, so order of
    arrival changes nothing.
    """
    text = "/".join(str(part) for part in (run_seed, *place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


class RolloutService:
    """Collection, scoring, dynamic sampling and the bounded buffer, for all ranks."""

    def __init__(
        self,
        *,
        config: RolloutConfig,
        seed: int,
        prompts: PromptSource,
        engines: Sequence[EngineHandle],
        score: Callable[[Prompt, str, int, bool], Coroutine[Any, Any, Verdict]],
        decode: Callable[[list[int]], str],
        num_data_ranks: int,
        num_mini_batches: int,
        micro_batch_tokens: int,
        last_step: int,
        transcripts_per_step: int,
        first_ordinal: int = 0,
        first_step: int = 0,
    ) -> None:
        self.config, self.seed, self.prompts, self.engines = config, seed, prompts, list(engines)
        self.score, self.decode = score, decode
        self.num_data_ranks, self.num_mini_batches, self.micro_batch_tokens = (
            num_data_ranks,
            num_mini_batches,
            micro_batch_tokens,
        )
        self.transcripts_per_step = transcripts_per_step
        sampling = config.dynamic_sampling
        draws = (
            round(sampling.max_draws * config.groups_per_step)
            if sampling.enabled
            else config.groups_per_step
        )
        self.window = Window(
            per_step=config.groups_per_step,
            max_draws=draws,
            staleness=config.max_staleness,
            last_step=last_step,
            first=first_ordinal,
            next=first_ordinal,
            step=first_step,
            version=first_step,
        )
        # An engine's own queue stays short, so that a request's deadline is about the engine and
        # not about the queue.
        limit = config.engine.max_num_sequences + config.engine.max_num_sequences // 4
        self._slots = [asyncio.Semaphore(limit) for _ in self.engines]
        self._load = [0] * len(self.engines)
        self._waiting = 0
        """Calls of the trainer that wait for rollouts."""
        self._groups: dict[int, Group] = {}
        self._ready: dict[int, StepGroups] = {}
        self._cursors: dict[int, int] = {first_step: first_ordinal}
        self._closed_at = time.monotonic()
        self._released_at: dict[int, float] = {first_step: self._closed_at}
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._evaluations: dict[tuple[str, int], asyncio.Future[Evaluated]] = {}

    # ------------------------------------------------------------------------- asked by the trainer

    def use_engine(self, number: int, engine: EngineHandle) -> None:
        """A fresh engine takes the place of one that died; requests that waited for it go on."""
        self.engines[number] = engine

    async def start(self) -> None:
        """Begin to dispatch; call once version `first_step` is on the engines."""
        self._closed_at = time.monotonic()
        await self._dispatch()

    async def take(self, step: int, data_rank: int) -> StepBatch:
        """Wait for step `step` and return the share of `data_rank`. Raises whatever ended
        collection.
        """
        with self._waits():
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._failure is not None or step in self._ready
                )
        if self._failure is not None:
            raise RuntimeError(f"rollouts stopped: {self._failure}") from self._failure
        ready = self._ready[step]
        return ready.share(data_rank)

    async def release(self, version: int) -> None:
        """Weights `version` are on the engines: its predecessor's batch is done with, newer groups
        may start.
        """
        self.window.version = max(self.window.version, version)
        self._released_at.setdefault(version, time.monotonic())
        for step in [step for step in self._ready if step < version]:
            del self._ready[step]
        for step in [step for step in self._cursors if step < version]:
            del self._cursors[step]
        await self._dispatch()

    async def cursor(self, step: int) -> int:
        """First ordinal not yet trained once `step` steps are done: all that a checkpoint needs to
        know of the prompts.
        """
        return self._cursors[step]

    async def evaluate(self, prompts: Sequence[Prompt], temperature: float, name: str) -> Evaluated:
        """One answer to each of `prompts` -> (metrics, transcripts). Every rank may ask: it is done
        once a version.
        """
        key = (name, self.window.version)
        if key not in self._evaluations:
            self._evaluations = {
                known: task for known, task in self._evaluations.items() if known[1] == key[1]
            }
            self._evaluations[key] = asyncio.ensure_future(
                self._evaluate(prompts, temperature, name)
            )
        with self._waits():
            return await asyncio.shield(self._evaluations[key])

    async def stop(self) -> None:
        """Cancel what is under way."""
        for task in [*self._tasks, *self._evaluations.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._evaluations.values(), return_exceptions=True)

    @contextlib.contextmanager
    def _waits(self) -> Iterator[None]:
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def _evaluate(
        self, prompts: Sequence[Prompt], temperature: float, name: str
    ) -> Evaluated:
        """Seeds depend on the problem alone."""

        async def one(prompt: Prompt) -> tuple[Prompt, Segment, Verdict]:
            segment = await self._generate(
                prompt, request_seed(self.seed, name, prompt.index), temperature
            )
            text = self.decode(segment.token_ids.tolist())
            verdict = await self.score(
                prompt, text, len(segment.token_ids), segment.finish == "length"
            )
            return prompt, segment, verdict

        answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
        count = max(1, len(answers))
        metrics = {
            "accuracy": sum(verdict.correct for _, _, verdict in answers) / count,
            "reward/mean": sum(verdict.reward for _, _, verdict in answers) / count,
            "length/mean": sum(len(segment.token_ids) for _, segment, _ in answers) / count,
            "length/truncated_share": sum(segment.finish == "length" for _, segment, _ in answers)
            / count,
            "problems": float(len(answers)),
        }
        transcripts = [
            {
                "prompt": prompt.text,
                "answer": prompt.answer,
                "response": self.decode(segment.token_ids.tolist()),
                "correct": verdict.correct,
                "reward": verdict.reward,
                "tokens": len(segment.token_ids),
            }
            for prompt, segment, verdict in answers
        ]
        return metrics, transcripts

    # ----------------------------------------------------------------------------------- collection

    async def _dispatch(self) -> None:
        """Start every group the window allows, up to the last step's."""
        while self._failure is None and self.window.may_start():
            task = asyncio.create_task(self._collect(self.window.start()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _collect(self, ordinal: int) -> None:
        """All rollouts of one group; then whatever batch that completes."""
        try:
            prompt, version = self.prompts.at(ordinal), self.window.version
            samples = range(self.config.group_size)
            rollouts = await asyncio.gather(
                *(self._rollout(prompt, ordinal, sample, version) for sample in samples)
            )
            self._groups[ordinal] = group = Group(ordinal, prompt, list(rollouts))
            self.window.finish(ordinal, self._accepts(group))
            while (accepted := self._close()) is not None:
                self._ready[accepted.step] = accepted
            async with self._changed:
                self._changed.notify_all()
            await self._dispatch()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = self._failure or error
            async with self._changed:
                self._changed.notify_all()

    def _accepts(self, group: Group) -> bool:
        """Dynamic sampling: a group whose rewards are all equal has no advantage to learn from."""
        if not self.config.dynamic_sampling.enabled:
            return True
        # Without the length penalty: answers that are all wrong stay a group to reject, however
        # long they are.
        scores = {
            round(rollout.verdict.reward - rollout.verdict.penalty, 9) for rollout in group.rollouts
        }
        return len(scores) > 1

    def _close(self) -> StepGroups | None:
        """The open batch, if it is complete, dealt out to the ranks."""
        step, first = self.window.step, self.window.first
        accepted = self.window.close()
        if accepted is None:
            return None
        now = time.monotonic()
        drawn = [self._groups.pop(ordinal) for ordinal in range(first, self.window.first)]
        chosen = set(accepted)
        # A batch's time begins when its groups might first start, or when the batch before it was
        # complete.
        allowed = min(self._released_at.get(step - self.window.staleness, self._closed_at), now)
        started_at = max(self._closed_at, allowed)
        self._closed_at = now
        self._cursors[step + 1] = self.window.first
        return shares(
            step=step,
            drawn=drawn,
            accepted=[group for group in drawn if group.ordinal in chosen],
            seconds=now - started_at,
            num_data_ranks=self.num_data_ranks,
            num_mini_batches=self.num_mini_batches,
            micro_batch_tokens=self.micro_batch_tokens,
            transcripts=self.transcripts_per_step,
        )

    async def _rollout(self, prompt: Prompt, ordinal: int, sample: int, version: int) -> Rollout:
        """One scored attempt."""
        seed = request_seed(self.seed, ordinal, sample)
        segment = await self._generate(prompt, seed, self.config.temperature)
        text = self.decode(segment.token_ids.tolist())
        verdict = await self.score(prompt, text, len(segment.token_ids), segment.finish == "length")
        return Rollout(
            sample=sample,
            seed=seed,
            segments=[replace(segment, text=text)],
            verdict=verdict,
            dispatched_at=version,
        )

    async def _generate(self, prompt: Prompt, seed: int, temperature: float) -> Segment:
        """Ask the least loaded engine, within the deadline."""
        number = min(range(len(self.engines)), key=self._load.__getitem__)
        self._load[number] += 1
        deadline = self.config.request_timeout_s
        try:
            async with self._slots[number]:
                while True:
                    engine = self.engines[number]
                    answer = engine.generate(
                        prompt.token_ids,
                        seed=seed,
                        max_tokens=self.config.max_new_tokens,
                        temperature=temperature,
                    )
                    try:
                        return await asyncio.wait_for(answer, deadline)
                    except EngineLost as lost:
                        await self._replacement(number, engine, lost)
        except TimeoutError:
            raise RuntimeError(
                f"engine {number} did not answer prompt {prompt.index} within {deadline:g} s; "
                "raise rollout.request_timeout_s or look at the engine's log"
            ) from None
        finally:
            self._load[number] -= 1

    async def _replacement(self, number: int, dead: EngineHandle, lost: EngineLost) -> None:
        """Wait until another engine is in the place of `dead`; its requests are asked again, with
        their seeds.
        """
        # The trainer replaces engines while it publishes; once it waits for rollouts, nobody will.
        while self.engines[number] is dead:
            if self._waiting:
                raise RuntimeError(f"engine {number} was lost: {lost}") from lost
            await asyncio.sleep(REPLACEMENT_POLL_S)
