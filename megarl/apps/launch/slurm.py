"""Slurm: the nodes of the allocation that this process is in, and `srun` as the way to start a
process on one of them.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from megarl.schema import require

NUMBERS = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
NAME = rf"(?:[\w.-]|{NUMBERS})+"
"""Regular expression of a name in a list of nodes: it may have ranges of numbers in brackets."""


def allocated_hosts(environment: Mapping[str, str], own: str) -> list[str]:
    """The hosts of the Slurm allocation in their order, from Slurm's variables in `environment`;
    [own] outside Slurm. Raises `ValueError` if Slurm started several copies of this command.
    """
    if not environment.get("SLURM_JOB_ID"):
        return [own]
    tasks = environment.get("SLURM_NTASKS") or "1"
    in_step = environment.get("SLURM_STEP_ID", "") not in ("", str(2**32 - 5))  # the batch script
    require(
        tasks == "1" or not in_step or environment.get("SLURM_STEP_NUM_TASKS") == "1",
        f"srun started this command {tasks} times; start it once: srun --nodes=1 --ntasks=1",
    )
    return expanded_hosts(environment.get("SLURM_JOB_NODELIST") or own)


def expanded_hosts(nodes: str) -> list[str]:
    """Host names of a list as Slurm writes it: "gpu[08-10],login" is gpu08, gpu09, gpu10, login.

    Raises `ValueError` for a list that cannot be read.
    """
    require(
        re.fullmatch(f"{NAME}(,{NAME})*", nodes) is not None,
        f"SLURM_JOB_NODELIST is '{nodes[:80]}', which is not a list of nodes as Slurm writes it",
    )
    return [host for part in re.finditer(NAME, nodes) for host in _expanded_part(part[0])]


def _expanded_part(part: str) -> list[str]:
    """The host names of a name with at most one number range in each pair of brackets."""
    found = re.search(r"\[([\d,-]+)\]", part)
    if found is None:
        return [part]
    rest = _expanded_part(part[found.end() :]) or [""]
    hosts = []
    for one in found[1].split(","):
        first, _, last = one.partition("-")
        for number in range(int(first), int(last or first) + 1):
            # "08" keeps its width.
            name = f"{part[: found.start()]}{number:0{len(first)}d}"
            hosts += [name + end for end in rest]
    return hosts


def requeue(job: str) -> str:
    """Put the running job with the number `job`, this one, back into Slurm's queue; returns what
    was done, or why nothing was, in words. A job that is being cancelled stays so.
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
        told = getattr(error, "stderr", None) or str(error)
        return f"job {job} could not be put back into the queue: {told.strip()}"
    return f"job {job} is put back into the queue"


def early_kill(environment: Mapping[str, str], save_within_s: float) -> str:
    """A warning, or "": Slurm kills a cancelled job sooner after its SIGTERM (`KillWait`) than a
    checkpoint may take, `training.checkpoint.save_within_s`.
    """
    if not environment.get("SLURM_JOB_ID"):
        return ""
    try:
        shown = _scontrol("show", "config", timeout_s=5)
    except (OSError, subprocess.SubprocessError):
        return ""  # no scontrol, or no answer: nothing is known, and nothing depends on it
    found = re.search(r"^KillWait\s*=\s*(\d+)", shown, re.MULTILINE)
    if found is None or int(found[1]) >= save_within_s:
        return ""
    return (
        f"warning: Slurm kills a job {found[1]} s after scancel's SIGTERM (KillWait), but"
        f" training.checkpoint.save_within_s is {save_within_s:g}: end a job of sbatch with scancel"
        f" --batch --signal=TERM {environment['SLURM_JOB_ID']}, which does not kill it"
    )


def _scontrol(*words: str, timeout_s: float = 60) -> str:
    """Standard output of scontrol."""
    done = subprocess.run(
        ["scontrol", *words],
        capture_output=True,
        encoding="utf-8",
        errors="replace",  # what a site has written
        timeout=timeout_s,
        check=True,
    )
    return done.stdout


def srun(host: str, words: Sequence[str]) -> list[str]:
    """The command that runs `words` once on `host`, a node of the allocation, beside other steps.

    The step may use all of the node: what it gets of GPUs and threads is in `words`.
    """
    options = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mem=0"]
    return ["srun", *options, "--cpu-bind=none", "--export=ALL", *words]
