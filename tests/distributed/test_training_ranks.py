"""Two gloo ranks against one, under every ZeRO stage: the same loss, gradient norm and weights."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.policy import Policy, make_checkpoints, make_role, on_mesh, whole_weights
from support.ranks import run_ranks
from support.rollouts import dealt
from support.tiny import groups, write_model

from megarl.checkpoints import checkpoint, export, rank_files
from megarl.checkpoints.manifest import damage
from megarl.errors import UserError
from megarl.objectives.config import AlgorithmConfig, CorrectionConfig, KLConfig
from megarl.parallel import launcher
from megarl.parallel.reshard.owned import training_owned
from megarl.parallel.tensor import whole_shapes
from megarl.trainer import zero_state
from megarl.trainer.config import ModelConfig, OptimizerConfig, TrainingConfig

STEPS = 3
# Without clipping a wrong scale of the gradient would hide behind AdamW; with it, it changes the
# update.
CASES = {
    "dapo": dict(num_mini_batches=2, micro_batch_tokens=60, clip_norm=0.5, algorithm={}),
    "sequence-mean, KL, entropy": dict(
        num_mini_batches=1,
        micro_batch_tokens=200,
        clip_norm=0.0,
        algorithm=dict(
            aggregation="sequence",
            entropy_coefficient=0.01,
            advantage="rloo",
            correction=CorrectionConfig(kind="tis"),
        ),
    ),
    "tied, recomputed activations, KL in the reward, GSPO": dict(
        num_mini_batches=2,
        micro_batch_tokens=100,
        clip_norm=1.0,
        algorithm=dict(
            loss="gspo",
            aggregation="constant",
            constant_tokens=24,
            advantage="reinforce_plus_plus_baseline",
        ),
    ),
}


def three_steps(
    model: str,
    stages: list[int],
    case: str,
    num_groups: int,
    precision: str = "float32",
    optimizer: str = "torch",
    equal: str = "",
) -> dict[int, Any]:
    """Per ZeRO stage: metrics of three steps and the weights after them. Runs on every rank.
    `equal`: every second group has equal rewards, and is "sent" to the ranks or "skipped".
    """
    settings, found = CASES[case], {}
    where = "reward" if "reward" in case else "loss"
    kl = KLConfig(coefficient=0.05, where=where) if "KL" in case else KLConfig()
    with on_mesh(launcher.num_ranks()) as (mesh, device):
        for stage in stages:
            policy = Policy(
                model=ModelConfig(path=model),
                training=TrainingConfig(
                    zero_stage=stage,
                    precision=precision,
                    gradient_checkpointing="recomputed" in case,
                    offload_optimizer=optimizer == "deepspeed_cpu" and stage > 0,
                    optimizer=OptimizerConfig(
                        kind=optimizer,
                        learning_rate=1e-3,
                        clip_norm=settings["clip_norm"],
                        eps=1e-6,
                    ),
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
                for group in made[::2] if equal else ():
                    group.rollouts[:] = [
                        replace(one, verdict=replace(one.verdict, reward=0.25))
                        for one in group.rollouts
                    ]
                plan = dealt(
                    made,
                    step=step,
                    num_data_ranks=mesh.data.size,
                    num_mini_batches=settings["num_mini_batches"],
                    micro_batch_tokens=settings["micro_batch_tokens"],
                    skips_equal=equal == "skipped",
                )
                reports.append(policy.train(plan.share(mesh.data.rank)).metrics)
            found[stage] = (reports, whole_weights(policy.engine))
            policy.engine.destroy()
    return found


def differences(one: Any, other: Any) -> dict[str, float]:
    """Largest relative difference of loss, gradient norm and weights."""
    # A policy loss is a weighted mean of terms of about 1 that cancel: with centred advantages its
    # true value is 0.
    scales = {
        "loss": 1.0,
        "grad_norm": 1e-3,
        "entropy": 1e-3,
        "mismatch/mean_abs": 1e-3,
        "tokens/trained": 1.0,
        "staleness/token_mean": 1e-3,
        "staleness/token_max": 1.0,
    }
    if "correction/mean" in one[0][0]:
        names = ("mean", "effective_samples", "clipped_share")
        scales |= {f"correction/{name}": 1e-3 for name in names}
        # A bound that clips all tokens or none would compare nothing.
        assert 0 < one[0][0]["correction/clipped_share"] < 1
    numbers = {
        name: max(
            abs(a[name] - b[name]) / max(abs(a[name]), scale)
            for a, b in zip(one[0], other[0], strict=True)
        )
        for name, scale in scales.items()
    }
    assert one[1].keys() == other[1].keys()
    numbers["weights"] = max(
        float((one[1][n] - other[1][n]).norm() / one[1][n].norm()) for n in one[1]
    )
    return numbers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Whether tied -> model folder."""
    return {
        tied: str(write_model(tmp_path_factory.mktemp("model"), tied=tied, biases=True))
        for tied in (False, True)
    }


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_under_every_zero_stage(models: dict[bool, str], case: str) -> None:
    model = models["tied" in case]
    alone = run_ranks(1, __file__, "three_steps", model, [0], case, 4)[0][0]
    together = run_ranks(2, __file__, "three_steps", model, [0, 1, 2, 3], case, 4)
    for stage in range(4):
        for rank in range(2):
            found = differences(alone, together[rank][stage])
            assert max(found.values()) < 1e-5, (stage, rank, found)


@pytest.mark.parametrize("num_groups", [2, 5])
def test_skipped_groups_of_equal_rewards_change_nothing(
    models: dict[bool, str], num_groups: int
) -> None:
    """Of two groups, each a mini-batch, the first is skipped but for one sample."""
    one, two = ("float32", "torch", "sent"), ("float32", "torch", "skipped")
    alone = run_ranks(1, __file__, "three_steps", models[False], [0], "dapo", num_groups, *one)
    together = run_ranks(
        2, __file__, "three_steps", models[False], [0, 1, 2, 3], "dapo", num_groups, *two
    )
    (all_sent,) = alone[0].values()
    for stage in range(4):
        skipped = together[0][stage]
        found = differences(all_sent, skipped)
        assert max(found[name] for name in ("loss", "grad_norm", "weights")) < 1e-5, (stage, found)
        for mine, theirs in zip(all_sent[0], skipped[0], strict=True):
            assert theirs["tokens/trained"] < mine["tokens/trained"]
            assert theirs["groups/equal"] >= num_groups // 2


def test_a_rank_without_samples_takes_part(models: dict[bool, str]) -> None:
    """One group for four ranks: the rank that gets nothing must not stop the others, nor change the
    result.
    """
    alone = run_ranks(1, __file__, "three_steps", models[False], [2, 3], "dapo", 1)[0]
    together = run_ranks(4, __file__, "three_steps", models[False], [2, 3], "dapo", 1)
    for rank in range(4):
        for stage in (2, 3):
            assert max(differences(alone[stage], together[rank][stage]).values()) < 1e-5


@pytest.mark.parametrize(("precision", "near"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_16_bit_stays_near_float32(models: dict[bool, str], precision: str, near: float) -> None:
    """Rounded weights and activations, float32 master weights: near, not equal; and two ranks near
    one.
    """
    exact = run_ranks(1, __file__, "three_steps", models[False], [0], "dapo", 4)[0][0]
    stages = [1, 2, 3]
    rounded = run_ranks(2, __file__, "three_steps", models[False], stages, "dapo", 4, precision)[0]
    for stage in (1, 2, 3):
        for mine, theirs in zip(exact[0], rounded[stage][0], strict=True):
            assert abs(mine["grad_norm"] - theirs["grad_norm"]) < near * mine["grad_norm"]
            assert abs(mine["entropy"] - theirs["entropy"]) < 0.4 * near * mine["entropy"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deepspeeds_cpu_optimizer_takes_the_same_steps(
    models: dict[bool, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under every ZeRO stage, its state offloaded; the first run compiles the extension."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")  # ninja
    model, kind = models[False], ("float32", "deepspeed_cpu")
    alone = run_ranks(1, __file__, "three_steps", model, [0], "dapo", 4)[0][0]
    stages = [0, 1, 2, 3]
    other = run_ranks(2, __file__, "three_steps", model, stages, "dapo", 4, *kind, timeout_s=500)
    for stage in range(4):
        found = differences(alone, other[0][stage])
        assert max(found.values()) < 1e-5, (stage, found)


def change(engine: Any, method: str, *arguments: float) -> None:
    """Call an in-place method of torch on all weights of an engine under ZeRO 1."""
    optimizer = engine._engine.optimizer
    for part in optimizer.single_partition_of_fp32_groups:
        getattr(part.data, method)(*arguments)
    optimizer.update_lp_params()


def save_with_a_full_disk(model: str, folder: str) -> str:
    """Rank 1 cannot write: the trained state, its random state, its file of the exported model, its
    files to the disk. Returns what each rank was told.
    """

    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    put = rank_files.RankFile._put

    def put_no_model(file: rank_files.RankFile, *content: Any) -> None:
        (full if file.path.parent.name == "model" else put)(file, *content)

    with on_mesh(2) as (mesh, device):
        one, other = (make_role(model, mesh, device, steps=1, zero_stage=1) for _ in range(2))
        engine, critic = one.engine, other.engine
        made = make_checkpoints(Path(folder), engine, model, mesh, others={"critic": critic})
        made.save(step=1, next_ordinal=4)
        # From here on several files of weights, so that rank 1 writes one of them.
        shapes = whole_shapes(engine.module.model, {})
        owned = training_owned(shapes, {}, mesh.layout, 1)
        made._weights = export.WeightExport(
            owned, shapes, torch.float32, file_bytes=60_000, band_bytes=9_000
        )
        told: list[str] = []
        places: list[tuple[int, Any, str, Any]] = [
            (2, zero_state.TrainState, "write", full),
            (3, checkpoint, "random_states", full),
            (4, rank_files.RankFile, "_put", put_no_model),
            (5, rank_files.DirectFile, "sync", full),
        ]
        for step, where, attribute, fails in places:
            whole = getattr(where, attribute)
            if mesh.rank == 1:
                setattr(where, attribute, fails)
            try:
                made.save(step=step, next_ordinal=8)
            except OSError as error:
                told.append(str(error))
            setattr(where, attribute, whole)
        change(critic, "add_", 1)
        saved = {name: weight.clone() for name, weight in critic.owned().items()}
        path = made.save(step=6, next_ordinal=8)
        change(critic, "zero_")
        made.load(path)
        assert all(torch.equal(weight, saved[name]) for name, weight in critic.owned().items())
        told += save_in_background(made, critic)
        made.others = {"value": critic}
        with pytest.raises(UserError, match="has no roles/value"):
            made.load(path)
    return "\n".join(told)


def save_in_background(made: Any, critic: Any) -> list[str]:
    """Two checkpoints that are written while training goes on; the disk of rank 1 is full for the
    second. Returns what is raised. The first holds the weights as they were at the save.
    """
    made.in_background = True
    whole, may_write = rank_files.RankFile.finish, threading.Event()

    def finish_slowly(file: Any) -> str:
        assert may_write.wait(60)
        return whole(file)

    rank_files.RankFile.finish = finish_slowly
    change(critic, "fill_", 7)
    path = made.save(step=7, next_ordinal=8)
    change(critic, "zero_")
    assert not path.exists()
    may_write.set()
    made.finish()
    rank_files.RankFile.finish = whole
    made.load(path)
    assert all(torch.all(weight == 7) for weight in critic.owned().values())

    def full(file: Any) -> str:
        raise OSError(28, "No space left on device")

    if made.mesh.rank == 1:
        rank_files.RankFile.finish = full
    made.save(step=8, next_ordinal=8)
    rank_files.RankFile.finish, told = whole, list[str]()
    try:
        made.save(step=9, next_ordinal=8)
    except OSError as error:
        told.append(str(error))
    made.finish()
    return told


def test_a_full_disk_on_one_rank_is_told_to_all_and_spoils_nothing(
    models: dict[bool, str], tmp_path: Path
) -> None:
    told = run_ranks(
        2, __file__, "save_with_a_full_disk", models[False], str(tmp_path), timeout_s=120
    )
    for words in told:
        assert words.count("rank 1: ") == 5 and words.count("No space left on device") == 5
        assert "step 8 could not be written" in words
        assert "earlier checkpoints are whole" in words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000006", "step_000007"]
    assert all(damage(path) == "" for path in tmp_path.iterdir())
    assert len(list((tmp_path / "step_000006" / "model").glob("*.safetensors"))) > 1
