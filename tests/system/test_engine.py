"""One real vLLM engine: what it samples, what it holds after every publish, and what it refuses.

The engine runs in Ray as in a run; the trainer's side is a plain Hugging Face model whose weights
we change at will.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from support import own_engines
from support.engine_side import BOUND, PlainPolicy, Side, gap, mean_gap, opened, publish_five_times
from support.tiny import write_model

from megarl.data.tokenizer import load_tokenizer
from megarl.engines.vllm_engine import UNPUBLISHED
from megarl.settings.rollout import EngineConfig, Sampling
from megarl.settings.weight_sync import WeightSyncConfig
from megarl.weights import checksums

KINDS = {
    "qwen2, tied": dict(kind="qwen2", tied=True),
    "qwen3, untied, vocabulary of 70": dict(kind="qwen3", tied=False, vocab_size=70, head_dim=32),
}


TIED, UNTIED = KINDS


@pytest.fixture(scope="module", params=[UNTIED, pytest.param(TIED, marks=pytest.mark.nightly)])
def side(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Side]:
    folder = write_model(tmp_path_factory.mktemp("engine"), **KINDS[request.param])
    with opened(folder, EngineConfig()) as made:
        yield made


def test_what_is_pushed_out_of_a_full_cache_is_counted(tmp_path: Path) -> None:
    """And not what new weights push out, which is every open request. First of this file: the others
    share an engine, and a process has one cluster.
    """
    config = EngineConfig(kind=f"{own_engines.FILE}:SmallCache")
    with opened(write_model(tmp_path / "model"), config) as side:
        (handle,) = side.engines.handles
        side.publish()
        for attempt in range(6):
            running = side.start([4, 5, 6, 7] * 4, 2, max_tokens=72)
            side.shake(attempt)
            side.publish()
            if any(len(turn.versions) > 1 for turn in ray.get(running, timeout=90)):
                break
        else:
            pytest.fail("no request was under way while weights changed")
        assert ray.get(handle.pulse.remote(), timeout=60).preemptions == 0
        prompt = list(range(2, 22))
        turns = side.sample(prompt, 24, max_tokens=40)
        assert ray.get(handle.pulse.remote(), timeout=60).preemptions > 0
        for turn in turns:  # computed again, they are right
            tokens = prompt + turn.arrays.token_ids.tolist()
            assert gap(turn.arrays.logprobs, side.logprobs(tokens)[len(prompt) - 1 :]) < BOUND


def test_a_prompt_is_computed_once_for_its_group_and_version(side: Side) -> None:
    """By vLLM's own count. On the CPU its cache is in blocks of 32 tokens."""
    (handle,) = side.engines.handles
    prompt = [2 + n % 10 for n in range(200)]
    for _ in range(2):
        side.publish()
        before = ray.get(handle.pulse.remote(), timeout=60)
        side.sample(prompt, 8)
        after = ray.get(handle.pulse.remote(), timeout=60)
        assert after.prompt_tokens - before.prompt_tokens == 8 * 200
        assert after.cached_tokens - before.cached_tokens == 7 * (200 // 32 * 32)


def test_each_of_five_publishes_changes_what_the_engine_computes(side: Side) -> None:
    publish_five_times(side, gap, BOUND)


@pytest.mark.gpu
def test_each_of_five_publishes_changes_what_an_engine_on_a_gpu_computes(tmp_path: Path) -> None:
    config = EngineConfig(dtype="bfloat16", gpu_memory_utilization=0.3, compile=False)
    with opened(write_model(tmp_path / "model"), config, on_cpu=False) as side:
        publish_five_times(side, mean_gap, 0.05)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logprobs_are_those_of_the_law_sampled_from(side: Side, temperature: float) -> None:
    side.publish()
    prompt = [5, 6, 7]
    turns, again = (side.sample(prompt, 8, temperature=temperature) for _ in range(2))
    sampled = [turn.arrays.token_ids.tolist() for turn in turns]
    assert len(set(map(tuple, sampled))) > 4, "seeds do not matter"
    assert [turn.arrays.token_ids.tolist() for turn in again] == sampled
    for turn, tokens in zip(turns, sampled, strict=True):
        expected = side.logprobs(prompt + tokens, temperature)[len(prompt) - 1 :]
        assert gap(turn.arrays.logprobs, expected) < BOUND
        assert turn.versions == [(side.version, len(tokens))]
        assert (tokens[-1] == 1) == (turn.finish == "stop")
        assert 1 not in tokens[:-1]


def law(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[T, V] log-probs of the law that `sampling` leaves of [T, V] logits at temperature 1."""
    probabilities = logits.double().softmax(-1)
    ordered, ids = probabilities.sort(-1, descending=True)
    ranks = torch.arange(ordered.shape[-1])
    kept = (ordered.cumsum(-1) - ordered < sampling.top_p) & (
        ordered >= sampling.min_p * ordered[:, :1]
    )
    if sampling.top_k:
        kept &= ranks < sampling.top_k
    chosen = torch.zeros_like(kept).scatter(-1, ids, kept)
    return torch.where(chosen, probabilities, 0.0).log().log_softmax(-1)


@pytest.mark.parametrize(
    "sampling", [Sampling(top_k=5), Sampling(top_p=0.6), Sampling(min_p=0.3)], ids=str
)
def test_a_truncated_law_is_the_one_the_logprobs_are_of(side: Side, sampling: Sampling) -> None:
    """Renormalised over the tokens that are left, unlike the trainer's."""
    side.publish()
    prompt, away = [5, 6, 7], 0.0
    for turn in side.sample(prompt, 8, sampling=sampling):
        tokens = prompt + turn.arrays.token_ids.tolist()
        with torch.no_grad():
            logits = side.model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
        expected = law(logits, sampling).gather(1, torch.tensor(tokens[len(prompt) :])[:, None])
        assert gap(turn.arrays.logprobs, expected[:, 0].tolist()) < BOUND
        away = max(away, gap(turn.arrays.logprobs, side.logprobs(tokens)[len(prompt) - 1 :]))
    assert away > 0.1, "the law was not truncated: this test would prove nothing"


@pytest.mark.parametrize("of_turn", [False, True])
def test_a_stop_text_ends_a_response_and_leaves_its_logprobs_alone(
    side: Side, of_turn: bool
) -> None:
    """One of the recipe, and one of a single turn."""
    side.publish()
    tokenizer = load_tokenizer(str(side.folder))
    prompt, stops = [5, 6, 7], ("3", "47")
    free = side.sample(prompt, 24)
    settings = {"stop": stops} if of_turn else {"sampling": Sampling(stop=stops)}
    stopped = side.sample(prompt, 24, **settings)
    ends = 0
    for whole, turn in zip(free, stopped, strict=True):
        tokens = turn.arrays.token_ids.tolist()
        assert whole.arrays.token_ids.tolist()[: len(tokens)] == tokens, "sampled as without"
        assert gap(turn.arrays.logprobs, side.logprobs(prompt + tokens)[len(prompt) - 1 :]) < BOUND
        assert turn.versions == [(side.version, len(tokens))] and turn.num_tokens == len(tokens)
        before = tokenizer.decode(tokens[:-1])
        assert not any(stop in before for stop in stops)
        is_met = any(stop in tokenizer.decode(tokens) for stop in stops)
        ends += is_met
        assert turn.finish == "stop" or not is_met
    assert ends > 4, "no response met a stop text: this test would prove nothing"


def test_greedy_takes_the_likeliest_token(side: Side) -> None:
    side.publish()
    (turn,) = side.sample([9, 8], 1, temperature=0.0)
    tokens = [9, 8]
    for chosen in turn.arrays.token_ids.tolist():
        with torch.no_grad():
            assert chosen == int(side.model(torch.tensor([tokens])).logits[0, -1].argmax())
        tokens.append(chosen)


def test_publishing_under_running_generation_loses_nothing_and_stamps_every_token(
    side: Side,
) -> None:
    """Requests go on; tokens after the switch have the new weights' log-probs, prefix included; a
    shared prefix is not stale. A stop text ends a turn too if its first character is of old weights
    and its last one of new ones.
    """
    side.publish()
    tokenizer, prompt = load_tokenizer(str(side.folder)), [4, 5, 6, 7] * 4
    stops = [f"{number:02}" for number in range(100)]
    switched = ended = 0
    for attempt in range(12):
        first = side.version
        old = {name: tensor.clone() for name, tensor in side.model.state_dict().items()}
        running = side.start(prompt, 16, max_tokens=72)
        ending = side.start(prompt, 64, max_tokens=72, stop=stops)
        side.shake(100 + attempt)
        side.publish()
        turns = ray.get(running, timeout=90)
        new = {name: tensor.clone() for name, tensor in side.model.state_dict().items()}
        for turn in turns:
            tokens, versions = turn.arrays.token_ids.tolist(), [one for one, _ in turn.versions]
            assert sum(count for _, count in turn.versions) == len(tokens)
            assert versions in ([first], [first + 1], [first, first + 1])
            start = 0
            for version, count in turn.versions:
                side.model.load_state_dict(old if version == first else new)
                expected = side.logprobs(prompt + tokens)[len(prompt) - 1 :]
                part = slice(start, start + count)
                assert gap(turn.arrays.logprobs[part], expected[part]) < BOUND
                start += count
            switched += len(turn.versions) > 1
        side.model.load_state_dict(new)
        for turn in ray.get(ending, timeout=90):
            tokens = turn.arrays.token_ids.tolist()
            before = tokenizer.decode(tokens[:-1])
            assert not any(stop in before for stop in stops)
            is_met = tokenizer.decode(tokens)[-2:] in stops
            ended += is_met and [count for _, count in turn.versions][1:] == [1]
        if switched and ended:
            break
    assert switched, "no request was under way while weights changed: this test would prove nothing"
    assert ended, (
        "no stop text was half written while weights changed: this test would prove nothing"
    )


def test_tokens_of_weights_that_vllm_does_not_name_are_of_no_version(side: Side) -> None:
    """They get -1, which the rollout service refuses, and not the version of now."""
    (handle,) = side.engines.handles
    side.publish()

    def rename(actor: Any) -> None:
        engine = actor.engine
        loop = engine._llm.output_handler.get_loop()
        asyncio.run_coroutine_threadsafe(engine._llm.update_weight_version("default"), loop)

    ray.get(handle.__ray_call__.remote(rename), timeout=60)
    deadline = time.monotonic() + 60
    while (turn := side.sample([5, 6], 1)[0]).versions[0][0] == side.version:
        assert time.monotonic() < deadline, "the new name has not come"
    assert turn.versions == [(UNPUBLISHED, turn.num_tokens)]
    side.publish()
    assert side.sample([5, 6], 1)[0].versions[0][0] == side.version


def test_damage_on_the_way_is_found_named_and_healed_by_the_next_version(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = "model.layers.1.self_attn.k_proj.weight"

    def damaging(source: torch.Tensor, target: torch.Tensor, box: Any) -> int:
        digest = carry(source, target, box)
        if source.data_ptr() == side.policy.owned()[victim].data_ptr():
            target[3, 5] += 1e-6
        return digest

    carry = checksums.carry
    monkeypatch.setattr(checksums, "carry", damaging)
    side.shake(7)
    with pytest.raises(RuntimeError, match="has received a wrong") as refused:
        side.publish()
    assert victim in str(refused.value) and "(1 of " in str(refused.value)
    assert "data 1 x sequence 1 x tensor 1, ZeRO 0 -> 1 engine(s) of tensor 1" in str(refused.value)
    monkeypatch.undo()
    tokens = list(range(2, 30))
    side.publish()
    assert gap(side.engines.score(tokens, timeout_s=60)[0], side.logprobs(tokens)) < BOUND


def test_a_model_that_is_not_the_tables_is_refused_and_named(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = side.policy.shapes
    left_out = next(name for name in shapes if "q_proj.weight" in name)
    monkeypatch.setattr(
        PlainPolicy, "shapes", {name: shape for name, shape in shapes.items() if name != left_out}
    )
    with pytest.raises(ValueError, match=left_out):
        side.make_publisher()


class KillsAt:
    """A transport's sending end whose first attempt at bucket `number` ends an engine before it is
    handed over.
    """

    def __init__(self, sender: Any, number: int, side: Side) -> None:
        self._sender, self._number, self._side, self.killed_at = sender, number, side, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)

    def commit(self, bucket: Any, watch: Any) -> None:
        if bucket.number == self._number and not self.killed_at:
            for pid in reversed(self._side.engines.pids(0)):
                os.kill(pid, signal.SIGKILL)
            self.killed_at = time.monotonic()
        self._sender.commit(bucket, watch)


def test_an_engine_killed_in_the_middle_of_a_publish_is_named(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last of this file, since the engine is gone."""
    monkeypatch.setattr(WeightSyncConfig, "bucket_bytes", 2**12)
    side.publisher = side.make_publisher(replacements=0)
    side.publish()
    assert len(side.publisher.route.buckets) > 6
    doomed = KillsAt(side.publisher._sender, 3, side)
    side.publisher._sender = doomed
    side.shake(8)
    with pytest.raises(RuntimeError, match="engine 0 was lost") as told:
        side.publish()
    waited_s = time.monotonic() - doomed.killed_at
    print(f"told {waited_s:.2f} s after the kill: {told.value}")
    assert waited_s < 10
    assert f"version {side.version}" in str(told.value)
    assert any(name in str(told.value) for name in side.publisher.route.tensors)
