"""Rollouts of several turns, with random sessions and engines: nothing lost, nothing doubled, the
budget kept, the masks and rewards where they belong. The real engine and the real worker processes
are in tests/system/test_turn_runs.py and tests/unit/test_sessions.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rollouts import dealt

from megarl.environments.scoring import observed
from megarl.errors import ProcessLost
from megarl.rollout.attempts import Attempts, request_seed
from megarl.rollout.requests import EnginePool
from megarl.settings.rollout import RolloutConfig
from megarl.types import Group, Prompt, Rollout, Segment, TokenArrays, Verdict

PROMPT = Prompt(0, "", [1, 2, 3], "8")
RUN_SEED = 5


@dataclass
class RandomEngine:
    """Generates random tokens, of weights that may change between and within turns."""

    number: int
    draw: random.Random
    version: int = 0
    is_dead: bool = False
    asked: list[tuple[list[int], int, Segment]] = field(default_factory=list)

    async def generate(
        self,
        prompt_ids: np.ndarray,
        segments: Sequence[Segment],
        *,
        seed: int,
        max_tokens: int,
        **rest: object,
    ) -> Segment:
        await asyncio.sleep(0)
        assert max_tokens > 0
        self.is_dead = self.is_dead or self.draw.random() < 0.03
        if self.is_dead:
            raise ProcessLost("killed by the test")
        wanted = self.draw.randint(1, 6)
        count = min(wanted, max_tokens)
        tokens = np.array([self.draw.randint(10, 99) for _ in range(count)], np.int32)
        logprobs = np.array([-self.draw.random() for _ in range(count)], np.float32)
        first = self.draw.randint(0, count)
        spans = [(self.version, first), (self.version + 1, count - first)]
        self.version += 1
        made = Segment(
            "model",
            count,
            TokenArrays(tokens, logprobs),
            versions=[span for span in spans if span[1]],
            finish="stop" if wanted <= max_tokens else "length",
        )
        before = [*prompt_ids.tolist()]
        for part in segments:
            before += part.arrays.token_ids.tolist()
        self.asked.append((before, seed, made))
        return made


@dataclass
class RandomEnvironment:
    """Replies with random observations and rewards, fails, or ends the rollout."""

    draw: random.Random
    has_start: bool = True
    gave: dict[str, list[Segment]] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def _observation(self, key: str, reward: float) -> Segment:
        tokens = [self.draw.randint(100, 199) for _ in range(self.draw.randint(1, 5))]
        self.gave.setdefault(key, []).append(observed(tokens, reward))
        return self.gave[key][-1]

    async def begin(self, key: str, prompt: Prompt) -> Segment | Verdict | None:
        assert key not in self.open
        kind = self.draw.random()
        if kind < 0.1:
            self.verdicts[key] = Verdict(-1.0, correct=False, failure="error")
            return self.verdicts[key]
        self.open.add(key)
        return self._observation(key, 0.0) if kind < 0.5 else None

    async def step(
        self, key: str, prompt: Prompt, segment: Segment, *, num_tokens: int
    ) -> Segment | Verdict:
        await asyncio.sleep(0)
        assert key in self.open
        if segment.finish == "length":
            self.open.discard(key)
            self.verdicts[key] = Verdict(0.0, correct=False, judged=False, finish="tool_call")
            return self.verdicts[key]
        kind = self.draw.random()
        if kind < 0.6:
            return self._observation(key, self.draw.choice([0.0, 0.5, -0.25]))
        self.open.discard(key)
        failure = "timeout" if kind < 0.7 else ""
        self.verdicts[key] = Verdict(0.0 if failure else 1.0, correct=not failure, failure=failure)
        return self.verdicts[key]

    async def cut_off(self, key: str, num_tokens: int, fault: str = "") -> Verdict:
        self.open.discard(key)
        self.verdicts[key] = Verdict(0.0, correct=False, judged=bool(fault), detail=fault)
        return self.verdicts[key]

    async def texts(self, segments: Sequence[Segment]) -> list[str]:
        return ["" for _ in segments]


def play(
    seed: int, count: int, max_new_tokens: int, max_turns: int, num_engines: int
) -> tuple[list[tuple[list[Segment], Verdict]], RandomEnvironment, list[RandomEngine]]:
    draw = random.Random(seed)
    environment = RandomEnvironment(draw)
    engines = [RandomEngine(number, draw) for number in range(num_engines)]
    pool = EnginePool(engines, RolloutConfig())
    attempts = Attempts(pool, environment, RUN_SEED, max_new_tokens, max_turns)

    async def replace_the_dead() -> None:
        while True:
            for number, served in enumerate(pool.engines):
                engine = served.remote
                if isinstance(engine, RandomEngine) and engine.is_dead:
                    # What it was asked stays on record: those answers were taken.
                    pool.replace(number, RandomEngine(number, draw, asked=engine.asked))
            await asyncio.sleep(0.001)

    async def go() -> list[tuple[list[Segment], Verdict]]:
        replacing = asyncio.create_task(replace_the_dead())
        found = (attempts.attempt(PROMPT, n, 0, temperature=1.0) for n in range(count))
        try:
            return list(await asyncio.gather(*found))
        finally:
            replacing.cancel()

    return asyncio.run(go()), environment, engines


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(6, 40), st.integers(0, 4), st.integers(1, 3))
def test_random_sessions(seed: int, max_new_tokens: int, max_turns: int, num_engines: int) -> None:
    count = 12
    found, environment, engines = play(seed, count, max_new_tokens, max_turns, num_engines)
    assert not environment.open, "every session has ended"
    record = {
        tuple(before): (engine.number, request, made)
        for engine in engines
        for before, request, made in engine.asked
    }
    requests = [made for engine in engines for _, _, made in engine.asked]
    used: list[Segment] = []
    for n, (segments, verdict) in enumerate(found):
        key = f"{n}/0"
        if not segments:  # the session did not start
            assert verdict == environment.verdicts[key]
            continue
        assert segments[-1].kind == "model"
        assert sum(part.num_tokens for part in segments) <= max_new_tokens
        models = [part for part in segments if part.kind == "model"]
        assert max_turns == 0 or len(models) <= max_turns
        before, seen, on = list(PROMPT.token_ids), [], list[int]()
        turn = 0
        for part in segments:
            if part.kind == "model":
                place = [RUN_SEED, n, 0, *([turn] if turn else [])]
                asked = [
                    (engine.number, made)
                    for engine in engines
                    for start, request, made in engine.asked
                    if start == before and request == request_seed(*place)
                ]
                ((engine, made),) = asked
                assert replace(part, finish=made.finish) == made, "as the engine made it"
                used.append(made)
                on.append(engine)
                turn += 1
            else:
                seen.append(part)
            before += part.arrays.token_ids.tolist()
        for former, later in pairwise(on):
            assert later == former or engines[former].is_dead, "the engine that has the cache"
        gave = environment.gave.get(key, [])
        assert seen == gave[: len(seen)] and len(gave) - len(seen) <= 1
        lost = gave[len(seen) :]
        assert verdict.reward == environment.verdicts[key].reward + sum(p.reward for p in lost)
        if lost and verdict.failure == "":
            assert segments[-1].finish in ("length", "turns")
    assert len(used) == len(requests) == len({id(made) for made in used}), "none lost or doubled"
    assert len(record) <= len(requests)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_rows_of_random_sessions(seed: int) -> None:
    found = [one for one in play(seed, 9, 30, 0, 1)[0] if one[0]]
    groups = [
        Group(n, PROMPT, [Rollout(0, 0, segments, verdict, 0)])
        for n, (segments, verdict) in enumerate(found)
    ]
    made = dealt(groups, num_data_ranks=2, num_mini_batches=2, micro_batch_tokens=128)
    rows = {
        int(samples.ids[n]): (samples, slice(samples.offsets[n], samples.offsets[n + 1]))
        for rank in range(2)
        for samples in made.share(rank).samples
        for n in range(len(samples))
    }
    assert sorted(rows) == list(range(len(groups)))
    totals = made.share(0).rewards
    for n, (segments, verdict) in enumerate(found):
        samples, part = rows[n]
        tokens, mask, logprobs = list(PROMPT.token_ids), [False] * 3, [0.0] * 3
        rewards = [0.0] * 3
        for number, one in enumerate(segments):
            tokens += one.arrays.token_ids.tolist()
            mask += [one.kind == "model"] * one.num_tokens
            logprobs += one.arrays.logprobs.tolist()
            here = [0.0] * one.num_tokens
            if one.kind == "model":
                last = number + 1 == len(segments)
                here[-1] = verdict.reward if last else segments[number + 1].reward
            rewards += here
        assert samples.token_ids[part].tolist() == tokens
        assert samples.mask[part].tolist() == mask
        assert samples.engine_logprobs[part].tolist() == np.float32(logprobs).tolist()
        assert samples.rewards[part].tolist() == np.float32(rewards).tolist()
        assert totals[n] == sum(rewards)


async def test_a_cancelled_rollout_ends_its_session() -> None:
    class Stuck(RandomEngine):
        async def generate(self, *_: object, **__: object) -> Segment:  # type: ignore[override]
            await asyncio.sleep(60)
            raise AssertionError

    environment = RandomEnvironment(random.Random(3))
    pool = EnginePool([Stuck(0, random.Random(0))], RolloutConfig())
    attempts = Attempts(pool, environment, 0, 20)
    tasks = [asyncio.create_task(attempts.attempt(PROMPT, n, temperature=1.0)) for n in range(5)]
    await asyncio.sleep(0.05)
    assert environment.open
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.05)
    assert not environment.open


def test_a_first_observation_beyond_the_budget_is_a_failure() -> None:
    class Long(RandomEnvironment):
        async def begin(self, key: str, prompt: Prompt) -> Segment:
            self.open.add(key)
            return observed([7] * 10, 0.0)

    environment = Long(random.Random(1))
    pool = EnginePool([RandomEngine(0, random.Random(2))], RolloutConfig())
    attempts = Attempts(pool, environment, RUN_SEED, max_new_tokens=10)
    prompt = Prompt(0, "", [3, 4], "")
    segments, verdict = asyncio.run(attempts.attempt(prompt, 0, 0, temperature=1.0))
    assert segments == [] and verdict.left_out and not environment.open
    assert "has 10 tokens, but rollout.max_new_tokens is 10" in verdict.detail
