"""A run that lost its run folder to another one, on two gloo ranks: every rank stops with the same
line, and no checkpoint is written.
"""

from __future__ import annotations

from pathlib import Path

from support.policy import make_checkpoints, make_role, on_mesh
from support.ranks import run_ranks
from support.tiny import write_model

from megarl.checkpoints import checkpoint
from megarl.checkpoints.lease import NAME, take
from megarl.errors import UserError
from megarl.parallel.collectives import broadcast_object


def save_and_lose(model: str, folder: str) -> list[str]:
    """What each save that lost the folder said, and what the folder `checkpoints` held afterwards.
    Runs on every rank.
    """
    run, told = Path(folder), list[str]()
    saved = run / "checkpoints"
    with on_mesh(2) as (mesh, device):
        main = mesh.rank == 0
        engine = make_role(model, mesh, device, steps=1, zero_stage=1).engine
        lease = take(run, patience_s=1) if main else None
        run_id = broadcast_object(lease.run_id if lease else "", mesh.world)
        made = make_checkpoints(saved, engine, model, mesh, owner=lease, run_id=run_id)
        taken = run / NAME

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
    return told


def test_a_lost_folder_gets_no_checkpoint(tmp_path: Path) -> None:
    model, run = str(write_model(tmp_path / "model")), str(tmp_path / "run")
    first, second = run_ranks(2, __file__, "save_and_lose", model, run, timeout_s=240)
    assert first == second
    one, two, lost, left, again, kept = first
    assert (one, two) == ("step_000001", "step_000001 step_000002")
    assert "was taken over by another run" in lost and "\n" not in lost and again == lost
    assert left == two
    assert kept == f".writing_000004.of_the_new_owner {two}"
