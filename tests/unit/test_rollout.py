"""The dispatch rule's bound, conservation of prompts, and the service with engines that misbehave."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.rollouts import OneStep, Prompts, dealt, rollout_service, segment
from support.tiny import groups, write_tokenizer

from megarl.data.tokenizer import load_tokenizer
from megarl.environments.codec import Codec
from megarl.environments.scoring import Environment, observed
from megarl.errors import ProcessLost, UserError
from megarl.observe.observer import Observer
from megarl.rollout.attempts import Attempts, request_seed
from megarl.rollout.batch import assemble, describe
from megarl.rollout.evaluation import NUM_TRANSCRIPTS, failure_warning, pass_at_k, repeated_metrics
from megarl.rollout.requests import EnginePool
from megarl.rollout.service import RolloutService
from megarl.run import loop, schedule
from megarl.run.schedule import reached
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.observe import (
    EVALUATION_METRICS,
    STEP_METRICS,
    EarlyStopConfig,
    ObserveConfig,
)
from megarl.settings.rl import EvaluationConfig
from megarl.settings.rollout import DynamicSamplingConfig, RolloutConfig
from megarl.settings.training import CheckpointConfig, TrainingConfig
from megarl.types import (
    START,
    Group,
    Prompt,
    Rollout,
    Samples,
    Segment,
    StepBatch,
    StepReport,
    Verdict,
)


class Engine:
    """An engine that answers after a random moment with tokens that its seed decides."""

    version = 0

    def __init__(self, fail_at: int = -1, hang_at: int = -1) -> None:
        self.calls, self.fail_at, self.hang_at = 0, fail_at, hang_at

    async def generate(
        self, prompt_ids: np.ndarray, *args: Any, seed: int, max_tokens: int, **rest: Any
    ) -> Segment:
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("engine exploded")
        if self.calls == self.hang_at:
            await asyncio.sleep(60)
        draw = random.Random(seed)
        await asyncio.sleep(random.random() * 0.01)
        tokens = [draw.randrange(1, 9) for _ in range(draw.randint(1, max_tokens))]
        return segment(tokens, self.version, logprob=-1.0)

    async def paused_s(self, last_s: float) -> float:
        return 0.0


class Service(RolloutService):
    """The service, with engines that have each version before it is released."""

    async def start(self, receipts: Any = ()) -> None:
        for engine in self.engines.engines:
            engine.remote.version = self.window.version
        await super().start(receipts)

    async def release(self, version: int, receipts: Any = ()) -> None:
        for engine in self.engines.engines:
            engine.remote.version = version
        await super().release(version, receipts)


PROMPTS = Prompts(lambda n: Prompt(n, f"p{n}", [1 + n % 7, 2], str(n)))


class Parity(OneStep):
    """An odd number of tokens is right; every third prompt is hopeless, so that all its rewards are
    equal.
    """

    async def step(self, key: str, prompt: Prompt, segment: Segment, *, num_tokens: int) -> Verdict:
        reward = 0.0 if prompt.index % 3 == 0 else float(num_tokens % 2)
        return Verdict(reward=reward, correct=num_tokens % 2 == 1)


def service(
    engines: list[Engine],
    *,
    staleness: int = 1,
    timeout_s: float = 5.0,
    **more: Any,
) -> RolloutService:
    config = RolloutConfig(
        groups_per_step=3,
        group_size=6,
        max_new_tokens=5,
        max_staleness=staleness,
        dynamic_sampling=DynamicSamplingConfig(max_draws=4.0),
        request_timeout_s=timeout_s,
    )
    settings = {"environment": Parity(), "transcripts": 1} | more
    return rollout_service(engines, config, PROMPTS, kind=Service, **settings)


async def drive(made: RolloutService, steps: range) -> list[list[StepBatch]]:
    await made.start()
    ranks = made.num_data_ranks
    taken = []
    for step in steps:
        taken.append([assemble(await made.take(step, rank), list) for rank in range(ranks)])
        await made.release(step + 1)
    await made.stop()
    return taken


def rows(batches: list[list[StepBatch]]) -> list[list[tuple[int, ...]]]:
    """Per step, the token rows of all ranks in the order of the step."""
    return [
        [
            row
            for _, row in sorted(
                (sample_id, tuple(part.select([position]).token_ids.tolist()))
                for share in step
                for part in share.samples
                for position, sample_id in enumerate(part.ids.tolist())
            )
        ]
        for step in batches
    ]


async def test_seeds_alone_decide_what_is_trained() -> None:
    """Other engines, other ranks, other timing, other staleness: the same rows in the same steps."""
    one = rows(await drive(service([Engine()], staleness=0), range(4)))
    several = service([Engine(), Engine(), Engine()], num_data_ranks=2, staleness=1)
    two = rows(await drive(several, range(4)))
    assert one == two
    assert len({row for step in one for row in step}) > 40


async def test_resumed_service_goes_on_where_the_cursor_says() -> None:
    made = service([Engine()])
    await made.start()
    batches, cursor = [], START
    for step in range(4):
        batches.append([assemble(await made.take(step, 0), list)])
        await made.release(step + 1)
        if step == 1:
            cursor = await made.cursor(2)
    await made.stop()
    again = await drive(service([Engine()], cursor=cursor, first_step=2), range(2, 4))
    assert rows(again) == rows(batches)[2:]


async def test_rejected_groups_are_counted_and_not_trained() -> None:
    for (batch,) in await drive(service([Engine()]), range(4)):
        assert batch.metrics["groups/drawn"] - batch.metrics["groups/rejected"] == 3
        assert batch.metrics["groups/rejected"] >= 1
        assert set(batch.metrics) <= set(STEP_METRICS)
        assert batch.metrics["staleness/max"] >= 0
        assert len(batch.rewards) == 3 * 6


@pytest.mark.parametrize("engine", [Engine(fail_at=20), Engine(hang_at=20)], ids=["fails", "hangs"])
async def test_an_engine_that_fails_or_hangs_ends_the_wait_with_its_reason(engine: Engine) -> None:
    with pytest.raises(
        RuntimeError, match=r"engine exploded|engine 0 did not answer prompt \d+ within 0.5 s"
    ):
        await asyncio.wait_for(drive(service([engine], timeout_s=0.5), range(6)), 20)


class Greedy(Engine):
    """An engine whose greedy answer to a prompt has as many tokens as the prompt's first token
    says.
    """

    async def generate(self, prompt_ids: np.ndarray, *args: Any, **settings: Any) -> Segment:
        if settings["temperature"] == 0:
            return segment([9] * (int(prompt_ids[0]) % 5 + 1), self.version, logprob=-1.0)
        return await super().generate(prompt_ids, *args, **settings)


@pytest.mark.parametrize("mode", ["reward", "tokens"])
async def test_a_greedy_response_is_compared_with_and_not_trained(mode: str) -> None:
    """Each group has one; its tokens are sent only where reward models are to score it."""
    sent = dict(sends_untrained=True) if mode == "tokens" else {}
    known = dict(group_filter="all", greedy_baseline=True, dealing=sent)
    made = service([Greedy()], num_data_ranks=2, **known)
    for step, (batch, other) in enumerate(await drive(made, range(3))):
        assert len(batch.rewards) == 3 * 7
        greedy = batch.response_tokens == 0
        assert batch.groups[greedy].tolist() == [0, 1, 2]
        ordinals = range(3 * step, 3 * step + 3)
        lengths = [(1 + ordinal % 7) % 5 + 1 for ordinal in ordinals]
        expected = [
            0.0 if ordinal % 3 == 0 else float(length % 2)
            for ordinal, length in zip(ordinals, lengths, strict=True)
        ]
        assert batch.rewards[greedy].tolist() == expected
        assert batch.metrics["reward/greedy_mean"] == pytest.approx(np.mean(expected))
        sampled = batch.response_tokens.sum()
        assert batch.metrics["length/mean"] == pytest.approx(sampled / 18)
        assert batch.metrics["tokens/generated"] == sampled + sum(lengths)
        everything = Samples.concatenate([*batch.samples, *other.samples])
        dealt = np.flatnonzero(~greedy if mode == "reward" else greedy | ~greedy)
        assert sorted(everything.ids.tolist()) == dealt.tolist()
        for position, number in enumerate(everything.ids.tolist()):
            one = everything.select([position])
            assert one.mask.sum() == batch.response_tokens[number]
            assert bool(greedy[number]) == (not one.rewards.any() and not one.mask.any())
            if greedy[number]:
                assert (one.token_ids[2:] == 9).all() and not one.engine_logprobs[:2].any()


def test_shares_cover_every_sample_once_with_equal_rows() -> None:
    made = groups(6, 4)
    plan = dealt(made, num_data_ranks=3, num_mini_batches=2, transcripts=1)
    mine = [plan.share(rank) for rank in range(3)]
    everything = Samples.concatenate([part for share in mine for part in share.samples])
    assert sorted(everything.ids) == list(range(24))
    for part in range(2):
        assert len({len(share.micro_batches[part]) for share in mine}) == 1
        for share in mine:
            assert sorted(i for row in share.micro_batches[part] for i in row) == list(
                range(len(share.samples[part]))
            )
            assert (share.mini_batch_of[share.samples[part].ids] == part).all()
    group = made[0]
    sample = everything.select(np.flatnonzero(everything.ids == 0))
    rollout = group.rollouts[0]
    tokens = [*group.prompt.token_ids, *rollout.segments[0].arrays.token_ids.tolist()]
    assert sample.token_ids.tolist() == tokens
    assert sample.mask.sum() == rollout.num_tokens and not sample.mask[0]
    assert sample.rewards.tolist() == [0.0] * (len(tokens) - 1) + [rollout.verdict.reward]


def test_groups_of_equal_rewards_count_but_are_not_sent() -> None:
    """Of four groups in two mini-batches, 0, 2 and 3 have equal rewards: of the second mini-batch
    one sample is sent all the same.
    """
    made = groups(4, 3)
    for group in made:
        group.rollouts[:] = [
            replace(one, verdict=Verdict(float(number) if group.ordinal == 1 else 0.1, False))
            for number, one in enumerate(group.rollouts)
        ]
    every, fewer = (
        dealt(made, num_data_ranks=2, num_mini_batches=2, skips_equal=skips)
        for skips in (False, True)
    )
    sent = [
        sorted(n for rank in range(2) for n in fewer.share(rank).samples[part].ids)
        for part in (0, 1)
    ]
    assert sent == [[3, 4, 5], [6]]
    for rank in range(2):
        whole, mine = every.share(rank), fewer.share(rank)
        for name in ("rewards", "groups", "response_tokens", "mini_batch_of"):
            assert (getattr(whole, name) == getattr(mine, name)).all()
        assert mine.metrics == whole.metrics | {"groups/equal": 3, "samples/computed": 4}
    assert len(fewer.share(0).micro_batches[1]) == len(fewer.share(1).micro_batches[1])


def test_ages_are_of_the_trained_tokens_and_of_the_drawn_rollouts() -> None:
    """At version 9, group 0 is trained: 3 tokens of version 9, then a turn with 2 of version 8 and 1
    of version 6. Its greedy response, of version 1, and the rejected group, of version 4, are
    counted by rollout only.
    """

    def model(versions: list[tuple[int, int]]) -> Segment:
        return segment([0] * sum(number for _, number in versions), versions=versions)

    def rollout(*segments: Segment) -> Rollout:
        return Rollout(0, 0, list(segments), Verdict(reward=0.0, correct=False), 0)

    tool = observed([0] * 5, 0.0)
    prompt = Prompt(0, "1", [2], "1")
    mixed = rollout(model([(9, 3)]), tool, model([(8, 2), (6, 1)]))
    trained = Group(0, prompt, [mixed, rollout(model([(9, 4)]))], rollout(model([(1, 7)])))
    rejected = Group(1, prompt, [rollout(model([(4, 50)]))])
    found = describe(9, [trained, rejected], [trained], 1.0)
    assert found["staleness/token_mean"] == (2 * 1 + 1 * 3) / 10
    assert found["staleness/token_max"] == 3
    assert found["staleness/mean"] == (3 + 0 + 5 + 8) / 4 and found["staleness/max"] == 8
    none = describe(9, [rejected], [], 1.0)
    assert none["staleness/token_mean"] == none["staleness/token_max"] == 0


def test_nothing_accepted_makes_a_step_that_trains_on_nothing() -> None:
    plan = dealt(groups(2, 2), accepted=[], num_data_ranks=2, num_mini_batches=2)
    assert plan.share(1).samples == [] and len(plan.share(0).rewards) == 0


SESSION = """
from megarl.environments.session import AgentObservation, Observation

class Sum:
    def start(self, prompt):
        self.answer, self.turns = prompt.answer, []
        return Observation("#")

    def step(self, text, token_ids):
        self.turns.append((text, token_ids.tolist()))
        if len(self.turns) == 1:
            return Observation("try again: ")
        (first, _), (second, tokens) = self.turns
        assert "7" in first and tokens[0] == 3 + 8 and second == "8", self.turns
        return float(second == self.answer)

class Hangs(Sum):
    def step(self, text, token_ids):
        while True: pass

class Talks(Sum):
    def step(self, text, token_ids): return Observation("again")

class Stops(Sum):
    def step(self, text, token_ids):
        self.turns.append(text)
        return AgentObservation("8", token_ids=[3, 4], stop=("=", "+")) if len(self.turns) < 2 else 1.0
"""


class Script:
    """An engine that says what it is told to, and keeps what it was asked."""

    def __init__(self, *turns: list[int]) -> None:
        self.turns, self.asked = list(turns), []
        self.stops: list[tuple[str, ...]] = []

    async def generate(
        self,
        prompt_ids: np.ndarray,
        segments: Sequence[Segment],
        *,
        seed: int,
        max_tokens: int,
        **rest: Any,
    ) -> Segment:
        before = [prompt_ids.tolist(), *(part.arrays.token_ids.tolist() for part in segments)]
        self.asked.append((before, seed, max_tokens))
        self.stops.append(rest.get("stop", ()))
        return segment(self.turns[len(self.asked) - 1], logprob=-1.0)


async def play(name: str, engine: Script, tmp_path: Path) -> tuple[list[Segment], Verdict]:
    """One attempt with a session class of `SESSION` in its worker process."""
    write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "own.py").write_text(SESSION)
    codec = Codec.of(load_tokenizer(str(tmp_path / "tokenizer")))
    assert codec.is_bare
    config = EnvironmentConfig(session=f"{tmp_path}/own.py:{name}", time_limit_s=1.0)
    environment = Environment(config, codec)
    try:
        pool = EnginePool([engine], RolloutConfig())
        attempts = Attempts(pool, environment, run_seed=3, max_new_tokens=20)
        prompt = Prompt(0, "3+5=", [6, 13, 8, 14], "8")
        return await attempts.attempt(prompt, 0, 0, temperature=1.0)
    finally:
        await environment.close()


async def test_a_session_of_two_turns_is_token_exact(tmp_path: Path) -> None:
    """The environment's tokens are attended to and not trained on; the model's are those sampled,
    the unusual split of "7" with an unknown token included.
    """
    first, second = [10, 2, 1], [11, 1]
    engine = Script(first, second)
    segments, verdict = await play("Sum", engine, tmp_path)
    assert verdict == Verdict(reward=1.0, correct=True)
    kinds = [part.kind for part in segments]
    assert kinds == ["environment", "model", "environment", "model"]
    observed = [part.arrays.token_ids.tolist() for part in segments if part.kind == "environment"]
    signs = "0123456789+=,# abcdefghijklm"
    assert observed[0] == [3 + signs.index("#")]
    assert observed[1] == [3 + signs.index(s) if s in signs else 2 for s in "try again: "]
    prompt = [6, 13, 8, 14]
    assert engine.asked == [
        ([prompt, observed[0]], request_seed(3, 0, 0), 19),
        ([prompt, observed[0], first, observed[1]], request_seed(3, 0, 0, 1), 20 - 1 - 3 - 11),
    ]
    group = Group(0, Prompt(0, "", prompt, "8"), [Rollout(0, 0, segments, verdict, 0)])
    (sample,) = dealt([group]).share(0).samples
    assert sample.token_ids.tolist() == [*prompt, *observed[0], *first, *observed[1], *second]
    assert sample.mask.tolist() == [False] * 5 + [True] * 3 + [False] * 11 + [True] * 2
    assert (sample.engine_logprobs == np.where(sample.mask, -1.0, 0.0)).all()
    assert sample.rewards.tolist() == [0.0] * 20 + [1.0]
    assert group.rollouts[0].num_tokens == 5


async def test_a_turn_has_stop_texts_of_its_own(tmp_path: Path) -> None:
    """Those of an agent's call, whose session has tokenised what the model reads."""
    engine = Script([10, 1], [11, 1])
    segments, verdict = await play("Stops", engine, tmp_path)
    assert verdict.reward == 1.0 and engine.stops == [(), ("=", "+")]
    assert segments[2].arrays.token_ids.tolist() == [3, 4]


async def test_a_session_that_hangs_costs_its_own_rollout(tmp_path: Path) -> None:
    segments, verdict = await play("Hangs", Script([10, 1]), tmp_path)
    assert verdict.failure == "response_limit" and not verdict.left_out and verdict.reward == 0.0
    assert [part.kind for part in segments] == ["environment", "model"]


async def test_a_session_without_end_is_cut_off_at_the_limit(tmp_path: Path) -> None:
    engine = Script(*[[10, 1]] * 9)
    segments, verdict = await play("Talks", engine, tmp_path)
    assert segments[-1].kind == "model" and segments[-1].finish == "length"
    assert sum(part.num_tokens for part in segments) <= 20 and len(engine.asked) == 3
    assert verdict == Verdict(reward=0.0, correct=False, judged=False)


async def test_the_service_does_not_grow() -> None:
    """Over many steps, what it keeps is of the steps under way only."""
    held_out = [PROMPTS.at(number) for number in range(3)]

    made = service([Engine()], last_step=39, held_out=held_out)
    await made.start()
    for step in range(40):
        plan = await made.take(step, 0)
        assert len(plan.batch.transcripts) == 1
        for name in ("eval", "eval_sampled"):
            _, transcripts = await made.evaluate(1.0, name)
            assert len(transcripts) == 3
        await made.release(step + 1)
        kept = (made._ready, made._transcripts, made._cursors, made._finished.open)
        assert all(len(found) <= 2 * 12 for found in kept)
        assert len(made._released_at) <= 4 and not made._evaluations
        assert len(made.window.known) <= 2 * 12
    assert not made._ready and not made._finished.open and not made._transcripts
    await made.stop()


async def test_answers_of_a_large_held_out_set_are_counted_and_not_all_kept() -> None:
    held_out = [PROMPTS.at(number) for number in range(400)]
    metrics, transcripts = await service([Engine()], held_out=held_out).evaluate(1.0, "eval")
    assert metrics["problems"] == 400 and set(metrics) == set(EVALUATION_METRICS)
    assert [one["prompt"] for one in transcripts] == [f"p{n}" for n in range(NUM_TRANSCRIPTS)]
    odd = sum(one["correct"] for one in transcripts) / len(transcripts)
    assert 0 < metrics["accuracy"] < 1 and odd != metrics["accuracy"]


async def test_an_interrupted_run_ends_after_the_same_step_on_all_ranks() -> None:
    """The step that one rank has taken is given to the other; the next one to none."""
    made = service([Engine()], last_step=5, num_data_ranks=2)
    await made.start()
    assert await made.take(0, 0) is not None
    await made.interrupt()
    assert await made.take(0, 1) is not None
    await made.release(1)
    assert [await made.take(1, rank) for rank in range(2)] == [None, None]
    assert await made.evaluate(1.0, "eval") is None
    await made.stop()
    made = service([Engine()])  # never started: no batch comes
    waiting = [asyncio.create_task(one) for one in (made.take(0, 0), made.evaluate(1.0, "eval"))]
    await asyncio.sleep(0)
    await made.interrupt()
    assert await asyncio.gather(*waiting) == [None, None]
    await made.stop()


@pytest.mark.parametrize("interrupts", [True, False])
async def test_a_failure_does_not_part_ranks_that_share_a_step(interrupts: bool) -> None:
    """Such as the death of the last engine, during a stop too, for which a rank takes the error:
    the ranks that have the step would wait in its collectives for the others.
    """
    made = service([Engine()], last_step=5, num_data_ranks=2)
    await made.start()
    assert await made.take(0, 0) is not None
    if interrupts:
        await made.interrupt()
    await made._waits.fail(ProcessLost("no engine is left"))
    assert await made.take(0, 1) is not None
    for rank in range(2):
        if interrupts:
            assert await made.take(1, rank) is None
        else:
            with pytest.raises(ProcessLost, match="no engine is left"):
                await made.take(1, rank)
    await made.stop()


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    """Against counting every draw of k responses from n."""
    for n in range(1, 6):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
                share = sum(map(any, draws)) / len(draws)
                assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12)


def test_metrics_of_repeated_samples() -> None:
    correct = [[True, False, True, False], [False, False, False, True]]
    answers = [["5", "4", "5", None], ["1", "1", "2", "3"]]
    assert repeated_metrics(correct, answers) == {
        "avg@4": 3 / 8,
        "pass@1": pytest.approx(3 / 8),
        "pass@2": pytest.approx(((1 - 1 / 6) + 1 / 2) / 2),
        "pass@4": 1.0,
        "maj@4": 0.5,
    }
    assert repeated_metrics(correct, None)["maj@4"] is None
    assert repeated_metrics([[False]], [[None]])["maj@1"] == 0.0


@pytest.mark.parametrize(
    ("settings", "metrics", "stops"),
    [
        ({}, {"loss": 1.0}, False),
        ({"metric": "eval/accuracy", "at_least": 0.9}, {"eval/accuracy": 0.9}, True),
        ({"metric": "eval/accuracy", "at_least": 0.9}, {"eval/accuracy": 0.89}, False),
        ({"metric": "eval/accuracy", "at_least": 0.9}, {"eval_sampled/accuracy": 1.0}, False),
        ({"metric": "eval/accuracy", "at_least": 0.9}, {"accuracy": 1.0}, False),
        ({"metric": "entropy", "at_most": 0.1}, {"entropy": 0.05}, True),
        ({"metric": "entropy", "at_most": 0.1}, {"eval/accuracy": 0.05}, False),
    ],
)
def test_early_stop(settings: dict[str, Any], metrics: dict[str, float], stops: bool) -> None:
    assert reached(EarlyStopConfig(**settings), metrics) == stops


def test_an_early_stop_names_a_metric_that_is_there() -> None:
    with pytest.raises(UserError, match="which no step has; set it to one of entropy, loss"):
        reached(EarlyStopConfig(metric="los", at_most=1.0), {"loss": 0.0, "entropy": 1.0})
    own = EarlyStopConfig(metric="eval/environment/turns", at_most=1.0)
    with pytest.raises(UserError, match="which no eval has; set it to one of eval/accuracy"):
        reached(own, {"eval/accuracy": 0.0})
    for wrong in ({"metric": "loss"}, {"at_least": 1.0}):
        with pytest.raises(ValueError, match=r"early_stop\.metric"):
            EarlyStopConfig(**wrong)
    with pytest.raises(ValueError, match=r"EarlyStopConfig\.at_most"):
        EarlyStopConfig(metric="loss", at_most=float("nan"))


@pytest.mark.parametrize(
    ("settings", "saves"),
    [
        ({}, [2, 4, 6, 8]),  # 20 minutes
        ({"every_minutes": 30.0}, [3, 6, 8]),
        ({"every": 3}, [3, 6, 8]),
        ({"every": 3, "every_minutes": 20.0}, [2, 3, 5, 6, 8]),
        ({"every_minutes": 0.0}, [8]),
    ],
)
def test_when_a_checkpoint_is_due(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], saves: list[int]
) -> None:
    """Eight steps of eleven minutes: on rank 0 by its clock, on another rank, whose clock is an hour
    ahead, by what rank 0 says.
    """
    training = TrainingConfig(checkpoint=CheckpointConfig(**settings))
    config = SimpleNamespace(training=training, evaluation=EvaluationConfig())
    now, said = [0.0], list[bool]()
    monkeypatch.setattr(schedule.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(schedule, "broadcast_object", lambda late, world: said.append(late) or late)

    def steps(start_s: float) -> list[int]:
        run: Any = SimpleNamespace(
            config=config, saved_at=start_s, mesh=SimpleNamespace(world=None)
        )
        found = []
        for step in range(1, 9):
            now[0] = start_s + 660.0 * step
            if schedule.save_due(run, step, 8):
                found.append(step)
        return found

    assert steps(0.0) == saves
    heard = iter(list(said))
    monkeypatch.setattr(schedule, "broadcast_object", lambda late, world: next(heard))
    assert steps(3600.0) == saves and next(heard, None) is None


@pytest.mark.parametrize(("reached_at", "ends"), [(3, True), (2, False), (0, False)])
def test_a_run_that_stopped_early_trains_no_further_when_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached_at: int, ends: bool
) -> None:
    """Its checkpoint is of step 3. What an earlier step reached has not ended it."""
    quiet = ObserveConfig(tensorboard=False, progress=False)
    with Observer(quiet, tmp_path, total_steps=9) as before:
        for step in range(4):
            accuracy = 1.0 if step + 1 == reached_at else 0.5
            before.step(StepReport(step, {"accuracy": accuracy, "grad_norm": math.nan}))
    monkeypatch.setattr(loop, "publish", lambda parts, version: {})

    class Trained(Exception):
        pass

    class Rollouts:
        is_stopped = False

        def start(self, receipts: object) -> None:
            pass

        def stop_early(self) -> None:
            self.is_stopped = True

        def take(self, step: int) -> None:
            if not self.is_stopped:
                raise Trained

    with Observer(quiet, tmp_path, total_steps=9, first_step=3) as observer:
        parts: Any = SimpleNamespace(
            config=SimpleNamespace(
                rollout=RolloutConfig(),
                evaluation=SimpleNamespace(every=0),
                steps=9,
                early_stop=EarlyStopConfig(metric="accuracy", at_least=0.9),
            ),
            first_step=3,
            rollouts=Rollouts(),
            num_held_out=0,
            observer=observer,
            publisher=SimpleNamespace(receipts=[]),
        )
        method: Any = None  # no step is trained
        if ends:
            assert loop.train_steps(parts, method) == (3, 3)
        else:
            with pytest.raises(Trained):
                loop.train_steps(parts, method)


class Failing(Parity):
    """A verifier that fails for some responses, from a group of the given number on."""

    def __init__(self, share: float, first: int = 0) -> None:
        self.share, self.first = share, first

    async def step(self, key: str, prompt: Prompt, segment: Segment, *, num_tokens: int) -> Verdict:
        group, sample = map(int, key.split("/"))
        if group >= self.first and sample < 6 * self.share:
            return Verdict(reward=0.0, correct=False, failure="error", detail="KeyError: 'gold'")
        return Verdict(reward=float(sample % 2), correct=bool(sample % 2))


@pytest.mark.parametrize(("share", "warns"), [(0.0, False), (1 / 6, True), (0.5, True)])
async def test_failed_verdicts_are_a_warning(share: float, warns: bool) -> None:
    made = service([Engine()], max_failure_share=0.6, environment=Failing(share))
    for (batch,) in await drive(made, range(2)):
        failed = f"the verifier failed for {18 * share:.0f} of 18 responses; KeyError: 'gold'"
        assert batch.warning == (f"step {batch.step + 1}: {failed}" if warns else "")


async def test_a_verifier_that_begins_to_fail_at_step_3_ends_the_run_there() -> None:
    """With the words of its first failure, at the step's number."""
    made = service(
        [Engine()], staleness=0, max_failure_share=0.5, environment=Failing(0.5, first=6)
    )
    with pytest.raises(UserError, match=r"step 3: the verifier failed for 9 of 18 .* 'gold'; mend"):
        await drive(made, range(4))
    assert made.window.version == 2
    await made.stop()


def test_responses_that_were_cut_off_do_not_hide_failures() -> None:
    """The verifier was asked about 3 of 100 responses, and failed for 2."""
    failed = Verdict(0.0, correct=False, failure="timeout", detail="no verdict within 10 s")
    verdicts = [Verdict(0.0, correct=False, judged=False)] * 97 + [failed] * 2
    with pytest.raises(UserError, match="failed for 2 of 3 responses; no verdict within 10 s"):
        failure_warning([*verdicts, Verdict(1.0, correct=True)], 0.5, "step 1")
    assert failure_warning(verdicts[:97], 0.5, "step 1") == ""


class Unpublished(Engine):
    """An engine that says that no version was ever published to it."""

    version = property(lambda self: -1, lambda self, value: None)  # type: ignore[assignment]


async def test_the_first_groups_are_held_to_the_version_that_the_run_begins_with() -> None:
    made = service([Unpublished()])
    await made.start()
    with pytest.raises(RuntimeError, match=r"weights of version -1, although version 0"):
        await asyncio.wait_for(made.take(0, 0), 5)
    await made.stop()


async def test_an_evaluation_that_one_rank_has_is_given_to_all() -> None:
    """An interrupt between the questions of two ranks would part them otherwise."""
    made = service([Engine()])
    first = await made.evaluate(1.0, "eval")
    await made.interrupt()
    assert first is not None and await made.evaluate(1.0, "eval") is first
    assert await made.evaluate(1.0, "eval_sampled") is None
    await made.stop()
