"""The matrix: every layout of 1, 2 and 4 ranks under every ZeRO stage trains exactly as one rank
does.

One launch a number of ranks: a start costs more than a case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

from support.ranks import run_ranks
from support.tiny import groups, write_model

STEPS = 3
RATE = 1e-3

Case = dict[str, Any]
"""layout, stage, and optionally model, sequence, training, algorithm, groups, prompts: see
`three_steps`.
"""


def layouts(size: int) -> list[tuple[int, int, int]]:
    """Every (data, sequence, tensor) of `size` ranks."""
    return [
        (data, sequence, size // (data * sequence))
        for data in range(1, size + 1)
        for sequence in range(1, size + 1)
        if size % (data * sequence) == 0
    ]


def run_cases(cases: list[Case]) -> list[Any]:
    """Per case: metrics, log-probs, entropies and weights. Runs on every rank."""
    import torch

    from megarl.parallel import mesh as mesh_module
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh
    from megarl.trainer.config import SequenceConfig

    torch.set_num_threads(1)
    device, found = mesh_module.initialise(timeout_s=60), []
    for case in cases:
        sequence = SequenceConfig(**case.get("sequence", {}))
        with ProcessMesh(Layout(*case["layout"]), ulysses=sequence.ulysses, timeout_s=60) as mesh:
            found.append(three_steps(case, mesh, device, sequence))
    mesh_module.finalise()
    return found


def three_steps(case: Case, mesh: Any, device: Any, sequence: Any) -> Any:
    """Three clipped optimizer steps of reinforcement learning on uneven packed documents."""
    from support.policy import Policy

    from megarl.objectives.config import AlgorithmConfig, KLConfig
    from megarl.rollout.batch import shares
    from megarl.trainer.config import ModelConfig, OptimizerConfig, TrainingConfig
    from megarl.types import Samples

    # Clipping makes a wrong scale of the gradient visible, which AdamW alone would hide.
    optimizer = OptimizerConfig(learning_rate=RATE, clip_norm=0.5, eps=1e-6)
    algorithm = {"kl": KLConfig(coefficient=0.05)} | case.get("algorithm", {})
    policy = Policy(
        model=ModelConfig(path=case["model"]),
        training=TrainingConfig(
            zero_stage=case["stage"],
            sequence=sequence,
            optimizer=optimizer,
            **case.get("training", {}),
        ),
        algorithm=AlgorithmConfig(**algorithm),
        temperature=0.8,
        mesh=mesh,
        device=device,
        total_steps=STEPS,
        seed=1,
    )
    reports, logprobs, entropies = [], [], []
    for step in range(STEPS):
        made = groups(*case.get("groups", (3, 3)), seed=step, prompts=case.get("prompts", (1, 7)))
        dealt = shares(
            step=step,
            drawn=made,
            accepted=made,
            seconds=1.0,
            num_data_ranks=mesh.data.size,
            num_mini_batches=case.get("num_mini_batches", 1),
            micro_batch_tokens=case.get("tokens", 70) * mesh.sequence.size,
            transcripts=0,
        )
        everything = Samples.concatenate(
            [part for share in dealt.per_rank for part in share.samples]
        )
        ours, theirs = policy.token_statistics(everything.select(everything.ids.argsort()))
        logprobs.append(ours.double())
        entropies.append(theirs.double())
        reports.append(policy.train(dealt.share(mesh.data.rank)).metrics)
    weights = {name: tensor.detach().double().clone() for name, tensor in policy.engine.weights()}
    policy.engine.destroy()
    return reports, logprobs, entropies, weights


def differences(one: Any, other: Any) -> dict[str, float]:
    """Largest relative differences. The policy loss cancels, so it is compared at the scale of its
    terms: 1.
    """
    scales = {
        "loss": 1.0,
        "grad_norm": 1e-3,
        "entropy": 1e-3,
        "mismatch/mean_abs": 1e-3,
        "tokens/trained": 1.0,
    }
    numbers = {
        name: max(
            abs(a[name] - b[name]) / max(abs(a[name]), scale)
            for a, b in zip(one[0], other[0], strict=True)
        )
        for name, scale in scales.items()
    }
    # About half the mean square of differences of log-probs of some 4 nats, with their rounding:
    # compared in nats.
    numbers["kl"] = max(
        abs((2 * a["kl"]) ** 0.5 - (2 * b["kl"]) ** 0.5)
        for a, b in zip(one[0], other[0], strict=True)
    )
    for name, number in (("logprobs", 1), ("entropies", 2)):
        numbers[name] = max(
            float((a - b).norm() / a.norm())
            for a, b in zip(one[number], other[number], strict=True)
        )
    weights, others = one[3], other[3]
    assert weights.keys() == others.keys()
    numbers["weights"] = max(
        float((weights[n] - others[n]).norm() / weights[n].norm()) for n in weights
    )
    return numbers


def assert_equal(oracle: list[Any], cases: list[Case], found: list[list[Any]]) -> None:
    """Every rank's result of every case is the oracle's, and that of every other rank to the last
    bit.
    """
    worst: dict[str, float] = {}
    for rank, results in enumerate(found):
        for case, expected, result in zip(cases, oracle, results, strict=True):
            numbers = differences(expected, result)
            assert max(numbers.values()) < 1e-5, (rank, case, numbers)
            worst = {name: max(value, worst.get(name, 0.0)) for name, value in numbers.items()}
    for results in found[1:]:
        for first, result in zip(found[0], results, strict=True):
            assert_bitwise(first, result)
    print(f"{len(found)} ranks, {len(cases)} cases, worst {worst}")


def assert_bitwise(one: Any, other: Any) -> None:
    """Not nearly: equal."""
    import torch

    timeless = [
        [{k: v for k, v in report.items() if not k.startswith("time/")} for report in found[0]]
        for found in (one, other)
    ]
    assert timeless[0] == timeless[1]
    assert all(
        torch.equal(a, b)
        for number in (1, 2)
        for a, b in zip(one[number], other[number], strict=True)
    )
    assert all(torch.equal(one[3][name], other[3][name]) for name in one[3])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four query heads, two key heads (fewer than four ranks), 41 words (which neither 2 nor 4
    divides).
    """
    return write(tmp_path_factory.mktemp("model"))


def write(folder: Path, **changes: Any) -> str:
    sizes = dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=41, biases=True
    )
    return str(write_model(folder, **sizes | changes))


@pytest.fixture(scope="module")
def alone(model: str) -> Any:
    return run_ranks(1, __file__, "run_cases", [{"layout": (1, 1, 1), "stage": 0, "model": model}])[
        0
    ][0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_matrix(model: str, alone: Any, size: int) -> None:
    cases = [
        {"layout": layout, "stage": stage, "model": model}
        for layout in layouts(size)
        for stage in range(4)
    ]
    again = [
        {"layout": layout, "stage": number % 4, "model": model}
        for number, layout in enumerate(layouts(size))
    ]
    found = run_ranks(size, __file__, "run_cases", cases + again, timeout_s=900)
    assert_equal([alone] * len(cases), cases, [results[: len(cases)] for results in found])
    for results in found:
        for case, repeated in zip(again, results[len(cases) :], strict=True):
            assert_bitwise(results[cases.index(case)], repeated)


def variants(folder: Path) -> list[Case]:
    """Models, schedules and settings, each under the layouts where it could go wrong; without
    `layout` for the oracle.
    """
    qwen3 = {"model": write(folder / "qwen3", kind="qwen3")}
    tied = {"model": write(folder / "tied", tied=True)}
    llama = {"model": write(folder / "llama", kind="llama", attention_bias=True, mlp_bias=True)}
    mistral = {"model": write(folder / "mistral", kind="mistral", head_dim=24)}
    wide = {"model": write(folder / "wide", num_attention_heads=8, num_key_value_heads=4)}
    recomputed = {"gradient_checkpointing": True}
    gspo = {"loss": "gspo", "aggregation": "sequence"}
    return [
        qwen3 | {"layout": (1, 1, 4), "stage": 3},
        qwen3 | {"layout": (1, 2, 2), "stage": 2, "training": recomputed},
        tied | {"layout": (2, 1, 2), "stage": 3, "training": recomputed},
        tied | {"layout": (1, 4, 1), "stage": 1, "algorithm": gspo},
        llama | {"layout": (1, 2, 2), "stage": 3, "algorithm": gspo},
        mistral | {"layout": (1, 2, 2), "stage": 0, "sequence": {"transport": "ring"}},
        wide | {"layout": (1, 4, 1), "stage": 3, "sequence": {"ulysses": 4}},
        wide
        | {"layout": (1, 4, 1), "stage": 2, "training": recomputed}
        | {"sequence": {"ulysses": 2, "cut": "zigzag", "transport": "ring"}},
        wide
        | {
            "layout": (1, 4, 1),
            "stage": 1,
            "sequence": {"transport": "all_gather", "cut": "zigzag_document"},
        },
        wide
        | {
            "layout": (1, 4, 1),
            "stage": 3,
            "sequence": {"transport": "all_gather", "ulysses": 2, "cut": "striped"},
        },
        wide | {"layout": (1, 2, 2), "stage": 1, "sequence": {"ulysses": 2, "cut": "contiguous"}},
        # More key heads wanted than there are: neighbours get copies of one.
        qwen3
        | {
            "layout": (1, 4, 1),
            "stage": 3,
            "sequence": {"ulysses": 4, "cut": "zigzag"},
            "algorithm": gspo,
        },
        # A prompt that fills the first ranks: they have no response tokens.
        tied
        | {
            "layout": (1, 4, 1),
            "stage": 3,
            "sequence": {"cut": "contiguous"},
            "groups": (1, 1),
            "prompts": (90, 95),
        }
        | {"algorithm": gspo | {"entropy_coefficient": 0.01}},
        # Fewer samples than data ranks: some have nothing at all.
        llama | {"layout": (4, 1, 1), "stage": 2, "groups": (1, 2)},
        llama
        | {
            "layout": (2, 2, 1),
            "stage": 3,
            "groups": (1, 1),
            "algorithm": {"entropy_coefficient": 0.01},
        },
    ]


def test_families_schedules_and_settings(tmp_path: Path) -> None:
    cases = variants(tmp_path)
    oracle = run_ranks(
        1,
        __file__,
        "run_cases",
        [case | {"layout": (1, 1, 1), "stage": 0, "sequence": {}} for case in cases],
    )
    found = run_ranks(4, __file__, "run_cases", cases, timeout_s=900)
    assert_equal(oracle[0], cases, found)
