"""A rank that keeps the others waiting is named: in each collective, in a checkpoint's barrier, and
where another role's ranks owe their scores.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from megarl.activity.recording import Recording
from megarl.activity.spans import activity
from megarl.parallel import collectives
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh, all_ranks, finalise, initialise
from megarl.parallel.redistribute import Redistribution

DEADLINE_S = 3.0
"""Deadline that the axis says; that of the process group is longer, so that the ranks meet again."""
CALLS = {
    "all-reduce": lambda axis: collectives.all_reduce(torch.ones(3), axis),
    "broadcast": lambda axis: collectives.broadcast_object("x", axis, 1),
    "gather": lambda axis: collectives.gather_objects("x", axis),
    "barrier": collectives.barrier,
    "exchange of samples": lambda axis: Redistribution([3], [[1]], [[0]], axis).move(
        {0: torch.ones(3)} if axis.rank == 1 else {}, torch.float32, torch.device("cpu")
    ),
}


def wait_for_a_late_rank(folder: str, name: str) -> str:
    """Rank 1 comes to the collective only once the wait of rank 0 is reported. Returns on rank 0
    the report's line.
    """
    initialise(timeout_s=60.0)
    recording = Recording(folder, "run")
    with ProcessMesh(Layout(data=2), timeout_s=120.0) as mesh:
        axis = replace(mesh.world, timeout_s=DEADLINE_S)
        if axis.rank == 0:
            recording.make(keep=False)
        collectives.barrier(all_ranks())
        close = recording.open(f"rank{axis.rank}")
        if axis.rank == 1:
            with activity("a long computation", kind="train"):
                while not list(Path(folder).parent.glob("waits-*.txt")):
                    time.sleep(0.02)
        try:
            with activity("checkpoint of step 3", kind="checkpoint"):
                CALLS[name](axis)
        finally:
            close()
    finalise()
    return sorted(Path(folder).parent.glob("waits-*.txt"))[0].read_text() if axis.rank == 0 else ""


@pytest.mark.parametrize("name", CALLS)
def test_a_late_rank_is_named(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "activity")
    text, _ = run_ranks(2, __file__, "wait_for_a_late_rank", folder, name)
    line = text.splitlines()[0]
    assert line.startswith("megarl: rank0 has waited ")
    assert f" for {name} over world, in checkpoint of step 3 (deadline 2.7 s): " in line
    assert "rank1: a long computation, for" in line
    assert "in wait_for_a_late_rank" in text


def test_the_deadline_of_all_ranks_is_that_of_the_job() -> None:
    assert run_ranks(2, __file__, "deadlines") == [(33.0, 44.0, 0.0)] * 2


def deadlines() -> tuple[float, ...]:
    """Deadlines of the job's axis, of one of its own and of one of a single rank."""
    initialise(timeout_s=33.0)
    with ProcessMesh(Layout(data=2), timeout_s=55.0) as mesh:
        found = all_ranks().timeout_s, all_ranks(timeout_s=44.0).timeout_s, 0.0
        assert mesh.data.timeout_s == 55.0
        # A rank that closes a new group at once may do so while another still connects to it.
        dist.barrier()
    finalise()
    return found
