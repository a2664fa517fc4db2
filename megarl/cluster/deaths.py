"""Why a Ray actor died, in one line; where a machine's memory was full, also which processes used
it.

Ray ends actors where 95 % of the host's memory are used (`RAY_memory_usage_threshold`), whoever
uses it. Calls of such an actor raise `OutOfMemoryError`, which is no `RayActorError`, with some
2,000 characters.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

import psutil
import ray
from ray.exceptions import OutOfMemoryError, RayActorError

from megarl.private_folder import is_of_this_run

DEATHS = (RayActorError, OutOfMemoryError)
"""The exceptions of a Ray call whose actor is dead or could not be reached."""

NODE = re.compile(r"\(IP: ([^,]+),.*?was ([\d.]+)GB used / ([\d.]+)GB limit")
THRESHOLD = re.compile(r"exceeded threshold of (\d+)B")
PROCESS = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)
NAMED = 3
"""Number of processes that the line names."""
LONGEST_NAME = 40
"""Characters of a process's command line that it shows."""


@dataclass(frozen=True)
class User:
    """A process of the machine whose memory was full, from Ray's list of the largest ones. As text:
    "python train.py (process 12, 3.4 GiB, of ann, not of this run)".
    """

    pid: int
    gib: float
    command: str
    owner: str
    """Name of its user; empty where it cannot be seen from here."""
    is_own: bool
    """Whether it belongs to this run."""

    def __str__(self) -> str:
        whose = "of this run" if self.is_own else f"of {self.owner}, not of this run"
        whose = whose if self.owner or self.is_own else "not visible from here"
        return f"{self.command[:LONGEST_NAME]} (process {self.pid}, {self.gib:.1f} GiB, {whose})"


def why_dead(error: BaseException) -> str:
    """One line, without a line break, that says why an actor died. `error`: Ray's `RayActorError`
    or `OutOfMemoryError`, raised by a Ray call. For a machine whose memory was full the line names
    the largest processes, this run's part, and what to change.
    """
    if isinstance(error, OutOfMemoryError) and (node := NODE.search(str(error))):
        address, used, total = node[1], float(node[2]), node[3]
        users, limit = _users(str(error)), THRESHOLD.search(str(error))
        at = f", limit {int(limit[1]) / 2**30:.1f}" if limit else ""
        own = sum(one.gib for one in users if one.is_own)
        fix = "lower rollout.engine.kv_cache_gib or rollout.num_engines"
        if others_filled_memory(error):
            fix = f"end other programs there, or {fix}"
        return (
            f"Ray ended it as the memory of {address} was full: {used:.1f} of {total} GiB"
            f" used{at}; the largest: {', '.join(map(str, users[:NAMED]))}; this run's part is"
            f" {own:.1f} GiB: {fix}"
        )
    return (str(error).splitlines() or [repr(error)])[0]


def others_filled_memory(error: OutOfMemoryError) -> bool:
    """Whether processes of this run used less than half of the memory in use, on the machine where
    Ray ended an actor because memory was full. False if Ray's message `error` does not tell.
    """
    node = NODE.search(str(error))
    own = sum(one.gib for one in _users(str(error)) if one.is_own)
    return node is not None and own < float(node[2]) / 2


def _users(text: str) -> list[User]:
    """The largest users of memory in Ray's text, the largest first."""
    node = NODE.search(text)
    is_here = node is not None and node[1] == ray.util.get_node_ip_address()
    return [_user(int(pid), float(gib), said, is_here) for pid, gib, said in PROCESS.findall(text)]


def _user(pid: int, gib: float, command: str, is_here: bool) -> User:
    """A process of Ray's list. One that has ended since is taken for one of this run's: Ray has
    ended it, or its parent.
    """
    owner, is_own = "", is_here
    if is_here:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            owner, is_own = process.username(), is_of_this_run(process)
    return User(pid, gib, command, owner, is_own)
