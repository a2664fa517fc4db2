"""Two gloo ranks against one, under every ZeRO stage: the same loss, gradient norm and weights."""

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
# Without clipping a wrong scale of the gradient would hide behind AdamW; with it, it changes the update.
CASES = {
    "dapo": dict(mini_batches=2, micro_batch_tokens=60, clip_norm=0.5, algorithm={}),
    "sequence-mean, KL, entropy": dict(
        mini_batches=1,
        micro_batch_tokens=200,
        clip_norm=0.0,
        algorithm=dict(aggregation="sequence", entropy_coefficient=0.01, advantage="rloo"),
    ),
}


def three_steps(model: str, stages: list[int], case: str, num_groups: int, precision: str = "float32") -> dict[int, Any]:
    """Per ZeRO stage: metrics of three steps and the weights after them. Runs on every rank."""
    import torch

    from megarl.algorithms.config import AlgorithmConfig, KLConfig
    from megarl.parallel import mesh as mesh_module
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh
    from megarl.rollout.batch import shares
    from megarl.training.config import ModelConfig, OptimizerConfig, TrainingConfig
    from megarl.training.policy import Policy

    torch.set_num_threads(1)
    settings, found = CASES[case], {}
    kl = KLConfig(coefficient=0.05) if "KL" in case else KLConfig()
    device = mesh_module.initialise(timeout_s=60)
    with ProcessMesh(Layout(data=mesh_module.num_ranks()), timeout_s=60) as mesh:
        for stage in stages:
            policy = Policy(
                model=ModelConfig(path=model),
                training=TrainingConfig(
                    zero_stage=stage,
                    precision=precision,
                    optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=settings["clip_norm"], eps=1e-6),
                ),
                algorithm=AlgorithmConfig(kl=kl, **settings["algorithm"]),
                temperature=0.8,
                mesh=mesh,
                device=device,
                total_steps=STEPS,
                seed=1,
            )
            reports = []
            for step in range(STEPS):
                made = groups(num_groups, 3, seed=step)
                dealt = shares(
                    step=step,
                    drawn=made,
                    accepted=made,
                    seconds=1.0,
                    num_data_ranks=mesh.data.size,
                    mini_batches=settings["mini_batches"],
                    micro_batch_tokens=settings["micro_batch_tokens"],
                    transcripts=0,
                )
                reports.append(policy.train(dealt.share(mesh.data.rank)).metrics)
            weights = {name: tensor.detach().double().clone() for name, tensor in policy.weights()}
            found[stage] = (reports, weights)
            policy.engine.destroy()
    mesh_module.finalise()
    return found


def differences(one: Any, other: Any) -> dict[str, float]:
    """Largest relative difference of loss, gradient norm and weights.

    The true gradient of a key bias is zero (softmax does not see a shift of all scores), so AdamW moves it by normalised
    rounding noise: it is held to a thousandth of one learning-rate step instead.
    """
    numbers = {
        name: max(abs(a[name] - b[name]) / max(abs(a[name]), 1e-3) for a, b in zip(one[0], other[0], strict=True))
        for name in ("loss", "grad_norm", "entropy", "mismatch/mean_abs", "tokens/trained")
    }
    assert one[1].keys() == other[1].keys()
    noise = {name for name in one[1] if name.endswith("k_proj.bias")}
    numbers["weights"] = max(float((one[1][n] - other[1][n]).norm() / one[1][n].norm()) for n in one[1].keys() - noise)
    assert max(float((one[1][n] - other[1][n]).abs().max()) for n in noise) < 1e-6
    return numbers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_under_every_zero_stage(model: str, case: str) -> None:
    alone = run_ranks(1, __file__, "three_steps", model, [0], case, 4)[0][0]
    together = run_ranks(2, __file__, "three_steps", model, [0, 1, 2, 3], case, 4)
    for stage in range(4):
        for rank in range(2):
            found = differences(alone, together[rank][stage])
            assert max(found.values()) < 1e-5, (stage, rank, found)


def test_a_rank_without_samples_takes_part(model: str) -> None:
    """One group of one rollout for two ranks: the rank that gets nothing must not stop the other, nor change the result."""
    alone = run_ranks(1, __file__, "three_steps", model, [3], "dapo", 1)[0][3]
    together = run_ranks(4, __file__, "three_steps", model, [3], "dapo", 1)
    for rank in range(4):
        assert max(differences(alone, together[rank][3]).values()) < 1e-5
