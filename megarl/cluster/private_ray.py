"""A Ray of a run's own on this machine, whose files are in the run's folder.

Ray's own choice, /tmp/ray, is one folder for all users of the machine, and Ray sets mode 777 on any
that it is given: it is given one inside of the run's, which is closed to other users.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from megarl.console import say
from megarl.private_folder import refuse_open

RAY_ATTEMPTS = 3
"""Times that Ray is started before its failure ends the run."""

_leaves_group = False
"""Whether a process that is forked now leaves the process group of this one."""


def _leave() -> None:
    if _leaves_group:
        os.setpgid(0, 0)


# Runs in processes that subprocess starts with a preexec_fn, as Ray starts its own.
os.register_at_fork(after_in_child=_leave)


@contextlib.contextmanager
def own_process_groups() -> Iterator[None]:
    """Ray's processes that are started in the block get process groups of their own, which what
    they start is in too. torchrun sends SIGTERM to the whole process group of each rank: engines in
    that group would end before the rank has finished the step and saved its checkpoint.
    """
    global _leaves_group
    _leaves_group = True
    try:
        yield
    finally:
        _leaves_group = False


def start_ray(folder: Path, **options: Any) -> None:
    """Start a Ray of its own on this machine, with its files in the private folder `folder` and the
    options of `ray.init`. Ray gives itself 30 s, which cannot be set and which a busy machine
    exceeds: then it is started again. Raises `UserError` if Ray opens the folder to other users.
    """
    for attempt in range(1, RAY_ATTEMPTS + 1):
        try:
            # Without "local", Ray joins whatever `ray start` last started on this machine.
            with own_process_groups():
                ray.init(address="local", _temp_dir=f"{folder}/ray", **options)
            refuse_open(folder)
            return
        except Exception as error:
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == RAY_ATTEMPTS:
                raise
            say("megarl: warning: Ray did not start within 30 s; starting it again")
