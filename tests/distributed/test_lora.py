"""LoRA under parallel layouts: every layout trains the adapters as one rank does, and what is
published, exported and resumed is the model with its adapters.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import training_cases
from support.policy import joined, make_role, save_state
from support.ranks import run_ranks
from support.tiny import VOCABULARY, write_adapter
from support.training_cases import Case, assert_equal, write

from megarl.checkpoints.adapter_files import SCORE
from megarl.checkpoints.export import WeightExport
from megarl.checkpoints.rank_files import RankFiles
from megarl.parallel.collectives import barrier
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.reshard.owned import training_owned
from megarl.settings.schema import replace
from megarl.settings.training import LoraConfig, OptimizerConfig, SequenceConfig, TrainingConfig
from megarl.trainer.finite import StepGuard
from megarl.trainer.lora import A, B, is_adapter
from megarl.trainer.role import Role
from megarl.trainer.step import StepMetrics, optimizer_step
from megarl.types import Samples

LORA = LoraConfig(rank=3, alpha=6.0)
SOME = LoraConfig(rank=2, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))
PLACES = {
    "one rank": [((1, 1, 1), 1)],
    "two ranks": [((2, 1, 1), 1), ((1, 1, 2), 0), ((1, 2, 1), 3)],
    "four ranks": [((2, 1, 2), 3), ((1, 2, 2), 3)],
    "four ranks on one axis": [((1, 1, 4), 2), ((4, 1, 1), 3)],
}
"""Layouts and ZeRO stages. With tensor 4 neighbours share a KV head."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("model"))


def documents() -> Samples:
    """Four sequences of uneven lengths, trained on from the third token on."""
    draw = np.random.default_rng(5)
    parts = []
    for number, length in enumerate((9, 17, 5, 12)):
        tokens = draw.integers(1, VOCABULARY, length)
        parts.append(Samples.one(number, tokens, mask=np.arange(length) > 1))
    return Samples.concatenate(parts)


def adapter_at(folder: Path) -> LoraConfig:
    return replace(LORA, adapter=str(folder))


def cases(model: str, places: list[Any], lora: LoraConfig) -> list[Case]:
    return [
        {"layout": layout, "stage": stage, "model": model, "training": {"lora": lora}}
        for layout, stage in places
    ]


def run_all(model: str, places: list[Any], folder: str) -> tuple[list[Any], list[Any]]:
    """On every rank: for each case the results of training, and for each place those of
    `use_one`.
    """
    trained, used = [], []
    with joined() as device:
        for case in cases(model, places, LORA) + cases(model, places[:1], SOME):
            with ProcessMesh(Layout(*case["layout"]), timeout_s=60) as mesh:
                trained.append(training_cases.three_steps(case, mesh, device, SequenceConfig()))
        for number, (layout, stage) in enumerate(places):
            with ProcessMesh(Layout(*layout), timeout_s=60) as mesh:
                target = Path(folder) / f"{mesh.world.size}_{number}"
                used.append(use_one(model, mesh, device, stage, target))
        layout, stage = places[-1]
        with ProcessMesh(Layout(*layout), timeout_s=60) as mesh:  # the state of the first place
            role = make_role(model, mesh, device, seed=9, steps=4, zero_stage=stage, lora=LORA)
            role.engine.load(Path(folder) / f"{mesh.world.size}_0" / "state")
            used[0]["moved"] = role.logprobs(documents())
            role.destroy()
    return trained, used


def use_one(model: str, mesh: Any, device: Any, stage: int, folder: Path) -> dict[str, Any]:
    samples = documents()
    training = TrainingConfig(
        zero_stage=stage, lora=LORA, optimizer=OptimizerConfig(learning_rate=1e-2)
    )

    def role_of(lora: LoraConfig = LORA, **more: Any) -> Role:
        settings = replace(training, lora=lora)
        return make_role(model, mesh, device, seed=3, training=settings, **more)

    guarded: dict[int, StepGuard] = {}

    def learn(role: Role) -> None:
        mine = samples.select(range(mesh.data.rank, len(samples), mesh.data.size))
        micro = role.pack(mine, [list(range(len(mine)))])
        guard = guarded.setdefault(id(role), StepGuard(role, allowed=0))
        none = StepMetrics(role.device, ())
        optimizer_step(role, micro, lambda one: -role.engine(one, 1.0)[0].sum(), guard, none)

    frozen = role_of(name="reference")
    before = frozen.logprobs(samples)
    frozen.destroy()
    role = role_of(steps=4)
    at_start = role.logprobs(samples)
    learn(role)
    first, adapters = role.logprobs(samples), role.engine.whole_adapters()
    (folder / "model").mkdir(parents=True, exist_ok=True)
    if mesh.world.rank == 0:
        write_adapter(folder / "start", adapters, LORA, base=model, base_digest="")
    learn(role)
    trained = role.logprobs(samples)
    with role.adapters_off():
        off = role.logprobs(samples)
    adapters, module = role.engine.whole_adapters(), role.engine.module
    score = torch.linspace(-1, 1, module.model.config.hidden_size)[None]
    owned = training_owned(role.shapes, role.shards, mesh.layout, stage)
    barrier(mesh.world)
    export = WeightExport(owned, role.shapes, torch.float32)
    files = RankFiles(folder)
    export.write(folder / "model", role.engine.owned(), mesh.world, files)
    files.finish()
    if mesh.world.rank == 0:
        write_adapter(folder / "adapter", adapters, LORA, base=model, base_digest="")
        write_adapter(folder / "judge", adapters | {SCORE: score}, LORA, base=model, base_digest="")
        module.model.config.save_pretrained(folder / "model")
    save_state(role.engine, folder / "state")
    learn(role)
    third = role.logprobs(samples)
    role.destroy()
    start = adapter_at(folder / "start")
    frozen = role_of(start, name="reference")
    apart = frozen.logprobs(samples)
    frozen.destroy()
    again = role_of(start, steps=4)
    at_first = again.keep_adapters()
    again.engine.load(folder / "state")
    with at_first():
        reference = again.logprobs(samples)
    resumed = again.logprobs(samples)
    learn(again)
    with at_first():
        later = again.logprobs(samples)
    fourth = again.logprobs(samples)
    again.destroy()
    other = role_of(adapter_at(folder / "adapter"), steps=4)
    started = other.logprobs(samples)
    other.destroy()
    judge = role_of(adapter_at(folder / "judge"), name="reward model", steps=4, head="scalar")
    head = judge.engine.whole_adapters()[SCORE]
    judge.destroy()
    return {
        "same": {
            "a new adapter changes nothing": (before, at_start),
            "without adapters": (before, off),
            "a frozen role with an adapter": (first, apart),
            "the adapter of the start, after resuming": (first, reference),
            "the adapter of the start, after training": (first, later),
            "resumed": (trained, resumed),
            "trained on": (third, fourth),
            "started from the adapter's files": (trained, started),
            "score head of the adapter's files": (score, head.cpu()),
        },
        "learned": float((trained - before).abs().max()),
        "trained": trained,
        "folder": str(folder),
    }


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    """One rank's results: of both sets of adapters, and of `use_one`."""
    folder = str(tmp_path_factory.mktemp("alone"))
    return run_ranks(1, __file__, "run_all", model, PLACES["one rank"], folder)[0]


def test_adapters_are_used_exported_and_resumed(
    model: str, alone: tuple[list[Any], list[Any]]
) -> None:
    check_use(model, PLACES["one rank"][0], alone[1][0])


@pytest.mark.parametrize("name", [
    "four ranks",
    *(pytest.param(one, marks=pytest.mark.nightly) for one in ("two ranks", "four ranks on one axis")),
])  # fmt: skip
def test_every_layout_trains_adapters_as_one_rank(
    model: str, alone: tuple[list[Any], list[Any]], name: str, tmp_path: Path
) -> None:
    places = PLACES[name]
    size = math.prod(places[0][0])
    found = run_ranks(size, __file__, "run_all", model, places, str(tmp_path), timeout_s=600)
    both = cases(model, places, LORA) + cases(model, places[:1], SOME)
    oracle = [alone[0][0]] * len(places) + [alone[0][1]]
    assert_equal(
        [merged(one, case) for one, case in zip(oracle, both, strict=True)],
        both,
        [
            [merged(one, case) for one, case in zip(results[0], both, strict=True)]
            for results in found
        ],
    )
    for one, other in zip(oracle, found[0][0], strict=True):
        for name in filter(is_adapter, one[3]):
            # AdamW divides gradients of all sizes by their size, those that are only rounding, too.
            gap = (one[3][name] - other[3][name]).norm() / one[3][name].norm()
            assert gap < 1e-4, (name, gap)
    for results in found:
        for place, result in zip(places, results[1], strict=True):
            check_use(model, place, result)
            expected = alone[1][0]["trained"]
            torch.testing.assert_close(result["trained"], expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(results[1][0]["moved"], expected, rtol=0, atol=2e-5)


def merged(result: Any, case: Case) -> Any:
    """A result of training with the weights that its adapters make: W + alpha / rank B A. What is
    compared is then as large as where whole weights are trained.
    """
    lora, weights = case["training"]["lora"], result[3]
    whole = {name: weight for name, weight in weights.items() if not is_adapter(name)}
    for name in [name.removesuffix(A) for name in weights if name.endswith(A)]:
        change = weights[name + B] @ weights[name + A]
        whole[f"{name}.weight"] = whole[f"{name}.weight"] + lora.alpha / lora.rank * change
    return *result[:3], whole


def check_use(model: str, place: Any, result: dict[str, Any]) -> None:
    """The results of `use_one` agree with each other, and with PEFT and transformers."""
    for what, (one, other) in result["same"].items():
        assert torch.equal(one, other), (place, what, float((one - other).abs().max()))
    assert result["learned"] > 1e-2
    folder = Path(result["folder"])
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    merged_by_us = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for network in (merged_by_us, PeftModel.from_pretrained(base, str(folder / "adapter"))):
        own = sample_logprobs(network)
        torch.testing.assert_close(own, result["trained"], rtol=0, atol=2e-5)


@torch.no_grad()
def sample_logprobs(network: Any) -> torch.Tensor:
    """Log-probs of the trained tokens of `documents`, by a model of transformers or PEFT."""
    samples, found = documents(), []
    for begin, end in zip(samples.offsets[:-1], samples.offsets[1:], strict=True):
        tokens = torch.from_numpy(samples.token_ids[begin:end]).long()
        logits = network(input_ids=tokens[None]).logits[0]
        logprobs = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        found.append(logprobs[torch.from_numpy(samples.mask[begin:end])[1:]])
    return torch.cat(found)
