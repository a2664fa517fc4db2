"""Rollouts that are left out: those without a verdict, wholly, and those cut off, from the loss."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rollouts import OneStep, Prompts, dealt, rollout_service, segment
from support.tiny import groups, write_tokenizer

from megarl.checkpoints.group_files import read_groups, write_groups
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.codec import Codec
from megarl.environments.scores import Score, add_up
from megarl.environments.scoring import Environment
from megarl.errors import UserError
from megarl.ledger.events import Finished, from_record
from megarl.ledger.recorder import NO_VERDICTS, Recorder
from megarl.objectives.advantages import ADVANTAGES
from megarl.objectives.losses import AGGREGATIONS
from megarl.rollout.attempts import Attempts
from megarl.rollout.evaluation import failure_warning, repeated_metrics
from megarl.rollout.requests import EnginePool
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.objectives import AlgorithmConfig
from megarl.settings.rollout import DynamicSamplingConfig, RolloutConfig
from megarl.types import Group, Prompt, Rollout, Segment, StepBatch, Verdict

OWN = """
import subprocess, sys, time
from megarl.environments.session import Answer, Observation
def score(prompt, response):
    if response == "raise": raise ConnectionError("the judge is down")
    if response == "nan": return float("nan")
    if response == "wait": time.sleep(60)
    if response == "stall":
        while True: pass
    if response == "its program stalls":
        subprocess.run([sys.executable, "-c", "while True: pass"])
    if response == "its program waits": subprocess.run(["sleep", "60"])
    if response == "none": return None
    if response == "none in a dict": return {"reward": None, "seen": 1}
    return float(response == "right")
def one(prompt, response): return 1.0
class Game:
    def start(self, prompt):
        if prompt.answer == "start raises": raise OSError("no simulator")
        if prompt.answer == "long": return Observation("7+" * 30)
        return Observation("")
    def step(self, text, token_ids):
        if self.told == "none": return None
class Silent(Game): told = "none"
class Wordless(Game):
    def step(self, text, token_ids): return Answer(None)
class Strays(Game):
    def step(self, text, token_ids): return Observation("7", follows=9)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_verdicts_that_do_not_exist_are_left_out(own: str) -> None:
    """(left out with `leave_out`, with `wrong`, why): a stall is the response's own fault."""
    cases = {
        "right": (False, False, ""),
        "wrong": (False, False, ""),
        "raise": (True, False, "error"),
        "nan": (True, False, "nan"),
        "wait": (True, False, "timeout"),
        "stall": (False, False, "response_limit"),
        "its program stalls": (False, False, "response_limit"),
        "its program waits": (True, False, "timeout"),
        "none": (True, True, "abstained"),
        "none in a dict": (True, True, "abstained"),
    }

    async def judged(**more: Any) -> list[Verdict]:
        config = EnvironmentConfig(
            verifier=f"{own}:score", time_limit_s=0.5, num_workers=2, unscored=-2.0, **more
        )
        environment, prompt = Environment(config), Prompt(0, "", [1], "")
        try:
            calls = (environment.score(prompt, text, 1, False) for text in cases)
            return list(await asyncio.gather(*calls))
        finally:
            await environment.close()

    for place, on_failure in enumerate(("leave_out", "wrong")):
        for text, verdict in zip(cases, asyncio.run(judged(on_failure=on_failure)), strict=True):
            left_out, why = cases[text][place], cases[text][2]
            assert (verdict.left_out, verdict.missing) == (left_out, why), (text, on_failure)
            assert not verdict.correct or text == "right"
            assert verdict.reward == (-2.0 if why else float(text == "right")), text


@pytest.mark.parametrize(("name", "answer", "turns"), [
    ("Game", "start raises", 0),
    ("Game", "long", 0),
    ("Silent", "", 1),
    ("Wordless", "", 1),
    ("Strays", "", 1),
])  # fmt: skip
async def test_faults_of_a_session_are_left_out(
    name: str, answer: str, turns: int, own: str, tmp_path: Path
) -> None:
    """No token of a bare prompt is trained, whatever `on_failure` says."""
    write_tokenizer(tmp_path / "tokenizer")
    codec = Codec.of(load_tokenizer(str(tmp_path / "tokenizer")))
    environment = Environment(EnvironmentConfig(session=f"{own}:{name}"), codec)
    try:
        attempts = Attempts(EnginePool([Engine()], RolloutConfig()), environment, 3, 20)
        prompt = Prompt(0, "3", [6], answer)
        segments, verdict = await attempts.attempt(prompt, 0, 0, temperature=1.0)
    finally:
        await environment.close()
    assert len(segments) == turns and verdict.left_out
    assert verdict.missing == ("abstained" if name == "Silent" else "error"), verdict.detail


@pytest.mark.parametrize(("rewards", "total", "correct", "names"), [
    ([1.0, 0.5], 2.0, True, {"reward/a", "reward/b"}),
    ([None, 1.0], 2.0, True, {"reward/b"}),
    ([0.0, None], 0.0, False, {"reward/a"}),
    ([None, None], None, None, set()),
])  # fmt: skip
def test_a_function_that_abstains_is_not_in_the_sum(
    rewards: list[float | None], total: float | None, correct: bool | None, names: set[str]
) -> None:
    parts = [
        (name, n + 1.0, Score(one)) for n, (name, one) in enumerate(zip("ab", rewards, strict=True))
    ]
    found = add_up(parts)
    assert (found.reward, found.correct, set(found.metrics)) == (total, correct, names)


# The groups of a step


class Engine:
    version = 0

    async def generate(self, prompt_ids: np.ndarray, *args: Any, seed: int, **rest: Any) -> Segment:
        return segment([1 + seed % 7, 2], self.version, logprob=-1.0)

    async def paused_s(self, last_s: float) -> float:
        return 0.0


class Fails(OneStep):
    """Each answer is worth 1; the verifier fails for those that `fails` says: (prompt, call)."""

    def __init__(self, fails: Any) -> None:
        self.fails, self.calls = fails, dict[int, int]()

    async def step(self, key: str, prompt: Prompt, segment: Segment, **rest: Any) -> Verdict:
        call = self.calls[prompt.index] = self.calls.get(prompt.index, -1) + 1
        if self.fails(prompt.index, call):
            return Verdict(0.0, False, "error", "the judge is down", left_out=True)
        return Verdict(float(call % 2 if prompt.index % 2 else 1), correct=True)


async def step_of(fails: Any, **more: Any) -> tuple[StepBatch, list[Any], list[Group]]:
    """The first step of groups of 4 whose verifier `fails`, the ledger's events, and its groups."""
    events, seen = list[Any](), list[Group]()

    class Kept(Recorder):
        def put(self, event: Any) -> None:
            events.append(event)

        def finish(self, group: Group) -> None:
            seen.append(group)

    config = RolloutConfig(
        groups_per_step=2,
        group_size=4,
        max_new_tokens=4,
        max_staleness=0,
        dynamic_sampling=DynamicSamplingConfig(max_draws=4.0),
    )
    prompts = Prompts(lambda n: Prompt(n, "", [1, 2], ""))
    made = rollout_service(
        [Engine()], config, prompts, environment=Fails(fails), ledger=Kept(), last_step=0, **more
    )
    await made.start()
    plan = await made.take(0, 0)
    assert plan is not None and not isinstance(plan, type(made))
    await made.stop()
    return plan.batch, events, seen


@pytest.mark.parametrize(("name", "fails", "sizes", "why"), [
    ("none", lambda prompt, call: False, [4, 4], "equal rewards"),
    ("every fourth", lambda prompt, call: call == 3, [4, 4], "equal rewards"),
    ("again", lambda prompt, call: call >= 3, [3, 3], "equal rewards"),
    ("all but one", lambda prompt, call: prompt % 2 == 0 and call, [4, 4], NO_VERDICTS),
    ("all", lambda prompt, call: prompt % 2 == 0, [4, 4], NO_VERDICTS),
])  # fmt: skip
async def test_no_group_is_accepted_because_of_a_failure(
    name: str, fails: Any, sizes: list[int], why: str
) -> None:
    """Groups of even prompts have equal rewards, whatever fails; others are filled up, once."""
    batch, events, seen = await step_of(fails, max_failure_share=1.0)
    assert np.bincount(batch.groups).tolist() == sizes, name
    assert set(batch.rewards.tolist()) == {0.0, 1.0}
    rejected = [one for one in events if type(one).__name__ == "Rejected"]
    assert rejected and {one.why for one in rejected} == {why}
    count = sum(
        len(group.left_out) for group in seen if group.ordinal < batch.metrics["groups/drawn"]
    )
    assert batch.metrics["verifier/errors"] == count
    assert batch.metrics["reward/responses"] + count == sum(
        len(group.members) for group in seen if group.ordinal < batch.metrics["groups/drawn"]
    )


async def test_too_many_failures_end_the_run() -> None:
    with pytest.raises(UserError, match=r"the verifier failed for \d+ of"):
        await step_of(lambda prompt, call: call % 2, max_failure_share=0.4)


def test_failed_verdicts_are_as_if_never_drawn(tmp_path: Path) -> None:
    """30 % of the samples fail: equal bits of all that a step trains on, on one rank and on two,
    and of every advantage; so too after a checkpoint.
    """
    draw, made = random.Random(5), groups(6, 8)
    failed = Verdict(0.0, False, "error", "down", left_out=True)
    without, having = list[Group](), list[Group]()
    for group in made:
        kept = [one for one in group.rollouts if draw.random() > 0.3]
        lost = [replace(one, verdict=failed) for one in group.rollouts if one not in kept]
        lost.append(Rollout(9, 9, [], failed, 0))  # whose session did not start
        without.append(replace(group, rollouts=kept))
        having.append(replace(group, rollouts=kept, left_out=lost))
    write_groups(tmp_path / "groups" / "rank_0.safetensors", having, "x")
    read, _ = read_groups(tmp_path, "x", lambda ordinal: having[ordinal].prompt)
    assert [len(group.left_out) for group in read] == [len(group.left_out) for group in having]
    for ranks in (1, 2):
        known = dict(num_data_ranks=ranks, num_mini_batches=2)
        plans = [dealt(one, **known) for one in (without, having, read)]
        for rank in range(ranks):
            wanted, *others = (plan.share(rank) for plan in plans)
            for other in others:
                assert _bits(other) == _bits(wanted)
                for name in ("reward/mean", "reward/std", "accuracy", "reward/responses"):
                    assert other.metrics[name] == wanted.metrics[name], name


def _bits(batch: StepBatch) -> list[bytes | str]:
    arrays = [batch.rewards, batch.groups, batch.response_tokens, batch.mini_batch_of]
    arrays += [getattr(one, field.name) for one in batch.samples for field in fields(one)]
    arrays = [array for array in arrays if array is not None]  # no experts
    return [*(array.tobytes() for array in arrays), str(batch.micro_batches)]


async def test_the_ledger_and_the_metrics_count_what_is_left_out(tmp_path: Path) -> None:
    lost = Rollout(4, 0, [segment([1, 2])], Verdict(0.0, False, left_out=True), 0)
    group = replace(groups(1, 4)[0], left_out=[lost])
    recorder = Recorder(tmp_path / "ledger.jsonl")
    recorder.finish(group)
    await recorder.end(None)
    record = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[-1])
    names = ("event", "ordinal", "rollouts", "left_out")
    event = from_record({name: record[name] for name in names})
    assert isinstance(event, Finished) and len(event.rollouts) == 4
    assert [one.failure for one in event.left_out] == ["abstained"]
    metrics = dealt([group]).share(0).metrics
    assert metrics["verifier/abstained"] == 1 and metrics["verifier/errors"] == 0
    assert metrics["reward/responses"] == 4


def test_a_verifier_that_always_abstains_is_said() -> None:
    none = Verdict(0.0, False, left_out=True)
    said = "step 1: the verifier returned None for all 3 responses"
    assert failure_warning([none] * 3, 0.5, "step 1") == said
    assert failure_warning([none, none, Verdict(1.0, True)], 0.5, "step 1") == ""


def test_pass_at_k_of_fewer_verdicts() -> None:
    found = repeated_metrics([[True, False], [True], []], [["a", "b"], ["a"], []], 2)
    assert found == {"avg@2": 0.75, "pass@1": 0.75, "pass@2": 1.0, "maj@2": 1.0}


# Rollouts that are cut off


def cut_off(made: list[Group], numbers: set[int]) -> list[Group]:
    """`made`, in which the rollouts with these numbers in their group are cut off."""
    return [
        replace(
            group,
            rollouts=[
                replace(one, segments=[replace(one.segments[0], finish="length")])
                if one.sample in numbers
                else one
                for one in group.rollouts
            ],
        )
        for group in made
    ]


@pytest.mark.parametrize("numbers", [{0}, {1, 3}, {0, 1, 2, 3}])
def test_tokens_of_what_is_cut_off_are_out_of_the_loss(numbers: set[int]) -> None:
    """Its reward stays in the mean of its group, and its tokens have no weight."""
    made = cut_off(groups(3, 4), numbers)
    train, out = dealt(made).share(0), dealt(made, truncated="leave_out").share(0)
    is_cut = np.array([one.truncated for group in made for one in group.rollouts])
    assert (out.rewards == train.rewards).all()
    assert (out.response_tokens == train.response_tokens * ~is_cut).all()
    sent = [number for part in out.samples for number in part.ids.tolist()]
    masks = [int(part.select([n]).mask.sum()) for part in out.samples for n in range(len(part))]
    kept = np.flatnonzero(~is_cut).tolist()
    assert (sorted(sent) == kept and all(masks)) if kept else (sent == [0] and masks == [0])
    tokens, before = torch.tensor(out.response_tokens), torch.tensor(train.response_tokens)
    settings = AlgorithmConfig(aggregation="constant", constant_tokens=9)
    for weights_of in AGGREGATIONS.values():
        weights = weights_of(tokens, settings)
        assert not bool(weights[torch.tensor(is_cut)].any())
    given = torch.tensor(train.rewards), torch.tensor(train.groups)
    for name in ("grpo", "dr_grpo", "gpg", "rloo"):
        assert bool((ADVANTAGES[name](*given, tokens) == ADVANTAGES[name](*given, before)).all())


def test_what_is_cut_off_is_no_baseline_of_remax() -> None:
    made = [
        replace(group, greedy=replace(group.rollouts[0], sample=-1))
        for group in cut_off(groups(2, 4), {1, 2})
    ]
    batch = dealt(made, truncated="leave_out").share(0)
    assert np.bincount(batch.groups).tolist() == [3, 3]
    given = batch.rewards, batch.groups, batch.response_tokens
    ADVANTAGES["remax"](*map(torch.tensor, given))


@pytest.mark.parametrize(("truncated", "finish", "penalty"), [
    ("train", "length", 0.0),
    ("leave_out", "length", 0.0),
    ("penalise", "length", -1.0),
    ("penalise", "turns", -1.0),
    ("penalise", "stop", 0.0),
])  # fmt: skip
async def test_the_penalty_of_what_is_cut_off(truncated: str, finish: Any, penalty: float) -> None:
    class Cut(Engine):
        async def generate(self, *args: Any, **rest: Any) -> Segment:
            return replace(segment([3]), finish=finish)

    pool = EnginePool([Cut()], RolloutConfig())
    attempts = Attempts(pool, OneStep(), 3, 4, penalises_cut_off=truncated == "penalise")
    _, verdict = await attempts.attempt(Prompt(0, "", [1], ""), 0, temperature=1.0)
    assert (verdict.reward, verdict.penalty) == (1.0 + penalty, penalty)
