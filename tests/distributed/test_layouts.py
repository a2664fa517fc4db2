"""The matrix: every layout of 1, 2 and 4 ranks under every ZeRO stage trains exactly as one rank does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from ranks import run_ranks
from tiny import groups, write_model

STEPS = 3
RATE = 1e-3


def layouts(size: int) -> list[tuple[int, int, int]]:
    """Every (data, sequence, tensor) of `size` ranks."""
    return [
        (data, sequence, size // (data * sequence))
        for data in range(1, size + 1)
        for sequence in range(1, size + 1)
        if size % (data * sequence) == 0
    ]


def three_steps(model: str, cases: list[tuple[Any, ...]], algorithm: dict[str, Any]) -> list[Any]:
    """Per case (layout, ZeRO stage, sequence settings, training settings): metrics, log-probs, entropies, weights. On every rank."""
    import torch

    from megarl.parallel import mesh as mesh_module
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh
    from megarl.training.config import SequenceConfig

    torch.set_num_threads(1)
    device, found = mesh_module.initialise(timeout_s=60), []
    for layout, stage, sequence, settings in cases:
        config = SequenceConfig(**sequence)
        with ProcessMesh(Layout(*layout), ulysses=config.ulysses, timeout_s=60) as mesh:
            found.append(train(model, mesh, device, stage, config, settings, algorithm))
    mesh_module.finalise()
    return found


def train(
    model: str, mesh: Any, device: Any, stage: int, sequence: Any, settings: dict[str, Any], algorithm: dict[str, Any]
) -> Any:
    """Three clipped optimizer steps of reinforcement learning on uneven packed documents."""
    from megarl.algorithms.config import AlgorithmConfig, KLConfig
    from megarl.rollout.batch import shares
    from megarl.training.config import ModelConfig, OptimizerConfig, TrainingConfig
    from megarl.training.policy import Policy

    policy = Policy(
        model=ModelConfig(path=model),
        training=TrainingConfig(
            zero_stage=stage,
            sequence=sequence,
            optimizer=OptimizerConfig(learning_rate=RATE, clip_norm=0.5, eps=1e-6),
            **settings,
        ),
        algorithm=AlgorithmConfig(kl=KLConfig(coefficient=0.05), **algorithm),
        temperature=0.8,
        mesh=mesh,
        device=device,
        total_steps=STEPS,
        seed=1,
    )
    reports, logprobs, entropies = [], [], []
    for step in range(STEPS):
        made = groups(3, 3, seed=step)
        dealt = shares(
            step=step,
            drawn=made,
            accepted=made,
            seconds=1.0,
            num_data_ranks=mesh.data.size,
            mini_batches=1,
            micro_batch_tokens=70 * mesh.sequence.size,
            transcripts=0,
        )
        everything = [sample for part in dealt.per_rank for samples in part.samples for sample in samples]
        everything.sort(key=lambda sample: sample.row)
        ours, theirs = policy.token_statistics(everything)
        logprobs.append(ours.double())
        entropies.append(theirs.double())
        reports.append(policy.train(dealt.share(mesh.data.rank)).metrics)
    weights = {name: tensor.detach().double().clone() for name, tensor in policy.weights()}
    policy.engine.destroy()
    return reports, logprobs, entropies, weights


def differences(one: Any, other: Any) -> dict[str, float]:
    """Largest relative differences. The policy loss cancels, so it is compared at the scale of its terms: 1."""
    scales = {"loss": 1.0, "grad_norm": 1e-3, "entropy": 1e-3, "kl": 1e-3, "mismatch/mean_abs": 1e-3, "tokens/trained": 1.0}
    numbers = {
        name: max(abs(a[name] - b[name]) / max(abs(a[name]), scale) for a, b in zip(one[0], other[0], strict=True))
        for name, scale in scales.items()
    }
    for name, number in (("logprobs", 1), ("entropies", 2)):
        numbers[name] = max(float((a - b).norm() / a.norm()) for a, b in zip(one[number], other[number], strict=True))
    weights, others = one[3], other[3]
    assert weights.keys() == others.keys()
    numbers["weights"] = max(float((weights[n] - others[n]).norm() / weights[n].norm()) for n in weights)
    return numbers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four query heads, two key heads (fewer than four ranks), 41 words (which neither 2 nor 4 divides)."""
    folder = tmp_path_factory.mktemp("model")
    return str(write_model(folder, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=41, biases=True))


@pytest.fixture(scope="module")
def alone(model: str) -> Any:
    return run_ranks(1, __file__, "three_steps", model, [((1, 1, 1), 0, {}, {})], {})[0][0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_matrix(model: str, alone: Any, size: int) -> None:
    cases = [(layout, stage, {}, {}) for layout in layouts(size) for stage in range(4)]
    found = run_ranks(size, __file__, "three_steps", model, cases, {}, timeout_s=600)
    worst: dict[str, float] = {}
    for rank, results in enumerate(found):
        for case, result in zip(cases, results, strict=True):
            numbers = differences(alone, result)
            assert max(numbers.values()) < 1e-5, (rank, case, numbers)
            worst = {name: max(value, worst.get(name, 0.0)) for name, value in numbers.items()}
    print(f"{size} ranks, {len(cases)} cases, worst: {worst}")
