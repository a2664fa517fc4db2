"""Tells a torchrun agent that another node of the job is gone, or that its ranks have failed.

A rank learns of it only in a collective with the ranks of that node. One that waits for rollouts or
for an engine is in none, and would wait until the deadline of what it waits for. Each node's agent
therefore counts up a number of its own in the store of torchrun's rendezvous, which node 0 serves.
Node 0 looks at the numbers of all others, and the others look at that of node 0.

Two threads do it, neither of which is the agent's own: a call of the store on a node that does not
answer may never return, also one that torch makes.
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
"""Name of the environment variable with the seconds of silence after which a node is lost."""
LOST_AFTER_S = 60.0
"""Seconds of silence after which a node is lost, where the environment variable is not set."""
LEAST_S = 2.0
"""Smallest value that the environment variable may have, beside 0 for never."""
BEAT_S, BEATS = 2.0, 15
"""A sign of life comes every `BEAT_S` seconds, or `BEATS` times in the time after which a node is
lost, whichever is more often: agents need not have the same setting."""
JUDGE_S = 0.5
"""Seconds between two checks whether another node is lost or has failed."""
ANSWERS_WITHIN_S = 5.0
"""Seconds in which the store must take in how the ranks of this node have ended, and in which the
agent must call `NodeWatch.problem` once there is a problem; after that it is ended by force."""
ENDS_WITHIN_S = 15.0
"""Seconds to end without force: for the ranks of the other nodes once those of one node have
failed, and for the agent, beyond the seconds that its ranks have to end, once it has heard of a
problem."""
END = 2**40
"""Each node counts its signs of life in a number in the store. When its ranks have ended, the
number grows by this times (1 + their exit code)."""


def lost_after_s(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds of silence after which another node counts as lost, from the variable
    MEGARL_NODE_LOST_AFTER_S of `environment`; 60 if it is not set, infinity for 0 (never). Raises
    `UserError` for a value that is no number or below 2.
    """
    said = environment.get(LOST_AFTER, "") or str(LOST_AFTER_S)
    with contextlib.suppress(ValueError):
        seconds = float(said)
        if seconds == 0:
            return math.inf
        if LEAST_S <= seconds < math.inf:
            return seconds
    raise UserError(
        f"{LOST_AFTER} is {said!r}; set it to {LEAST_S:g} seconds or more, or to 0 for never"
    )


class NodeWatch:
    """Watch over the nodes of a job, one object in the torchrun agent (the process that starts a
    node's ranks) of each node, so that a node does not wait for one that is gone. Threads write
    signs of life to torchrun's store; node 0 looks for those of all others, and the others for
    those of node 0. Where signs of life are missing, or another node's ranks have failed, `problem`
    tells this agent why it is to end. If the agent does not call `problem` within 5 s, or does not
    end in time, a thread ends it by force.
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
        """Start the watch, in two threads. Raises `UserError` if the variable
        MEGARL_NODE_LOST_AFTER_S is wrong.

        Args:
            store: the store of torchrun's rendezvous, by a connection for this object alone.
            node: number of this node, from 0.
            num_nodes: number of nodes.
            shutdown_s: seconds that ranks have to end after a signal.
            end: ends this node's ranks and this process by force; called in a thread.
        """
        self._store, self._node, self._lost_after_s = store, node, lost_after_s()
        self._shutdown_s, self._end = shutdown_s, end
        watched = range(1, num_nodes) if node == 0 else range(1)
        self._moved_at = dict.fromkeys(watched, time.monotonic())
        """{node: time of its last sign of life that was seen here, by `time.monotonic`}."""
        self._failed: dict[int, tuple[int, float]] = {}
        """{node: exit code of its ranks, and the time when it was seen here}."""
        self._said = ""
        """The problem, once it is printed."""
        self._ended = 0
        """What is to be added to this node's number, once its ranks have ended."""
        self._leaves, self._left, self._heard, self._closed = (threading.Event() for _ in range(4))
        self._beat_s = min(BEAT_S, self._lost_after_s / BEATS)  # also where nodes are never lost
        for name, target in (("signs of life", self._look), ("watch of nodes", self._judge)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def problem(self) -> str:
        """Why the agent is to end the ranks of this node and itself, in words, which have been
        printed to stderr then; "" if they may go on. Does not block. The agent calls it each time
        it looks at its ranks.
        """
        if self._said:
            self._heard.set()
        return self._said

    def leave(self, code: int) -> None:
        """Tell the other nodes that the ranks of this node have ended, with the exit code `code`,
        so that they do not miss this node any more. Blocks for at most 5 s. On node 0, whose agent
        serves the store, it blocks 4 s longer for a `code` other than 0, so that the other nodes
        can read the code.
        """
        self._ended = END * (1 + code)
        self._leaves.set()
        if self._left.wait(ANSWERS_WITHIN_S) and code and self._node == 0:
            time.sleep(2 * BEAT_S)

    def close(self) -> None:
        """End the watch's threads, without waiting for them. Call it before another rendezvous,
        which may have other nodes.
        """
        self._closed.set()
        self._leaves.set()

    def _look(self) -> None:
        """The thread that raises this node's number and reads those of the others. A call of the
        store that fails, or does not return because node 0 is gone, gives no sign of life.
        """
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
        """Take in the number of another node."""
        if count >= END:
            self._moved_at[node] = math.inf
            if code := count // END - 1:
                self._failed.setdefault(node, (code, time.monotonic()))
        elif count != before:
            self._moved_at[node] = time.monotonic()

    def _judge(self) -> None:
        """The thread that prints a problem once there is one, and has this agent end."""
        while not (found := self._find_problem()):
            if self._closed.wait(JUDGE_S) or self._left.is_set():
                return
        print(f"megarl: {found}; the ranks of this node are ended", file=sys.stderr, flush=True)
        self._said = found
        if self._heard.wait(ANSWERS_WITHIN_S):
            time.sleep(self._shutdown_s + ENDS_WITHIN_S)
        self._end()

    def _find_problem(self) -> str:
        """What is wrong with the other nodes; empty if nothing is."""
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
