"""What rank 0 tells other ranks to do next, which may take hours to come: rank 0 waits for rollouts
meanwhile.

    orders = Orders(silence_s=720, longest_s=9000)     # on all ranks
    orders.give("train", 7)                            # rank 0; other ranks return at once
    orders.next()                                      # the ranks that follow: ("train", 7)

A collective cannot tell a rank 0 that waits from one that hangs. Orders therefore go through the
store of torch.distributed, and a thread of rank 0 raises a count there as long as the process runs.
"""

from __future__ import annotations

import json
import threading
import time

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megarl.parallel.collectives import ASK_S, job_store
from megarl.system.spans import activity

MOST_BEAT_S = 5.0
"""Largest number of seconds between two signs of life of rank 0."""

BEAT = "beat"


class Orders:
    """Passes orders from rank 0 to the other ranks of a job, such as ("train", 7) for step 7: rank
    0 calls `give`, the others call `next`, which blocks and returns the orders in the order in
    which they were given. Ranks may wait for hours, as long as rank 0 gives signs of life through
    torch.distributed's store. Every rank makes one of these objects.
    """

    def __init__(self, *, silence_s: float, longest_s: float, name: str = "orders") -> None:
        """Call it on all ranks, after `megarl.parallel.mesh.initialise`. On rank 0 it starts a
        thread that gives signs of life.

        Args:
            silence_s: seconds without a sign of life of rank 0, after which `next` raises an error.
            longest_s: seconds without an order, after which `next` raises an error although rank 0
                lives.
            name: name of these orders, the same on all ranks, where there are several.
        """
        self.silence_s, self.longest_s = silence_s, longest_s
        self._beat_s = min(MOST_BEAT_S, silence_s / 4)
        self._store = distributed_c10d.PrefixStore(f"megarl/{name}", job_store())
        self._given = self._taken = 0
        self._is_first = dist.get_rank() == 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="orders", daemon=True)
        if self._is_first:
            self._thread.start()

    def give(self, order: str, step: int) -> None:
        """On rank 0, give the order `order` for step `step` to all other ranks, without waiting for
        them; on other ranks it does nothing.
        """
        if self._is_first:
            self._store.set(str(self._given), json.dumps([order, step]))
            self._given += 1

    def next(self) -> tuple[str, int]:
        """On a rank other than 0, block until rank 0 gives the next order, and return it: (order,
        step). Each rank gets every order once. Raises `RuntimeError` if rank 0 gives neither an
        order nor a sign of life for `silence_s` seconds, or no order for `longest_s` seconds (both
        set when this object was made).
        """
        key = str(self._taken)
        began = moved_at = looked_at = time.monotonic()
        pause_s, found = 0.01, b""
        with activity("orders", kind="wait", of=[0], deadline_s=self.silence_s):
            while not self._store.check([key]):
                time.sleep(pause_s)
                pause_s, now = min(2 * pause_s, ASK_S), time.monotonic()
                if now - looked_at >= self._beat_s:
                    before, found, looked_at = found, self._count(), now
                    if found != before:
                        moved_at = now
                if now - moved_at > self.silence_s:
                    raise RuntimeError(
                        f"rank 0 has given no sign of life for {self.silence_s:g} s, while this"
                        " rank waited for its orders (training.collective_timeout_s); is the"
                        " process stopped, or its host gone?"
                    )
                if now - began > self.longest_s:
                    raise RuntimeError(
                        f"rank 0 lives, but has given no order for {self.longest_s:g} s, longer"
                        " than rollouts and evaluations may take"
                    )
        self._taken += 1
        order, step = json.loads(self._store.get(key))
        return order, step

    def close(self) -> None:
        """End the thread by which rank 0 gives signs of life, when no more orders follow. It does
        nothing on other ranks, and at a second call.
        """
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(self._beat_s)

    def _count(self) -> bytes:
        return self._store.get(BEAT) if self._store.check([BEAT]) else b""

    def _beat(self) -> None:
        """What the thread of rank 0 does."""
        count = 0
        while not self._closed.is_set():
            try:
                self._store.set(BEAT, str(count))
            except RuntimeError:  # of torch, where the store has ended with the job
                return
            count += 1
            self._closed.wait(self._beat_s)
