"""Slurm: the hosts of the allocation in which this process runs, and `srun` as the way to start a
process on one of them.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from megarl.settings.schema import require


def allocated_hosts(environment: Mapping[str, str], host: str) -> list[str]:
    """The host names of the Slurm allocation in its order, from Slurm's variables in `environment`
    (such as `os.environ`); [host] outside Slurm, with `host` the name of this host. Raises
    `ValueError` if Slurm started several copies of this command, or if `scontrol` cannot list the
    hosts.
    """
    if not environment.get("SLURM_JOB_ID"):
        return [host]
    tasks = environment.get("SLURM_NTASKS") or "1"
    in_step = environment.get("SLURM_STEP_ID", "") not in ("", str(2**32 - 5))  # the batch script
    require(
        tasks == "1" or not in_step or environment.get("SLURM_STEP_NUM_TASKS") == "1",
        f"srun started this command {tasks} times; start it once: srun --nodes=1 --ntasks=1",
    )
    nodes = environment.get("SLURM_JOB_NODELIST") or host
    if not {",", "["} & set(nodes):
        return [nodes]
    try:
        return _scontrol("show", "hostnames", nodes).split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"scontrol cannot say which nodes SLURM_JOB_NODELIST '{nodes[:80]}' has"
            f" ({_told(error)}); put Slurm's programs on PATH"
        ) from error


def requeue(job: str) -> str:
    """Put this running job, whose number in Slurm is `job`, back into Slurm's queue. Returns a
    sentence for the user: what was done, or why nothing was. A job that is being cancelled is not
    put back.
    """
    try:
        shown = _scontrol("--oneliner", "show", "job", job)
        state = re.search(r"\bJobState=(\S+)", shown)
        if state is None or state[1] != "RUNNING":
            return (
                f"job {job} is {state[1] if state else 'unknown'}, and not put back into the queue"
            )
        _scontrol("requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        return f"job {job} could not be put back into the queue: {_told(error)}"
    return f"job {job} is put back into the queue"


def _told(error: Exception) -> str:
    return (getattr(error, "stderr", None) or str(error)).strip()


def _scontrol(*words: str) -> str:
    """Standard output of scontrol."""
    done = subprocess.run(
        ["scontrol", *words],
        capture_output=True,
        encoding="utf-8",
        errors="replace",  # what a site has written
        timeout=60,
        check=True,
    )
    return done.stdout


def srun(host: str, words: Sequence[str]) -> list[str]:
    """The command, as a list of words without a shell, that runs the command `words` once on
    `host`, a node of the allocation, beside other job steps.

    The step may use all of the node: its GPUs and threads have to be set by `words` itself.
    """
    options = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mem=0"]
    return ["srun", *options, "--cpu-bind=none", "--export=ALL", *words]
