"""Roles on meshes of given ranks: a role beside the policy scores as one rank does, wherever it is,
and every head trains under every axis as on one rank.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.policy import joined, make_role, on_mesh, save_state, whole_weights
from support.ranks import run_ranks
from support.rollouts import dealt
from support.tiny import groups, write_model
from support.trees import branched

from megarl.parallel import launcher
from megarl.parallel.collectives import gather_objects
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh, all_ranks
from megarl.rollout.batch import SharePlan
from megarl.settings.training import OptimizerConfig
from megarl.trainer.finite import StepGuard
from megarl.trainer.packing import pack_shared
from megarl.trainer.prefixes import balance_of
from megarl.trainer.role import Role
from megarl.trainer.step import StepMetrics, optimizer_step
from megarl.trainer.transfer import BatchTransfer, Scorer
from megarl.types import Samples, StepBatch

# Policy's ranks and degrees (data, sequence, tensor), then the reference's.
PLACES = {
    "other layout on the same ranks": (range(4), (4, 1, 1), range(4), (1, 2, 2)),
    "one rank of its own": (range(3), (3, 1, 1), [3], (1, 1, 1)),
    "ranks that alternate": ([0, 2], (1, 1, 2), [1, 3], (1, 2, 1)),
    "more ranks than the policy": ([1], (1, 1, 1), [0, 2, 3], (3, 1, 1)),
}
HEADS = {"value": [(2, 1, 1), (1, 2, 1), (1, 1, 2)], "scalar": [(2, 1, 1), (1, 2, 1), (1, 1, 2)]}
TEMPERATURE = 0.8


def step(num_data_ranks: int, sequence: int) -> SharePlan:
    tokens = 40 * sequence
    sizes: Any = {"num_data_ranks": num_data_ranks, "num_mini_batches": 2}
    draw, made = random.Random(3), groups(3, 4, seed=3)
    for group in made:  # every second rollout is a tree
        group.rollouts[1::2] = [branched(draw, one) for one in group.rollouts[1::2]]
    return dealt(made, micro_batch_tokens=tokens, **sizes)


def frozen(*given: Any, stage: int = 0) -> Role:
    """`given`: model, mesh and device."""
    return make_role(*given, name="reference", seed=0, zero_stage=stage)


def trained_once(role: Role, micro_batches: Any, loss: Any) -> float:
    """Take an optimizer step; returns the gradient norm."""
    none = StepMetrics(role.device, ())
    taken = optimizer_step(role, micro_batches, loss, StepGuard(role, allowed=0), none)
    assert taken is not None
    return taken[0]


def by_sample(batch: Any, column: Any) -> dict[int, list[float]]:
    """{sample id: scores of its tokens} of what a data rank got."""
    found = {}
    for samples, values in zip(batch.samples, column, strict=True):
        for n, name in enumerate(samples.ids.tolist()):
            found[name] = values[samples.offsets[n] : samples.offsets[n + 1]].tolist()
    return found


def scores(folder: str, places: Any) -> list[dict[int, list[float]]]:
    """Per place, the column of this rank's samples; empty where the rank is not the policy's."""
    found = []
    with joined() as device:
        for place in places:
            # DeepSpeed numbers parameters as they are made in a process, and wants the same numbers
            # on all ranks of a model: no rank of the second place is in a later one under ZeRO 3.
            found.append(score_at(place, folder, device, stage=3 if len(found) < 2 else 0))
    return found


def score_at(place: Any, folder: str, device: Any, stage: int) -> dict[int, list[float]]:
    policy_ranks, policy_degrees, ranks, degrees = place
    with ExitStack() as stack:
        policy = stack.enter_context(ProcessMesh(Layout(*policy_degrees), ranks=policy_ranks))
        mesh = stack.enter_context(ProcessMesh(Layout(*degrees), ranks=ranks))
        assert policy.is_member == (launcher.rank() in policy_ranks)
        role = frozen(folder, mesh, device, stage=stage) if mesh.is_member else None
        everyone = all_ranks(timeout_s=60)
        common: Any = {"policy": policy, "mesh": mesh, "everyone": everyone, "device": device}
        scorer, batch = Scorer(BatchTransfer(role, micro_batch_tokens=30, **common)), None
        if policy.is_member:
            plan = step(policy.layout.data, policy.layout.sequence)
            batch = plan.share(policy.data.rank)
        for _ in range(2):
            column = scorer.score(batch, (), temperature=TEMPERATURE)
        assert batch is not None or column == []
        if role is not None:
            role.destroy()
        return by_sample(batch, column) if batch is not None else {}


def alone(folder: str) -> dict[int, list[float]]:
    """The column on one rank, by `Role.score` itself."""
    with on_mesh() as (mesh, device):
        role, batch = frozen(folder, mesh, device), step(1, 1).share(0)
        column = role.score(batch, role.pack_step(batch), temperature=TEMPERATURE)
    return by_sample(batch, column)


def test_a_role_scores_alike_wherever_it_is(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "model", biases=True))
    (oracle,) = run_ranks(1, __file__, "alone", folder)
    assert len(oracle) == 12 and all(min(values) < -0.1 for values in oracle.values())
    found = run_ranks(4, __file__, "scores", folder, list(PLACES.values()))
    for number, (name, (policy_ranks, *_)) in enumerate(PLACES.items()):
        seen: set[int] = set()
        for rank in range(4):
            mine = found[rank][number]
            assert bool(mine) == (rank in policy_ranks), name
            for sample, values in mine.items():
                assert values == pytest.approx(oracle[sample], abs=1e-5), (name, sample)
            seen |= set(mine)
        assert seen == set(oracle), name


def conversations(ranks: int, size: int) -> Any:
    """Samples of two system prompts of 40 tokens, with a group of three responses for each rank of
    the policy and each system prompt: no rank has two groups behind one system prompt. Those of all
    ranks, and which are whose.
    """
    made, owner = [], []
    for system in range(2):
        for rank in range(ranks):
            for response in range(3):
                prompt = [*range(100 * system, 100 * system + size), 300 + rank, 7]
                tokens = np.array([*prompt, 400 + response, 5], np.int32)
                mask = np.arange(len(tokens)) >= len(prompt)
                made.append(Samples.one(len(made), tokens, mask=mask, prompt=len(prompt)))
                owner.append(rank)
    return Samples.concatenate(made), owner


def tokens_after_transfer(sequence: int) -> tuple[int, int]:
    """(tokens that a role on two ranks of its own computes, those of the best deal), where the
    policy has two data-parallel ranks. The same on every rank.
    """
    samples, owner = conversations(2, 40)
    count = 2 * sequence
    with (
        joined() as device,
        ProcessMesh(Layout(data=2, sequence=sequence), ranks=range(count)) as policy,
        ProcessMesh(Layout(data=2), ranks=[count, count + 1]) as mesh,
    ):

        def pack_step(batch: Any) -> Any:
            (rows,), (mine,) = batch.micro_batches, batch.samples
            packed = [
                pack_shared(
                    *(mine.select(row), device, mesh.sequence), places=mine.places(row), share="on"
                )
                for row in rows
            ]
            return [packed]

        everyone = all_ranks(timeout_s=60)
        role: Any = SimpleNamespace(windows=[None], pack_step=pack_step)
        transfer = BatchTransfer(
            role if mesh.is_member else None,
            **{"policy": policy, "mesh": mesh, "everyone": everyone, "device": device},
            micro_batch_tokens=1000,
            share_prefix="on",
        )
        batch = None
        if policy.is_member:
            mine = samples.select([n for n, rank in enumerate(owner) if rank == policy.data.rank])
            batch = StepBatch(
                step=0,
                samples=[mine],
                micro_batches=[[list(range(len(mine)))]],
                rewards=np.zeros(len(samples)),
                groups=np.zeros(len(samples), np.int64),
                response_tokens=np.full(len(samples), 2),
                mini_batch_of=np.zeros(len(samples), np.int64),
                metrics={},
            )
        here = transfer.send(batch, ())
        computed = 0 if here is None else sum(len(micro.token_ids) for micro in here.packed[0])
        total = sum(gather_objects(computed, everyone))
    best = balance_of(samples, "on")
    return total, sum(map(best.tokens, best.split(2, 2**20)))


@pytest.mark.parametrize("sequence", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_prefixes_that_no_single_rank_sees_are_computed_once(sequence: int) -> None:
    """Both groups behind a system prompt go to the same rank of the role."""
    for computed, best in run_ranks(2 * sequence + 2, __file__, "tokens_after_transfer", sequence):
        # Two system prompts, four questions of two tokens; the last one is in each response's part.
        assert computed == best == 2 * 40 + 4 * (1 + 3 * 3)


def train_beside(folder: str, state: str) -> list[float]:
    """Gradient norms of two steps of a policy on ranks 0 and 2, saved in between, under ZeRO 3, while
    ranks 1 and 3 have a reference. Empty on those.
    """
    norms = []
    with (
        joined() as device,
        ProcessMesh(Layout(data=2), ranks=[0, 2]) as policy,
        ProcessMesh(Layout(tensor=2), ranks=[1, 3]) as mesh,
    ):
        if mesh.is_member:
            role = frozen(folder, mesh, device, stage=3)
            batch = step(1, 1).share(0)
            role.score(batch, role.pack_step(batch))
        else:
            optimizer = OptimizerConfig(learning_rate=1e-2, eps=1e-6)
            settings: Any = {"seed": 0, "zero_stage": 3, "optimizer": optimizer}
            role = make_role(folder, policy, device, steps=2, **settings)

            def loss(micro: Any) -> torch.Tensor:
                return -role.engine(micro, 1.0)[0].sum() / 100

            for micro_batches in role.pack_step(step(2, 1).share(policy.data.rank)):
                norms.append(trained_once(role, micro_batches, loss))
                save_state(role.engine, state)
        role.destroy()
    return norms


def test_a_policy_trains_on_some_ranks_while_others_have_a_reference(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "model", biases=True))
    found = run_ranks(4, __file__, "train_beside", folder, str(tmp_path / "state"))
    assert found[1] == found[3] == []
    assert found[0] == found[2] and len(found[0]) == 2 and min(found[0]) > 0


def trained(folder: str, cases: Any) -> Any:
    """Per (head, degrees): gradient norms of three steps, the head's weight and a backbone's."""
    found, optimizer = [], OptimizerConfig(learning_rate=1e-2, clip_norm=0.5, eps=1e-6)
    with joined() as device:
        for head, degrees, stage in cases:
            layout = Layout(*degrees)
            with ProcessMesh(layout) as mesh:
                settings: Any = {"seed": 0, "zero_stage": stage, "optimizer": optimizer}
                role = make_role(
                    folder, mesh, device, name="critic", head=head, steps=3, **settings
                )

                def loss(micro: Any, role: Role = role) -> torch.Tensor:
                    if role.head == "value":
                        return (role.engine(micro) - 1.0).square().sum() / 100
                    values, ids = role.engine(micro)
                    return (values - ids.float() / 10).square().sum() / 10

                batch = step(layout.data, layout.sequence).share(mesh.data.rank)
                micro_batches = role.pack_step(batch)[0]
                norms = [trained_once(role, micro_batches, loss) for _ in range(3)]
                weight = role.engine.full_score_weight().double().flatten().tolist()
                whole = whole_weights(role.engine)
                norm = whole["model.layers.0.mlp.down_proj.weight"].norm().item()
                found.append((norms, weight, norm))
                role.destroy()
    return found


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.nightly), 3])
def test_every_head_trains_under_every_axis_as_on_one_rank(stage: int, tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "model", biases=True))
    cases = [(head, degrees, stage) for head, layouts in HEADS.items() for degrees in layouts]
    oracles = run_ranks(1, __file__, "trained", folder, [(head, (1, 1, 1), 0) for head in HEADS])[0]
    for found in run_ranks(2, __file__, "trained", folder, cases):
        for (head, degrees, _), (norms, weight, norm) in zip(cases, found, strict=True):
            wanted = oracles[list(HEADS).index(head)]
            assert norms == pytest.approx(wanted[0], rel=1e-4), (head, degrees)
            assert max(map(abs, wanted[1])) > 1e-3
            assert weight == pytest.approx(wanted[1], abs=1e-5), (head, degrees)
            assert norm == pytest.approx(wanted[2], rel=1e-6), (head, degrees)
