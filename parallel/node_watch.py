"""Tells a torchrun agent within a minute that another node of the job is gone.

A rank learns of a lost node only in a collective with its ranks. One that waits for rollouts or for
an engine is in none, and would wait until the deadline of what it waits for. Each node's agent
therefore counts up a number of its own in the store of torchrun's rendezvous, which node 0 serves.
Node 0 looks at the numbers of all others, and the others look at that of node 0.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import torch.distributed as dist

LOST_AFTER = "MEGARL_NODE_LOST_AFTER_S"
"""Name of the environment variable with the seconds of silence after which a node is lost."""
LOST_AFTER_S = 60.0
"""The same where the variable is not set."""
BEATS = 15
"""Signs of life within that time."""
ENDED = 2**40
"""A number as high as this is that of a node whose ranks have all ended in order."""
LEAVES_WITHIN_S = 5.0
"""Seconds to tell the others that the ranks of this node have ended in order."""


class NodeWatch:
    """The thread with which an agent gives signs of life, and looks for those of other agents."""

    def __init__(self, host: str, port: int, node: int, num_nodes: int) -> None:
        """`host` and `port`: where node 0 serves the store. `node`: number of this node, from 0."""
        self._host, self._port, self._node = host, port, node
        self._lost_after_s = float(os.environ.get(LOST_AFTER, LOST_AFTER_S))
        watched = range(1, num_nodes) if node == 0 else range(1)
        self._moved_at = dict.fromkeys(watched, time.monotonic())
        """{node: time of its last sign of life that was seen here, by `time.monotonic`}."""
        self._leaves, self._left = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="watch of the other nodes", daemon=True).start()

    def problem(self) -> str:
        """Which nodes are lost; empty if none is. Asks nobody, and so never waits."""
        silent = [
            str(node)
            for node, moved_at in list(self._moved_at.items())
            if time.monotonic() - moved_at > self._lost_after_s
        ]
        if not silent:
            return ""
        which = f"node {silent[0]} has" if len(silent) == 1 else f"nodes {', '.join(silent)} have"
        return f"{which} given no sign of life for {self._lost_after_s:g} s ({LOST_AFTER})"

    def leave(self) -> None:
        """The ranks of this node have ended in order: from now on the others do not miss it."""
        self._leaves.set()
        self._left.wait(LEAVES_WITHIN_S)

    def _run(self) -> None:
        """Count, and look. A call of the store that fails, or never returns because node 0 is gone,
        is one without a sign of life.
        """
        counts = dict.fromkeys(self._moved_at, 0)
        while not self._left.is_set():
            with contextlib.suppress(RuntimeError):
                # A connection of its own: a call that hangs blocks all others on a connection.
                store = dist.TCPStore(self._host, self._port, wait_for_workers=False)
                while not self._left.is_set():
                    self._look(store, counts)
                    self._leaves.wait(self._lost_after_s / BEATS)
            self._left.wait(self._lost_after_s / BEATS)

    def _look(self, store: dist.Store, counts: dict[int, int]) -> None:
        """Count up, and take in the numbers of the other nodes."""
        if self._leaves.is_set():
            store.add(_key(self._node), ENDED)
            self._left.set()
            return
        store.add(_key(self._node), 1)
        for node, before in counts.items():
            counts[node] = store.add(_key(node), 0)
            if counts[node] >= ENDED:
                self._moved_at[node] = float("inf")
            elif counts[node] != before:
                self._moved_at[node] = time.monotonic()


def _key(node: int) -> str:
    return f"megarl/signs of life of node {node}"
