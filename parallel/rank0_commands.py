"""What rank 0 tells other ranks to do next, which may come after hours of waiting for rollouts.

    orders = Rank0Commands(silence_s=720, longest_s=9000)     # on all ranks
    orders.give("train", 7)                            # rank 0; other ranks return at once
    orders.next()                                      # the ranks that follow: ("train", 7)

A collective cannot tell a rank 0 that waits from one that hangs. Orders go through
torch.distributed's store, where a thread of rank 0 gives signs of life.
"""

from __future__ import annotations

import json
import threading
import time

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megarl.parallel.collectives import ASK_S, job_store
from megarl.system.spans import activity

BEAT = "beat"


class Rank0Commands:
    """Passes orders such as ("train", 7), for step 7, from rank 0 to the other ranks."""

    def __init__(self, *, silence_s: float, longest_s: float, name: str = "orders") -> None:
        """On rank 0 it starts a thread.

        Args:
            silence_s: without a sign of life of rank 0 for so long, `next` raises.
            longest_s: without an order for so long, `next` raises.
            name: the same on all ranks, where there are several `Rank0Commands`.
        """
        self.silence_s, self.longest_s = silence_s, longest_s
        self._beat_s = min(5.0, silence_s / 4)
        self._store = distributed_c10d.PrefixStore(f"megarl/{name}", job_store())
        self._num_given = self._num_read = 0
        self._is_first = dist.get_rank() == 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="orders", daemon=True)
        if self._is_first:
            self._thread.start()

    def give(self, order: str, step: int) -> None:
        """Give rank 0's order to all others, without waiting; does nothing on another rank."""
        if self._is_first:
            self._store.set(str(self._num_given), json.dumps([order, step]))
            self._num_given += 1

    def next(self) -> tuple[str, int]:
        """On another rank, block for the next (order, step); each rank gets every order once.
        Raises `RuntimeError` after `silence_s` or `longest_s`.
        """
        key = str(self._num_read)
        began = moved_at = looked_at = time.monotonic()
        pause_s, count = 0.01, b""
        with activity("orders", kind="wait", of=[0], deadline_s=self.silence_s):
            while not self._store.check([key]):
                time.sleep(pause_s)
                pause_s, now = min(2 * pause_s, ASK_S), time.monotonic()
                if now - looked_at >= self._beat_s:
                    before, count, looked_at = count, self._count(), now
                    if count != before:
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
        self._num_read += 1
        order, step = json.loads(self._store.get(key))
        return order, step

    def close(self) -> None:
        """Ends rank 0's thread. May be called twice."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(self._beat_s)

    def _count(self) -> bytes:
        return self._store.get(BEAT) if self._store.check([BEAT]) else b""

    def _beat(self) -> None:
        count = 0
        while not self._closed.is_set():
            try:
                self._store.set(BEAT, str(count))
            except RuntimeError:  # of torch, where the store has ended with the job
                return
            count += 1
            self._closed.wait(self._beat_s)
