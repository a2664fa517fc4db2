"""A rank that keeps the others waiting is seen in the traces: in each collective."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from support.commands import until
from support.ranks import run_ranks

from megarl.parallel import collectives
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh, all_ranks, finalise, initialise
from megarl.parallel.redistribute import Redistribution
from megarl.system.spans import Recording, activity
from megarl.system.trace_files import read_traces

CALLS = {
    "all-reduce": lambda axis: collectives.all_reduce(torch.ones(3), axis),
    "broadcast": lambda axis: collectives.broadcast_object("x", axis, 1),
    "gather": lambda axis: collectives.gather_objects("x", axis),
    "barrier": collectives.barrier,
    "all-to-all": lambda axis: Redistribution([3], [[1]], [[0]], axis).move(
        {0: torch.ones(3)} if axis.rank == 1 else {}, torch.float32, torch.device("cpu")
    ),
}


def wait_for_a_late_rank(folder: str) -> list[list[str]]:
    """Rank 1 comes to each collective only once the trace of rank 0 shows that it waits. Returns
    what the traces show then: for each collective the open spans of both ranks.
    """
    initialise(timeout_s=60.0)
    recording, shown = Recording(folder, "run"), []
    with ProcessMesh(Layout(data=2), timeout_s=120.0) as mesh:
        axis = mesh.world
        if axis.rank == 0:
            recording.make(keep=False)
        collectives.barrier(all_ranks())
        close = recording.open(f"rank{axis.rank}")
        for name, call in CALLS.items():
            if axis.rank == 1:
                with activity("a long computation", kind="train"):
                    until(lambda name=name: any(name in line for line in open_spans(folder)))
                    shown.append(open_spans(folder))
            with activity("checkpoint of step 3", kind="checkpoint"):
                call(axis)
        close()
    finalise()
    return shown


def open_spans(folder: str) -> list[str]:
    """The spans that have no end, with their process, and with whom they wait for and deadline."""
    return [
        f"{trace.name}: {span['name']}, waits on {args['waits on']}, {args['deadline_s']} s"
        for trace in read_traces(Path(folder))
        for span in trace.open
        for args in [span["args"]]
    ]


def test_a_late_rank_is_seen(tmp_path: Path) -> None:
    _, shown = run_ranks(2, __file__, "wait_for_a_late_rank", str(tmp_path / "activity"))
    assert shown == [
        [
            "rank0: checkpoint of step 3, waits on [], 0.0 s",
            f"rank0: {name} over world, waits on ['rank0', 'rank1'], 120.0 s",
            "rank1: a long computation, waits on [], 0.0 s",
        ]
        for name in CALLS
    ]


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
