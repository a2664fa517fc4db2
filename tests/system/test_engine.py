"""One real vLLM engine: what it samples, what it holds after every publish, and what it refuses.

The engine runs in Ray as in a run; the trainer's side is a plain Hugging Face model whose weights we change at will.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tiny import VOCABULARY, write_model

from megarl.cluster import Cluster, EngineGroup
from megarl.publish.shared_memory import NAME, Sender
from megarl.publish.wire import WORKER_EXTENSIONS
from megarl.rollout.config import EngineConfig
from megarl.third_party import engine_environment, own_cluster_token, prepare_environment

BOUND = 1e-4
KINDS = {
    "qwen2, tied": dict(kind="qwen2", tied=True),
    "qwen3, untied, vocabulary of 70": dict(kind="qwen3", tied=False, vocab_size=70, head_dim=32),
}


class Side:
    """Trainer's side of one engine."""

    def __init__(self, folder: Path, group: EngineGroup) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.engines, self.sender, self.version = group, Sender(torch.float32), -1

    def shake(self, seed: int) -> None:
        """Other weights, every one of them."""
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)

    def manifest(self) -> dict[str, Any]:
        self.version += 1
        named = list(self.model.named_parameters())
        return self.sender.write(named, self.version, {name: p.shape for name, p in named})

    def publish(self) -> dict[str, Any]:
        manifest = self.manifest()
        (answer,) = self.engines.update(manifest, timeout_s=60)
        assert answer["held"] == [{"version": self.version, "digest": manifest["digest"]}]
        return manifest

    def logprobs(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0, :-1].double() / temperature
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    def start(self, prompt: list[int], seed: int, *, max_tokens: int = 24, temperature: float = 1.0) -> Any:
        (handle,) = self.engines.handles
        return handle.generate.remote(prompt, seed=seed, max_tokens=max_tokens, temperature=temperature)


@pytest.fixture(scope="module", params=KINDS, ids=list(KINDS))
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    prepare_environment(1)
    folder = write_model(tmp_path_factory.mktemp("engine"), **KINDS[request.param])
    with Cluster(namespace=f"test-{os.getpid()}", token=own_cluster_token()) as cluster:
        group = cluster.start_engines(
            1,
            num_gpus=0,
            timeout_s=120,
            model=str(folder),
            config=EngineConfig(),
            max_tokens=96,
            stop_token_ids=[1],
            trust_remote_code=False,
            seed=0,
            backend=NAME,
            worker_extension=WORKER_EXTENSIONS["shared_memory"],
            environment=engine_environment(on_cpu=True, num_threads=1, kv_cache_gib=1),
        )
        group.wait()
        made = Side(folder, group)
        yield made
        made.sender.close()


def gap(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_each_of_five_publishes_changes_what_the_engine_computes(side: Side) -> None:
    tokens = torch.randint(0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    for seed in range(5):
        before = side.logprobs(tokens)
        side.shake(seed)
        side.publish()
        (found,) = side.engines.score(tokens, timeout_s=60)
        assert gap(found, side.logprobs(tokens)) < BOUND
        assert gap(found, before) > 0.01, "the new weights say the same as the old ones: this test would prove nothing"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logprobs_are_those_of_the_law_sampled_from(side: Side, temperature: float) -> None:
    side.publish()
    prompt = [5, 6, 7]
    turns = ray.get([side.start(prompt, seed, temperature=temperature) for seed in range(8)], timeout=60)
    assert len({tuple(turn.token_ids) for turn in turns}) > 4, "seeds do not matter"
    again = ray.get([side.start(prompt, seed, temperature=temperature) for seed in range(8)], timeout=60)
    assert [turn.token_ids for turn in again] == [turn.token_ids for turn in turns]
    for turn in turns:
        expected = side.logprobs(prompt + turn.token_ids, temperature)[len(prompt) - 1 :]
        assert gap(turn.logprobs, expected) < BOUND
        assert turn.versions == [(side.version, len(turn.token_ids))]
        assert (turn.token_ids[-1] == 1) == (turn.finish == "stop")
        assert 1 not in turn.token_ids[:-1]


def test_greedy_takes_the_likeliest_token(side: Side) -> None:
    side.publish()
    turn = ray.get(side.start([9, 8], 0, temperature=0.0), timeout=60)
    tokens = [9, 8]
    for chosen in turn.token_ids:
        with torch.no_grad():
            assert chosen == int(side.model(torch.tensor([tokens])).logits[0, -1].argmax())
        tokens.append(chosen)


def test_publishing_under_running_generation_loses_nothing_and_stamps_every_token(side: Side) -> None:
    """Requests go on; tokens after the switch have the new weights' log-probs, prefix included; a shared prefix is not stale."""
    side.publish()
    prompt = [4, 5, 6, 7] * 4
    switched = 0
    for attempt in range(6):
        old, first = side.model.state_dict(), side.version
        old = {name: tensor.clone() for name, tensor in old.items()}
        running = [side.start(prompt, seed, max_tokens=72) for seed in range(16)]
        side.shake(100 + attempt)
        side.publish()
        turns = ray.get(running, timeout=90)
        new = {name: tensor.clone() for name, tensor in side.model.state_dict().items()}
        for turn in turns:
            assert sum(count for _, count in turn.versions) == len(turn.token_ids)
            assert [version for version, _ in turn.versions] in ([first], [first + 1], [first, first + 1])
            start = 0
            for version, count in turn.versions:
                side.model.load_state_dict(old if version == first else new)
                expected = side.logprobs(prompt + turn.token_ids)[len(prompt) - 1 :]
                assert gap(turn.logprobs[start : start + count], expected[start : start + count]) < BOUND
                start += count
            switched += len(turn.versions) > 1
        side.model.load_state_dict(new)
        if switched:
            break
    assert switched, "no request was under way while weights changed: this test would prove nothing"


def test_damage_on_the_way_is_refused_and_named(side: Side) -> None:
    side.publish()
    before = side.logprobs(list(range(2, 30)))
    side.shake(7)
    manifest = side.manifest()
    name = manifest["entries"][3]["name"]
    manifest["entries"][3]["digest"] = "0" * 32
    with pytest.raises(RuntimeError, match="arrived damaged") as refused:
        side.engines.update(manifest, timeout_s=60)
    assert name in str(refused.value)
    tokens = list(range(2, 30))
    (still,) = side.engines.score(tokens, timeout_s=60)
    assert gap(still, before) < BOUND, "the weights held before a refused version are no longer there"
    side.publish()
    assert gap(side.engines.score(tokens, timeout_s=60)[0], side.logprobs(tokens)) < BOUND


def test_a_missing_weight_is_refused_and_named(side: Side) -> None:
    """Part of a fused weight; the engine is of no use afterwards, and the run ends: this test is the last."""
    manifest = side.manifest()
    left_out = next(entry for entry in manifest["entries"] if "q_proj.weight" in entry["name"])
    with pytest.raises(RuntimeError, match="qkv_proj"):
        side.engines.update(manifest | {"entries": [e for e in manifest["entries"] if e is not left_out]}, timeout_s=60)
