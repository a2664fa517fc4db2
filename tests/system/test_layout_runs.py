"""Whole runs under a layout: ranks that share samples and tokens learn what one rank learns, and so
do roles on ranks of their own; their checkpoints resume.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.commands import PROBE_BOUND, megarl, records, tiny_run, write_recipe, write_rows
from support.documented import block, undocumented
from support.tiny import random_adapter, write_classifier, write_model

from megarl.checkpoints.adapter_files import CONFIG, TENSORS
from megarl.kernels.linear import ONEDNN
from megarl.settings.training import LoraConfig

LAYOUT = {"layout": {"data": 1, "sequence": 2, "tensor": 2}, "zero_stage": 3}
CLOSE = {
    "loss": 1e-4,
    "grad_norm": 1e-4,
    "entropy": 1e-4,
    "kl": 1e-5,
    "kl_coefficient": 1e-6,
    "reward/mean": 1e-5,
    "reward_model/judge/mean": 1e-5,
    "length/mean": 1e-6,
    "critic/loss": 1e-4,
    "critic/explained_variance": 1e-4,
}
PPO = {
    "algorithm": {
        "preset": "ppo",
        # A target far below what is measured: the coefficient grows by 2 % in each step.
        "kl": {"coefficient": 0.05, "where": "reward", "target": 1e-6},
    },
    "critic": {"optimizer": {"learning_rate": 1e-3}, "warmup_steps": 1},
}
BESIDE = {
    "reference": {"ranks": [1], "zero_stage": 3},
    "critic": {"ranks": [2], "zero_stage": 1},
    "judge": {"ranks": [3]},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    write_model(folder / "model", num_attention_heads=2, num_key_value_heads=1, tied=True)
    write_classifier(folder / "judge", seed=1)
    return folder


def run(
    place: Path,
    name: str,
    ranks: int,
    *arguments: str,
    roles: dict[str, Any] | None = None,
    tree: dict[str, Any] | None = None,
    launched: bool = False,
    **training: Any,
) -> list[dict[str, Any]]:
    """Metrics of three steps of PPO with a KL penalty and a reward model, the first of which trains
    the critic alone; the recipe is the same but for the places of `roles`, the sections of `tree`,
    which then has its own critics, and `training`. The ranks are started by torchrun, or if
    `launched` by `megarl run`.
    """
    own = tree
    tree = tiny_run(place, place / "model", 3) | {"folder": str(place / name), "evaluation": {}}
    tree |= PPO
    judge: dict[str, Any] = {"model": {"path": str(place / "judge")}, "weight": 0.5}
    named = {"reference": {}, "critic": dict(tree["critic"]), "judge": judge}
    for role, settings in (roles or {}).items():
        named[role] |= settings
    tree |= {name: named[name] for name in ("reference", "critic")}
    tree |= {"reward_models": {"judge": named["judge"]}}
    if own is not None:
        del tree["critic"]
        tree |= own
    # At a rate of 1e-2 four steps amplify rounding to 5e-5 of a KL of 11 nats.
    steps = {"epochs_per_step": 2, "optimizer": {"learning_rate": 1e-3}}
    tree["training"] = tree["training"] | steps | training
    recipe = write_recipe(place / f"{name}.yaml", tree)
    if launched:
        done = megarl("run", recipe, "--cpu", *arguments)
        assert done.code == 0, done.err[-4000:]
        for number, role in enumerate(named):  # the plan has an entry for each, with its rank
            entry = rf"^  (reward_models\.)?{role}:\n(    .*\n)+?    ranks: '{number + 1}'\n"
            assert re.search(entry, done.err, re.M)
    else:
        done = megarl("run", recipe, *arguments, ranks=ranks)
    assert done.code == 0, done.err[-4000:]
    return records(place / name / "metrics.jsonl")


@pytest.fixture(scope="module")
def alone(place: Path) -> list[dict[str, Any]]:
    """All roles on one rank."""
    found = run(place, "alone", 1)
    assert all(row["reward_model/judge/std"] > 0.01 for row in found)
    assert not undocumented([name for row in found for name in row])
    return found


def assert_alike(alone: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    """Every step's metrics are those of one rank."""
    for one, other in zip(alone, found, strict=True):
        assert other["probe/max_abs"] < PROBE_BOUND
        assert other.get("mismatch/max_abs", 0.0) < PROBE_BOUND
        assert other["tokens/trained"] == one["tokens/trained"]
        for name, bound in CLOSE.items():
            if name not in one:
                assert one["step"] == 1 and name not in other  # the policy has not learnt yet
                continue
            assert abs(one[name] - other[name]) <= bound * max(1.0, abs(one[name])), (
                name,
                one["step"],
            )


def assert_resumes(
    place: Path, name: str, ranks: int, *, coefficient: float = 0.05 * 1.02, **settings: Any
) -> None:
    """With a damaged last checkpoint, a run goes back one and comes out bit by bit the same."""
    before = records(place / name / "metrics.jsonl")
    newest = place / name / "checkpoints" / "step_000003" / "run.json"
    newest.write_text(newest.read_text() + " ")
    again = run(place, name, ranks, "--resume", "True", **settings)
    assert [row["step"] for row in again] == [1, 2, 3]
    compared = [key for key in before[2] if key in CLOSE or key.startswith("critics.")]
    assert {key: again[2][key] for key in compared} == {key: before[2][key] for key in compared}
    assert again[2]["kl_coefficient"] == pytest.approx(coefficient)


def test_four_ranks_learn_what_one_does_and_resume(
    alone: list[dict[str, Any]], place: Path
) -> None:
    """Tied embeddings, one key head for two ranks, ZeRO 3: published whole to a real engine after
    every step.
    """
    assert_alike(alone, run(place, "together", 4, **LAYOUT))
    assert_resumes(place, "together", 4, **LAYOUT)


@pytest.fixture(scope="module")
def beside(place: Path) -> list[dict[str, Any]]:
    """Each role on a rank of its own, which `megarl run` gives it."""
    return run(place, "beside", 4, roles=BESIDE, launched=True, layout={"data": 1})


def test_roles_on_ranks_of_their_own_learn_what_one_rank_does(
    alone: list[dict[str, Any]], beside: list[dict[str, Any]]
) -> None:
    assert_alike(alone, beside)


@pytest.mark.nightly
@pytest.mark.usefixtures("beside")
def test_roles_on_ranks_of_their_own_resume(place: Path) -> None:
    """Under torchrun."""
    assert_resumes(place, "beside", 4, roles=BESIDE, layout={"data": 1})


@pytest.mark.nightly
def test_two_critics_whose_smaller_value_counts_learn_what_one_does(
    alone: list[dict[str, Any]], place: Path
) -> None:
    """The advantage of docs/howto/ppo.md, with two equal critics, one of them on a rank
    of its own: the smaller value is the only one. The checkpoint holds both.
    """
    (place / "twins.py").write_text(block("python second_critic"))
    algorithm = PPO["algorithm"] | {"advantage": "twins.py:smaller", "loss": "ppo_clip"}
    algorithm |= {"aggregation": "token", "clip_low": 0.2, "clip_high": 0.2}
    tree = {
        "algorithm": {key: value for key, value in algorithm.items() if key != "preset"},
        "critics": {"first": PPO["critic"], "second": PPO["critic"] | {"ranks": [1]}},
    }
    rows = run(place, "twins", 2, tree=tree)
    for name in ("first", "second"):
        renamed = [
            {key.replace(f"critics.{name}/", "critic/"): value for key, value in row.items()}
            for row in rows
        ]
        assert_alike(alone, renamed)
    assert_resumes(place, "twins", 2, tree=tree)


@pytest.mark.nightly
def test_one_role_apart_and_one_shared(alone: list[dict[str, Any]], place: Path) -> None:
    roles = {"critic": BESIDE["critic"] | {"ranks": [1]}}
    assert_alike(alone, run(place, "mixed", 2, roles=roles))


def test_remax_compares_with_greedy_responses_that_a_reward_model_scores(place: Path) -> None:
    """One sample for each prompt, and a greedy response that is not trained on; the reward model is
    on a rank of its own.
    """
    tree = tiny_run(place, place / "model", 2) | {"folder": str(place / "remax"), "evaluation": {}}
    tree["rollout"]["group_size"] = 1
    judge = {"model": {"path": str(place / "judge")}, "weight": 0.5, "ranks": [1]}
    tree |= {"algorithm": "remax", "reward_models": {"judge": judge}}
    done = megarl("run", write_recipe(place / "remax.yaml", tree), ranks=2)
    assert done.code == 0, done.err[-4000:]
    for row in records(place / "remax" / "metrics.jsonl"):
        trained = row["tokens/trained"]
        assert (
            trained == pytest.approx(4 * row["length/mean"]) and trained < row["tokens/generated"]
        )
        assert row["reward/mean"] != row["reward/greedy_mean"] and row["grad_norm"] > 1e-3
        assert row["mismatch/max_abs"] < PROBE_BOUND


@pytest.mark.nightly
def test_supervised_training_under_a_layout(place: Path) -> None:
    rows = [{"prompt": f"{a}+{b}=", "response": f"{a + b}"} for a in range(6) for b in range(6)]
    source = write_rows(place / "demonstrations.jsonl", rows)
    found = {}
    cases: dict[str, tuple[int, dict[str, Any]]] = {
        "alone": (1, {}),
        "together": (4, {"layout": {"data": 1, "sequence": 4}, "zero_stage": 2}),
    }
    if ONEDNN is not None:  # bfloat16x2 is refused on a processor without AVX-512
        cases["in_parts"] = (1, {"precision": "bfloat16x2"})
    for name, (ranks, training) in cases.items():
        tree = {
            "folder": str(place / f"sft_{name}"),
            "steps": 3,
            "samples_per_step": 7,
            "model": {"path": str(place / "model")},
            "demonstrations": {"source": source},
            "training": {"micro_batch_tokens": 16, "optimizer": {"learning_rate": 1e-3}} | training,
        }
        done = megarl("run", write_recipe(place / f"sft_{name}.yaml", tree), ranks=ranks)
        assert done.code == 0, done.err[-4000:]
        found[name] = records(place / f"sft_{name}" / "metrics.jsonl")
    for one, other in zip(found["alone"], found["in_parts"], strict=True) if ONEDNN else ():
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)
        # Gradients are products of bfloat16 numbers.
        assert 1e-6 < abs(one["grad_norm"] / other["grad_norm"] - 1) < 1e-2
    for one, other in zip(found["alone"], found["together"], strict=True):
        assert abs(one["loss"] - other["loss"]) < 1e-5 * one["loss"]
        assert abs(one["grad_norm"] - other["grad_norm"]) < 1e-4 * one["grad_norm"]
        # Longer packed sequences share as much of the same tokens, or more.
        computed, saved = (
            [row[f"tokens/{name}"] for row in (one, other)] for name in ("computed", "shared_saved")
        )
        assert computed[0] + saved[0] == computed[1] + saved[1] and 0 < saved[0] <= saved[1]


@pytest.fixture(scope="module")
def lora(place: Path) -> dict[str, Any]:
    """Settings of adapters that start from one in files."""
    config = LoraConfig(rank=4, alpha=16.0)
    started = random_adapter(place / "start", str(place / "model"), config)
    return started.model_dump() | {"targets": []}


ONCE = {"epochs_per_step": 1, "num_mini_batches": 1}
"""All of a step's KL is before its update."""
APART: dict[str, Any] = {"layout": {"tensor": 2}, "zero_stage": 3} | ONCE


@pytest.fixture(scope="module")
def apart(place: Path, lora: dict[str, Any]) -> list[dict[str, Any]]:
    """Adapters under tensor and ZeRO 3, which are published alone and applied by vLLM."""
    return run(place, "apart", 2, lora=lora | {"publish": "adapter"}, **APART)


def test_adapters_are_published_alone_and_learn_as_merged_ones_do(
    place: Path, lora: dict[str, Any], apart: list[dict[str, Any]]
) -> None:
    """The others on one rank, merged into the weights that are sent. The reference is the model
    with the adapter that the run starts from.
    """
    merged = run(place, "merged", 1, lora=lora, **ONCE)
    assert_alike(merged, apart)
    assert merged[-1]["kl"] > 1e-4
    for found in (merged, apart):  # the policy's first step
        assert found[1]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert apart[-1]["publish/bytes"] < 0.5 * merged[-1]["publish/bytes"]
    for name in ("merged", "apart"):
        saved = place / name / "checkpoints" / "step_000003"
        assert {path.name for path in (saved / "adapter").iterdir()} == {CONFIG, TENSORS}
        # The frozen weights are not written a second time.
        frozen = (saved / "model" / "model.safetensors").stat().st_size
        state = sum(path.stat().st_size for path in (saved / "state").iterdir())
        assert state < frozen


@pytest.mark.nightly
@pytest.mark.usefixtures("apart")
def test_adapters_resume(place: Path, lora: dict[str, Any]) -> None:
    """A KL of 0 is below the target, and the coefficient shrinks once."""
    more = lora | {"publish": "adapter"}
    assert_resumes(place, "apart", 2, coefficient=0.05 * 0.98, lora=more, **APART)
