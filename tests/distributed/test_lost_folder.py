"""A run that lost its run folder to another one, on two gloo ranks: every rank stops with the same
line, and no checkpoint is written.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_ranks
from support.tiny import write_model


def save_and_lose(model: str, folder: str) -> list[str]:
    """What each save that lost the folder said, and what the folder `checkpoints` held afterwards.
    Runs on every rank.
    """
    import torch

    from megarl.checkpoints import checkpoint
    from megarl.checkpoints.lease import path_of, take
    from megarl.data.tokenizer import load_tokenizer
    from megarl.errors import UserError
    from megarl.parallel import mesh as mesh_module
    from megarl.parallel.collectives import broadcast_object
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh
    from megarl.trainer.config import ModelConfig, TrainingConfig
    from megarl.trainer.loading import load_model
    from megarl.trainer.model import RoleModel
    from megarl.trainer.zero import TrainEngine

    device = mesh_module.initialise(timeout_s=30)
    run, told = Path(folder), list[str]()
    saved = run / "checkpoints"
    with ProcessMesh(Layout(data=2), timeout_s=30) as mesh:
        main, training = mesh.rank == 0, TrainingConfig(zero_stage=1)
        whole = load_model(ModelConfig(path=model), dtype=torch.float32, seed=0)
        engine = TrainEngine(
            RoleModel(whole, mesh, training), training, mesh, device, total_steps=1
        )
        lease = take(run, patience_s=1) if main else None
        made = checkpoint.Checkpoints(
            saved,
            keep=2,
            engine=engine,
            tokenizer=load_tokenizer(model),
            mesh=mesh,
            seed=0,
            data="d",
            owner=lease,
            run_id=broadcast_object(lease.run_id if lease else "", mesh.world),
        )
        taken = path_of(run, 2)

        def save(step: int) -> None:
            try:
                made.save(step=step, next_ordinal=4)
            except UserError as error:
                told.append(str(error))
            names = sorted(path.name for path in saved.iterdir()) if main else []
            told.append(" ".join(broadcast_object(names, mesh.world)))

        save(1)
        # The folder of a run that died in a save; the next save of this run removes it.
        (saved / ".writing_000003.dead").mkdir(exist_ok=True)
        save(2)
        write_manifest = checkpoint.write_manifest

        def lose_it(at: Path, digests: dict[str, str]) -> None:
            write_manifest(at, digests)
            assert at.name == f".writing_000003.{made.run_id}" and made.run_id
            taken.write_text("{}")

        checkpoint.write_manifest = lose_it
        save(3)
        checkpoint.write_manifest = write_manifest
        if main:
            (saved / ".writing_000004.of_the_new_owner").mkdir()
        save(4)
    mesh_module.finalise()
    return told


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


def test_a_lost_folder_gets_no_checkpoint(model: str, tmp_path: Path) -> None:
    first, second = run_ranks(
        2, __file__, "save_and_lose", model, str(tmp_path / "run"), timeout_s=240
    )
    assert first == second
    one, two, lost, left, again, kept = first
    assert (one, two) == ("step_000001", "step_000001 step_000002")
    assert "was taken over by another run" in lost and "\n" not in lost and again == lost
    assert left == two
    assert kept == f".writing_000004.of_the_new_owner {two}"
