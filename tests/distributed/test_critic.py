"""The critic predicts and learns alike wherever it is: on the policy's ranks, on the same ranks
under another layout, on ranks of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.policy import joined, make_role
from support.ranks import run_ranks
from support.rollouts import dealt
from support.tiny import groups, write_model

from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh, all_ranks
from megarl.settings.objectives import AlgorithmConfig, GaeConfig
from megarl.settings.training import OptimizerConfig
from megarl.trainer.critic import Critic
from megarl.trainer.packing import pack_shared
from megarl.trainer.step_advantages import step_advantages
from megarl.trainer.transfer import BatchTransfer

# Policy's ranks and degrees (data, sequence, tensor), then the critic's, then the ZeRO stage.
PLACES = {
    "the policy's ranks": (range(4), (2, 2, 1), range(4), (2, 2, 1), 2),
    "other layout on the same ranks": (range(4), (4, 1, 1), range(4), (1, 2, 2), 1),
    "one rank of its own": (range(3), (3, 1, 1), [3], (1, 1, 1), 0),
    "ranks that alternate": ([0, 2], (1, 1, 2), [1, 3], (2, 1, 1), 1),
}
STEPS = 3


def batch_of(step: int, num_data_ranks: int, sequence: int, rank: int) -> Any:
    """Two mini-batches of ragged samples; another one for each step."""
    plan = dealt(
        groups(4, 3, seed=10 + step),
        step=step,
        num_data_ranks=num_data_ranks,
        num_mini_batches=2,
        micro_batch_tokens=40 * sequence,
    )
    return plan.share(rank)


Learnt = tuple[list[dict[str, float]], list[dict[int, list[float]]]]
"""Metrics and {sample: values} of some steps; the values are empty on ranks outside the policy."""


def learn_everywhere(folder: str, places: Any) -> list[Learnt]:
    """What a critic has learnt in each place, as the loop calls it."""
    with joined() as device:
        return [learn(folder, place, device) for place in places]


def learn(folder: str, place: Any, device: Any) -> Learnt:
    policy_ranks, policy_degrees, ranks, degrees, stage = place
    policy = ProcessMesh(Layout(*policy_degrees), ranks=policy_ranks)
    shared = (list(policy_ranks), policy_degrees) == (list(ranks), degrees)
    mesh = policy if shared else ProcessMesh(Layout(*degrees), ranks=ranks)
    role = None
    if mesh.is_member:
        common: Any = {"seed": 0, "head": "value", "steps": STEPS * 4, "zero_stage": stage}
        optimizer = OptimizerConfig(learning_rate=3e-3)
        role = make_role(
            folder, mesh, device, name="critic", epochs_per_step=2, optimizer=optimizer, **common
        )
    transfer = BatchTransfer(
        role,
        policy=policy,
        mesh=mesh,
        everyone=all_ranks(timeout_s=60),
        device=device,
        micro_batch_tokens=30,
    )
    critic = Critic(transfer, value_clip=0.2)
    algorithm = AlgorithmConfig(advantage="gae", gae=GaeConfig(gamma=0.9, value_lam=0.8))
    metrics, predicted = [], []
    for step in range(STEPS):
        batch, packed, returns = None, [], None
        if policy.is_member:
            layout = policy.layout
            batch = batch_of(step, layout.data, layout.sequence, policy.data.rank)
            packed = [
                [
                    pack_shared(
                        samples.select(row), device, policy.sequence, "auto", samples.places(row)
                    )
                    for row in rows
                ]
                for samples, rows in zip(batch.samples, batch.micro_batches, strict=True)
            ]
        values = critic.values(batch, packed)
        predicted.append({})
        if batch is not None:
            found = step_advantages(
                batch,
                {"values": values},
                algorithm,
                kl_coefficient=algorithm.kl.coefficient,
                data=policy.data,
                device=device,
            )
            returns = found["returns"] if step != 1 else None  # a batch that is not trained on
            for samples, column in zip(batch.samples, values, strict=True):
                for n, name in enumerate(samples.ids.tolist()):
                    part = column[samples.offsets[n] : samples.offsets[n + 1]]
                    predicted[-1][name] = part.tolist()
        critic.start(returns)
        critic.learn(step)
        metrics.append(critic.finish(step))
    if role is not None:
        role.destroy()
    for one in {policy, mesh}:
        one.destroy()
    return metrics, predicted


def test_a_critic_learns_alike_wherever_it_is(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "model", biases=True))
    alone = ([0], (1, 1, 1), [0], (1, 1, 1), 0)
    (((metrics, values),),) = run_ranks(1, __file__, "learn_everywhere", folder, [alone])
    assert not any(any(one) for one in values[0].values()), "a new critic predicts 0"
    assert metrics[0]["critic/grad_norm"] > 0 and metrics[2]["critic/grad_norm"] > 0
    assert metrics[1]["critic/grad_norm"] == 0.0, "without returns nothing is trained"
    assert max(abs(value) for one in values[2].values() for value in one) > 0.01, "it has learnt"
    assert metrics[0]["critic/loss"] > 0 and metrics[0]["critic/explained_variance"] == 0.0
    ranks = run_ranks(4, __file__, "learn_everywhere", folder, list(PLACES.values()))
    for number, (name, place) in enumerate(PLACES.items()):
        for rank, everywhere in enumerate(ranks):
            theirs, predicted = everywhere[number]
            for step in range(STEPS):
                assert theirs[step] == pytest.approx(metrics[step], abs=1e-5, rel=1e-5), name
                assert bool(predicted[step]) == (rank in place[0]), name
                for sample, found in predicted[step].items():
                    assert found == pytest.approx(values[step][sample], abs=1e-5), (name, step)
