"""Router replay with real vLLM engines: what they record is what the model chooses, and with it the
trainer's log-probs are theirs, also where routers decide otherwise.

Engines and trainer read the same checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from support import own_engines
from support.engine_side import BOUND, engines_in
from support.mixtures import write_mixture
from support.policy import Policy, on_mesh, whole_weights
from support.rollouts import dealt
from transformers import AutoModelForCausalLM

from megarl.engines.remote import GenerateRequest, reported_tokens
from megarl.rollout.batch_files import batch_file, read_batch, write_batch
from megarl.rollout.ray_cluster import Cluster
from megarl.settings.objectives import AlgorithmConfig
from megarl.settings.rollout import EngineConfig
from megarl.settings.training import ModelConfig, OptimizerConfig, TrainingConfig
from megarl.system.process_env import own_cluster_token, prepare_environment
from megarl.types import Group, Prompt, Rollout, Samples, Segment, StepBatch, Verdict

PROMPT = [2 + n * n % 17 for n in range(70)]
SIZES: dict[str, Any] = dict(head_dim=32, num_experts_per_tok=3, num_hidden_layers=3)


@contextmanager
def engine(folder: str, config: EngineConfig) -> Iterator[Any]:
    """The Ray actor of a recording engine."""
    prepare_environment(1)
    more = {"load": True, "records_experts": True}
    with Cluster(namespace=f"test-{os.getpid()}", token=own_cluster_token()) as cluster:
        group = engines_in(cluster, Path(folder), config, 240, **more)
        group.wait()
        yield group.handles[0]


def ask(handle: Any, prompt: list[int], earlier: list[Segment], seed: int, **asked: Any) -> Any:
    """A reference to the answer to a request as the rollout service sends it."""
    settings: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0} | asked
    return handle.serve.remote(
        GenerateRequest(
            np.array(prompt, np.int32),
            [segment.arrays.token_ids for segment in earlier],
            seed,
            reported=reported_tokens(len(prompt), earlier),
            **settings,
        )
    )


def batch_of(turns: list[Segment], prompt: list[int] = PROMPT) -> StepBatch:
    """A step with one group, of single answers to `prompt`."""
    return rollouts_of([[turn] for turn in turns], prompt)


def rollouts_of(rollouts: list[list[Segment]], prompt: list[int] = PROMPT) -> StepBatch:
    made = [
        Rollout(n, n, segments, Verdict(float(n % 2), True), 0)
        for n, segments in enumerate(rollouts)
    ]
    settings: Any = {"micro_batch_tokens": 300}
    return dealt([Group(0, Prompt(0, "", prompt, ""), made)], **settings).share(0)


def chosen_by(model: Any, samples: Samples) -> np.ndarray:
    """[T, layers, K] by transformers' own router, ascending for each token."""
    rows = []
    with torch.no_grad():
        for ids in np.split(samples.token_ids, samples.offsets[1:-1]):
            output = model(torch.from_numpy(ids).long()[None], output_router_logits=True)
            rows.append(torch.stack([one.topk(3, -1).indices for one in output.router_logits], 1))
    return torch.cat(rows).sort(-1).values.numpy()


def recorded(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    """(the engine's record, ascending for each token; [T] where it has one)."""
    assert samples.experts is not None
    return np.sort(samples.experts.astype(int), -1), samples.experts[:, 0, 0] != 255


def assert_only_last_tokens_are_missing(samples: Samples, is_told: np.ndarray) -> None:
    assert np.array_equal(np.flatnonzero(~is_told), samples.offsets[1:] - 1)


def test_an_engine_records_what_the_model_chooses(tmp_path: Path) -> None:
    """For a group whose prompt is in the prefix cache, other requests at the same time, and two
    turns, of which the second answer tells only of new tokens.
    """
    folder = write_mixture(tmp_path / "model", **SIZES)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with engine(folder, EngineConfig()) as handle:
        first = ray.get([ask(handle, PROMPT, [], seed) for seed in range(6)], timeout=200)
        pulse = ray.get(handle.pulse.remote(), timeout=60)
        observed = Segment("environment", 5, first[0].arrays._replace(
            token_ids=np.arange(3, 8, dtype=np.int32), logprobs=np.zeros(5, np.float32),
            experts=None))  # fmt: skip
        asked = [ask(handle, PROMPT, [turn, observed], 50 + n) for n, turn in enumerate(first)]
        others = [ask(handle, PROMPT[:n], [], n) for n in (1, 31, 32, 33, 65)]
        second, other = ray.get(asked, timeout=200), ray.get(others, timeout=200)
    assert pulse.cached_tokens >= 5 * 64, (
        "no prompt was in the cache: this test would prove nothing"
    )
    batches = [
        rollouts_of([[one, observed, two] for one, two in zip(first, second, strict=True)]),
        *(batch_of([turn], PROMPT[:n]) for n, turn in zip((1, 31, 32, 33, 65), other, strict=True)),
    ]
    for one, two in zip(first, second, strict=True):
        assert len(one.arrays.experts) == 70 + one.num_tokens
        assert len(two.arrays.experts) == 1 + 5 + two.num_tokens
    for batch in batches:
        (samples,) = batch.samples
        experts, is_told = recorded(samples)
        assert_only_last_tokens_are_missing(samples, is_told)
        assert np.array_equal(experts[is_told], chosen_by(model, samples)[is_told])
        shifted = np.roll(experts, 1, axis=0)
        assert (shifted != chosen_by(model, samples))[is_told].any(-1).mean() > 0.5


def test_prompts_in_parts_and_requests_that_are_computed_again_are_recorded(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path / "model", **SIZES)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [[2 + (n * n + m) % 19 for n in range(52 + m)] for m in range(20)]
    with engine(folder, EngineConfig(kind=f"{own_engines.FILE}:Crowded")) as handle:
        asked = [ask(handle, prompt, [], 0, temperature=0.0) for prompt in prompts]
        turns = ray.get(asked, timeout=300)
        preemptions = ray.get(handle.pulse.remote(), timeout=60).preemptions
    assert preemptions > 0, "the cache was never full: this test would prove nothing"
    for prompt, turn in zip(prompts, turns, strict=True):
        (samples,) = batch_of([turn], prompt).samples
        experts, is_told = recorded(samples)
        assert_only_last_tokens_are_missing(samples, is_told)
        assert np.array_equal(experts[is_told], chosen_by(model, samples)[is_told])


TIE = 1e-6
"""Relative difference of two experts' rows in a router."""


def plant_ties(folder: str) -> None:
    """Make experts 2n and 2n + 1 almost equal to the router, though not to the model: of three
    experts a token has one by a hair.
    """
    (path,) = Path(folder).glob("*.safetensors")
    weights, draw = load_file(path), torch.Generator().manual_seed(0)
    for name, router in weights.items():
        if name.endswith("mlp.gate.weight"):
            router[1::2] = router[::2] * (1 + TIE * torch.randn(router[::2].shape, generator=draw))
    save_file(weights, path, metadata={"format": "pt"})


def policy(folder: str, mesh: Any, device: Any, replay: Any, **training: Any) -> Policy:
    return Policy(
        model=ModelConfig(path=folder),
        training=TrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-3), **training),
        algorithm=AlgorithmConfig(router_replay=replay),
        temperature=1.0,
        mesh=mesh,
        device=device,
        total_steps=1,
        seed=1,
    )


def move_routers(role: Any) -> None:
    """As an optimizer step with learning rate 1e-6 moves their weights."""
    draw = torch.Generator().manual_seed(1)
    for name, weight in role.engine.module.model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            with torch.no_grad():
                weight.add_(1e-6 * torch.randn(weight.shape, generator=draw).sign())


@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_with_replay_the_trainers_logprobs_are_the_engines_though_routers_differ(
    tmp_path: Path, tensor: int
) -> None:
    """And a recorded step, trained again from its file, gives equal bits, with gradient
    checkpointing too.
    """
    folder = write_mixture(tmp_path / "model", **SIZES)
    plant_ties(folder)
    with engine(folder, EngineConfig(tensor=tensor)) as handle:
        turns = ray.get([ask(handle, PROMPT, [], seed) for seed in range(8)], timeout=300)
    batch = batch_of(turns)
    (samples,) = batch.samples
    wanted = torch.from_numpy(samples.engine_logprobs[samples.mask])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    experts, is_told = recorded(samples)
    # No expert of an earlier layer has decided anything.
    first, same_first = (
        np.sort(rows[:, 0] // 2, -1) for rows in (experts, chosen_by(model, samples))
    )
    assert np.array_equal(first[is_told], same_first[is_told])

    file = batch_file(tmp_path, 0, 0)
    write_batch(file, batch, 1)
    weights = {}
    with on_mesh() as (mesh, device):
        role = policy(folder, mesh, device, "rollout")
        move_routers(role)
        routers = role.engine.module.routers
        gap = (role.logprobs(samples) - wanted).abs().max().item()
        routers.used = []
        freely = role.logprobs(replace(samples, experts=None))
        own, routers.used = torch.stack(routers.used, 1).sort(-1).values.numpy(), None
        others = (own != experts).any(-1)[is_told].mean()
        without = (freely - wanted).abs().max().item()
        print(f"largest gap of log-probs {gap:.1e} with replay, {without:.1e} without;")
        print(f"without it {others:.0%} of all choices of three experts are others")
        role.engine.destroy()
        assert gap < BOUND
        assert others > 0.05 and without > 100 * BOUND

        for name, replay, again in (
            ("run", "rollout", batch),
            ("replay", "rollout", read_batch(file)[0]),
            ("checkpointing", "rollout", batch),
            ("off", "off", batch),
        ):
            checkpoints = name == "checkpointing"
            role = policy(folder, mesh, device, replay, gradient_checkpointing=checkpoints)
            report = role.train(again).metrics
            weights[name] = whole_weights(role.engine)
            told = "router_replay/unreported" in report
            assert told == (replay == "rollout") and not report.get("router_replay/unreported")
            assert (report["mismatch/max_abs"] < BOUND) or replay == "off"
            role.engine.destroy()
    same = {
        name: all(torch.equal(one, found[key]) for key, one in weights["run"].items())
        for name, found in weights.items()
    }
    assert same == {"run": True, "replay": True, "checkpointing": True, "off": False}
