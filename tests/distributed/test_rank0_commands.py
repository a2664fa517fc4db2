"""Orders of rank 0 to ranks that wait for them, on two gloo ranks."""

from __future__ import annotations

import time

from support.ranks import run_ranks

from megarl.parallel import mesh as mesh_module
from megarl.parallel.collectives import barrier
from megarl.parallel.rank0_commands import Rank0Commands


def follow() -> list[object]:
    """On rank 1, the orders it got and how its waits for a silent rank 0 ended; on rank 0 []."""
    mesh_module.initialise(timeout_s=60)
    everyone = mesh_module.all_ranks()
    orders = Rank0Commands(silence_s=1.0, longest_s=60.0)
    if everyone.rank == 0:
        time.sleep(3)  # longer than `silence_s`, as a wait for rollouts is
        orders.give("train", 7)
        orders.give("save", 8)
        barrier(everyone)
        orders.close()  # as a stopped process, which gives no sign of life
        barrier(everyone)
        slow = Rank0Commands(silence_s=1.0, longest_s=2.0, name="slow")
        barrier(everyone)
        slow.close()
        mesh_module.finalise()
        return []
    found: list[object] = [orders.next(), orders.next()]
    barrier(everyone)
    for count, made in enumerate((orders, None)):
        waited = made or Rank0Commands(silence_s=1.0, longest_s=2.0, name="slow")
        began = time.monotonic()
        try:
            waited.next()
        except RuntimeError as error:
            found += [str(error), time.monotonic() - began]
        if count == 0:
            barrier(everyone)
    barrier(everyone)
    mesh_module.finalise()
    return found


def test_orders_are_awaited_as_long_as_rank_0_lives() -> None:
    _, found = run_ranks(2, __file__, "follow", timeout_s=120)
    first, second, silent, silent_s, slow, slow_s = found
    assert (first, second) == (("train", 7), ("save", 8))
    assert "no sign of life for 1 s" in silent and silent_s < 20
    assert "given no order for 2 s" in slow and slow_s < 20
