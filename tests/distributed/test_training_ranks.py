"""Two gloo ranks against one, under every ZeRO stage: the same loss, gradient norm and weights."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support import training_cases
from support.policy import make_checkpoints, make_role, on_mesh
from support.ranks import run_ranks
from support.tiny import write_model
from support.training_cases import Case, assert_equal, differences

from megarl.checkpoints import checkpoint, export, rank_files
from megarl.checkpoints.manifest import damage
from megarl.errors import UserError
from megarl.parallel.reshard.owned import training_owned
from megarl.parallel.tensor import whole_shapes
from megarl.settings.objectives import CorrectionConfig, KLConfig
from megarl.trainer import zero_state

OFF_POLICY: dict[str, Any] = dict(
    aggregation="sequence", entropy_coefficient=0.01, advantage="rloo",
    correction=CorrectionConfig(kind="tis"),
)  # fmt: skip
IN_REWARD: dict[str, Any] = dict(
    loss="gspo", aggregation="constant", constant_tokens=24,
    advantage="reinforce_plus_plus_baseline", kl=KLConfig(coefficient=0.05, where="reward"),
)  # fmt: skip
CASES: dict[str, Case] = {
    "dapo": {"num_mini_batches": 2, "tokens": 60, "algorithm": {"kl": KLConfig()}},
    # Without clipping a wrong scale of the gradient would hide behind AdamW; with it, it changes
    # the update.
    "sequence-mean, KL, entropy": {"tokens": 200, "optimizer": {"clip_norm": 0.0}}
    | {"algorithm": OFF_POLICY},
    "tied, recomputed activations, KL in the reward, GSPO": {"num_mini_batches": 2, "tokens": 100}
    | {"training": {"gradient_checkpointing": True}, "optimizer": {"clip_norm": 1.0}}
    | {"algorithm": IN_REWARD},
}


def under_stages(case: Case, size: int, *stages: int, **options: Any) -> list[list[Any]]:
    """What each of `size` data ranks has of the case under these ZeRO stages."""
    cases = [case | {"layout": (size, 1, 1), "stage": stage} for stage in stages]
    return run_ranks(size, training_cases.__file__, "run_cases", cases, **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Whether tied -> model folder."""
    return {
        tied: str(write_model(tmp_path_factory.mktemp("model"), tied=tied, biases=True))
        for tied in (False, True)
    }


@pytest.fixture(scope="module")
def dapo(models: dict[bool, str]) -> tuple[Case, Any]:
    """The first case, and what one rank has of it."""
    case = CASES["dapo"] | {"model": models[False], "groups": (4, 3)}
    [[alone]] = under_stages(case, 1, 0)
    return case, alone


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_under_every_zero_stage(
    models: dict[bool, str], dapo: tuple[Case, Any], name: str
) -> None:
    case, alone = dapo
    if name != "dapo":
        case = CASES[name] | {"model": models["tied" in name], "groups": (4, 3)}
        [[alone]] = under_stages(case, 1, 0)
    assert_equal([alone] * 4, [case] * 4, under_stages(case, 2, 0, 1, 2, 3))


@pytest.mark.parametrize("num_groups", [2, 5])
def test_skipped_groups_of_equal_rewards_change_nothing(
    models: dict[bool, str], num_groups: int
) -> None:
    """Of two groups, each a mini-batch, the first is skipped but for one sample."""
    case = CASES["dapo"] | {"model": models[False], "groups": (num_groups, 3)}
    [[(reports, *_, weights)]] = under_stages(case | {"equal": "sent"}, 1, 0)
    for fewer, *_, others in under_stages(case | {"equal": "skipped"}, 2, 0, 1, 2, 3)[0]:
        found = differences((reports, [], [], weights), (fewer, [], [], others))
        assert max(found[name] for name in ("loss", "grad_norm", "weights")) < 1e-5, found
        for mine, theirs in zip(reports, fewer, strict=True):
            assert theirs["tokens/trained"] < mine["tokens/trained"]
            assert theirs["groups/equal"] >= num_groups // 2


@pytest.mark.parametrize(("precision", "near"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_16_bit_stays_near_float32(dapo: tuple[Case, Any], precision: str, near: float) -> None:
    """Rounded weights and activations, float32 master weights: near, not equal; and two ranks near
    one.
    """
    case, (exact, *_) = dapo
    for reports, *_ in under_stages(case | {"training": {"precision": precision}}, 2, 1, 2, 3)[0]:
        for mine, theirs in zip(exact, reports, strict=True):
            assert abs(mine["grad_norm"] - theirs["grad_norm"]) < near * mine["grad_norm"]
            assert abs(mine["entropy"] - theirs["entropy"]) < 0.4 * near * mine["entropy"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deepspeeds_cpu_optimizer_takes_the_same_steps(
    dapo: tuple[Case, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under every ZeRO stage, its state offloaded; the first run compiles the extension."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")  # ninja
    case, alone = dapo
    other = case | {"optimizer": {"kind": "deepspeed_cpu"}}
    offloaded = other | {"training": {"offload_optimizer": True}}
    [first, *_] = under_stages(other, 2, 0, timeout_s=500)
    [found, *_] = under_stages(offloaded, 2, 1, 2, 3, timeout_s=500)
    for numbers in (differences(alone, one) for one in first + found):
        assert max(numbers.values()) < 1e-5, numbers


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
