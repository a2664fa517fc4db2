"""Messages and differentiable collectives over real gloo ranks: uneven and empty ones, gradients,
deadlines.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from megarl.parallel import mesh as mesh_module
from megarl.parallel.collectives import (
    all_gather_parts,
    sum_both,
    sum_gradient,
    sum_values,
    wait_for_first,
)
from megarl.parallel.exchange import RingExchange
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh

LENGTHS = (3, 0, 5)
"""Rows that each of three ranks holds."""


def owned(rank: int) -> Any:
    """Rank `rank`'s rows [n, 2], recognisable."""
    return 100.0 * rank + torch.arange(2 * LENGTHS[rank], dtype=torch.float32).view(-1, 2)


def talk() -> dict[str, bool]:
    """Every method once; what each found, compared with what arithmetic says. Runs on three ranks."""
    mesh_module.initialise(timeout_s=30)
    found: dict[str, bool] = {}
    with ProcessMesh(Layout(sequence=3), timeout_s=30) as mesh:
        exchange, rank = RingExchange(mesh.ring, mesh.ring_back), mesh.rank
        # Two messages under way on two channels, fetched in the other order.
        for offset in (1, 2, -1, 3):
            source = (rank - offset) % 3
            on_keys = exchange.shift(owned(rank), (LENGTHS[source], 2), offset=offset)
            on_gradients = exchange.shift(
                -owned(rank), (LENGTHS[source], 2), channel=1, offset=offset
            )
            found[f"shift {offset} back"] = torch.equal(on_gradients.wait(), -owned(source))
            found[f"shift {offset}"] = torch.equal(on_keys.wait(), owned(source))
        gathered = exchange.all_gather(owned(rank), LENGTHS)
        found["all_gather"] = all(torch.equal(part, owned(r)) for r, part in enumerate(gathered))
        summed = exchange.reduce_scatter([owned(r) * (rank + 1) for r in range(3)])
        found["reduce_scatter"] = torch.equal(summed, owned(rank) * 6)
        shapes = [(LENGTHS[rank], source + 1) for source in range(3)]
        pieces = [
            torch.full((LENGTHS[target], rank + 1), 10.0 * rank + target) for target in range(3)
        ]
        traded = exchange.all_to_all(pieces, shapes)
        found["all_to_all"] = all(
            torch.equal(piece, torch.full(shapes[source], 10.0 * source + rank))
            for source, piece in enumerate(traded)
        )
        # As of sliding windows: nothing from a rank to itself, and from rank 0 nothing to anyone.
        some = [owned(rank)[: rank if target != rank else 0] for target in range(3)]
        few = exchange.all_to_all(some, [(len(owned(r)[:r]) * (r != rank), 2) for r in range(3)])
        found["all_to_all of some"] = all(
            torch.equal(piece, owned(r)[: r if r != rank else 0]) for r, piece in enumerate(few)
        )
        none = exchange.all_to_all([owned(rank)[:0]] * 3, [(0, 2)] * 3)
        found["all_to_all of nothing"] = [len(piece) for piece in none] == [0, 0, 0]
        whole = all_gather_parts(owned(rank).T, mesh.sequence, 1, list(LENGTHS))
        found["all_gather_parts"] = torch.equal(whole, torch.cat([owned(r) for r in range(3)]).T)
        # Rank r's loss is (r + 1) * y; x is r + 2. What the gradient of the sum of losses is, by
        # hand:
        expected = {
            sum_gradient: (rank + 2.0, 6.0),
            sum_values: (9.0, rank + 1.0),
            sum_both: (9.0, 6.0),
        }
        for function, (value, gradient) in expected.items():
            x = torch.tensor([rank + 2.0], requires_grad=True)
            y = function(x, mesh.sequence)
            ((rank + 1) * y).sum().backward()
            found[function.__name__] = y.item() == value and x.grad.item() == gradient
        found |= await_the_first(mesh)
    found["first message under NCCL"] = first_messages()
    mesh_module.finalise()
    return found


def await_the_first(mesh: Any) -> dict[str, bool]:
    """Whether ranks wait for the first one's work, and give up."""

    def work(seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    began, first = time.monotonic(), mesh.rank == 0
    answer = wait_for_first(lambda: work(0.5), mesh.world, "a long work", 30)
    lasted = time.monotonic() - began > 0.4
    again = wait_for_first(lambda: work(0), mesh.world, "a short work", 30)
    said = ""
    try:
        wait_for_first(lambda: work(1), mesh.world, "a late work", 0.3)
    except RuntimeError as error:
        said = str(error)
    late = "" if first else "rank 0 did not end a late work within 0.3 s"
    return {
        "wait_for_first": lasted and answer == again == ("done" if first else None),
        "wait_for_first, late": said == late,
    }


def first_messages() -> bool:
    """Whether a mesh begins with a collective on each of the groups on which ranks send to single
    others, as NCCL needs it. The group is gloo's, which says that it is NCCL's.
    """
    with (
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called,
        ProcessMesh(Layout(sequence=3), timeout_s=30) as mesh,
    ):
        found = [call.kwargs["group"] for call in called.call_args_list]
        return found == [mesh.ring.group, mesh.ring_back.group] and found[0] != found[1]


def test_every_message_arrives() -> None:
    for rank, found in enumerate(run_ranks(3, __file__, "talk")):
        assert all(found.values()), (rank, [name for name, right in found.items() if not right])


def wait_for_nobody() -> float:
    """Seconds until rank 0 gives up on rank 1, which sleeps instead of sending."""
    mesh_module.initialise(timeout_s=60)
    mesh = ProcessMesh(Layout(sequence=2), timeout_s=3)
    exchange = RingExchange(mesh.ring, mesh.ring_back)
    exchange.shift(torch.zeros(4), (4,)).wait()
    started_at = time.monotonic()
    if mesh.rank == 1:
        time.sleep(8)
        return 0.0
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        exchange.shift(torch.zeros(4), (4,)).wait()
    return time.monotonic() - started_at


def test_a_neighbour_that_does_not_answer_ends_the_wait() -> None:
    assert 2 < run_ranks(2, __file__, "wait_for_nobody", timeout_s=60)[0] < 7
