"""Tells a torchrun agent that another node of the job is gone, or that its ranks have failed.

A rank that waits for rollouts is in no collective, and would not notice. Each node's agent
therefore counts up a number in the rendezvous' store on node 0, which watches all others; they
watch node 0. Threads do it, because a call of the store to a dead node may never return.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from megarl.errors import UserError

LOST_AFTER = "MEGARL_NODE_LOST_AFTER_S"
"""Environment variable with the seconds of silence after which a node is lost."""
LOST_AFTER_S = 60.0
LEAST_S = 2.0
"""Its smallest value beside 0, which means never."""
BEAT_S, BEATS = 2.0, 15
"""Signs of life: every `BEAT_S` seconds, or `BEATS` times in `LOST_AFTER` if that is more often."""
ANSWERS_WITHIN_S = 5.0
"""For the store to take in how ranks ended, and for the agent to call `NodeWatch.problem`."""
ENDS_WITHIN_S = 15.0
"""For agents and ranks to end without force."""
END = 2**40
"""When a node's ranks have ended, its number grows by this times (1 + their exit code)."""


def lost_after_s(environment: Mapping[str, str] = os.environ) -> float:
    """Infinity for never. Raises `UserError` for a wrong value."""
    text = environment.get(LOST_AFTER, "") or str(LOST_AFTER_S)
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if seconds == 0:
            return math.inf
        if LEAST_S <= seconds < math.inf:
            return seconds
    raise UserError(
        f"{LOST_AFTER} is {text!r}; set it to {LEAST_S:g} seconds or more, or to 0 for never"
    )


class NodeWatch:
    """Watches over the nodes of a job in each node's agent, which is ended by force if it does not
    react.
    """

    def __init__(
        self,
        store: dist.Store,  # pyright: ignore[reportPrivateImportUsage]
        node: int,
        num_nodes: int,
        *,
        shutdown_s: float,
        end: Callable[[], object],
    ) -> None:
        """Start two threads. `store`: that of torchrun's rendezvous, by a connection of its own.
        `shutdown_s`: for ranks to end after a signal. `end`: ends ranks and this process by force;
        called in a thread. Raises as `lost_after_s`.
        """
        self._store, self._node, self._lost_after_s = store, node, lost_after_s()
        self._shutdown_s, self._end = shutdown_s, end
        watched = range(1, num_nodes) if node == 0 else range(1)
        self._moved_at = dict.fromkeys(watched, time.monotonic())
        """{node: `time.monotonic` of its last sign of life}"""
        self._failed: dict[int, tuple[int, float]] = {}
        """{node: (exit code of its ranks, `time.monotonic` of that)}"""
        self._problem = ""
        self._ended = 0
        """What to add to this node's number, once its ranks have ended."""
        self._leaves, self._left, self._heard, self._closed = (threading.Event() for _ in range(4))
        self._beat_s = min(BEAT_S, self._lost_after_s / BEATS)  # also where nodes are never lost
        for name, target in (("signs of life", self._look), ("watch of nodes", self._judge)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def problem(self) -> str:
        """Why the agent is to end, also printed; "" if it may go on. Does not block."""
        if self._problem:
            self._heard.set()
        return self._problem

    def leave(self, code: int) -> None:
        """Tell the other nodes that this node's ranks have ended. Blocks for at most 5 s, and 4 s
        more on node 0 after a failure, so that others can still read its store.
        """
        self._ended = END * (1 + code)
        self._leaves.set()
        if self._left.wait(ANSWERS_WITHIN_S) and code and self._node == 0:
            time.sleep(2 * BEAT_S)

    def close(self) -> None:
        """Call it before another rendezvous. Does not block."""
        self._closed.set()
        self._leaves.set()

    def _look(self) -> None:
        counts = dict.fromkeys(self._moved_at, 0)
        while not self._closed.is_set() and not self._left.is_set():
            with contextlib.suppress(RuntimeError):
                if self._ended:
                    self._store.add(_key(self._node), self._ended)
                    self._left.set()
                    return
                self._store.add(_key(self._node), 1)
                for node, before in counts.items():
                    counts[node] = self._store.add(_key(node), 0)
                    self._take_in(node, before, counts[node])
            self._leaves.wait(self._beat_s)

    def _take_in(self, node: int, before: int, count: int) -> None:
        if count >= END:
            self._moved_at[node] = math.inf
            if code := count // END - 1:
                self._failed.setdefault(node, (code, time.monotonic()))
        elif count != before:
            self._moved_at[node] = time.monotonic()

    def _judge(self) -> None:
        while not (problem := self._find_problem()):
            if self._closed.wait(0.5) or self._left.is_set():
                return
        print(f"megarl: {problem}; the ranks of this node are ended", file=sys.stderr, flush=True)
        self._problem = problem
        if self._heard.wait(ANSWERS_WITHIN_S):
            time.sleep(self._shutdown_s + ENDS_WITHIN_S)
        self._end()

    def _find_problem(self) -> str:
        now, silent = time.monotonic(), list[str]()
        for node, moved_at in list(self._moved_at.items()):
            code, failed_at = self._failed.get(node, (0, math.inf))
            if now - failed_at > ENDS_WITHIN_S:
                return f"the ranks of node {node} have failed with exit code {code}"
            if now - moved_at > self._lost_after_s:
                silent.append(str(node))
        if not silent:
            return ""
        which = f"node {silent[0]} has" if len(silent) == 1 else f"nodes {', '.join(silent)} have"
        return f"{which} given no sign of life for {self._lost_after_s:g} s ({LOST_AFTER})"


def _key(node: int) -> str:
    return f"megarl/signs of life of node {node}"
