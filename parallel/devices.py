"""GPUs as the driver lists them and as torch sees them, and where the two disagree.

Without this a run whose torch sees no GPU would go on, a hundred times slower, on the CPU. Imports
no torch, which `megarl doctor` must do without.
"""

from __future__ import annotations

import functools
import glob
import os
import shutil
import subprocess
from dataclasses import dataclass

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""{major version of CUDA: first major version of a driver that runs it}"""

DEVICE_FILES = "/dev/nvidia[0-9]*"
"""Files that the driver's kernel module makes, one for each GPU."""


@dataclass(frozen=True)
class DriverGpu:
    """A GPU that nvidia-smi lists."""

    name: str
    driver: str
    """Such as 580.65.06."""
    is_cut: bool
    """Whether MIG has cut the GPU into slices."""


def _nvidia_smi(*arguments: str, stderr: int) -> tuple[int, str]:
    """(exit code, output); (-1, why) where it cannot be run."""
    try:
        result = subprocess.run(
            ["nvidia-smi", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
            timeout=20.0,  # nvidia-smi loads the driver if no process has
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return result.returncode, result.stdout


def driver_gpus() -> list[DriverGpu]:
    """What nvidia-smi lists, whatever CUDA_VISIBLE_DEVICES shows; empty where it fails."""
    # A driver before 450 knows no MIG, and answers no query that names it.
    for fields in ("name,driver_version,mig.mode.current", "name,driver_version"):
        query = (f"--query-gpu={fields}", "--format=csv,noheader")
        code, output = _nvidia_smi(*query, stderr=subprocess.DEVNULL)
        if code == -1:
            return []
        rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
        width = fields.count(",") + 1
        gpus = [DriverGpu(r[0], r[1], r[-1] == "Enabled") for r in rows if len(r) == width]
        if gpus:
            return gpus
    return []


def failure() -> str:
    """Why nvidia-smi fails beside an NVIDIA GPU, as after an update of the driver; "" otherwise."""
    files = sorted(glob.glob(DEVICE_FILES))
    if not files or shutil.which("nvidia-smi") is None:
        return ""
    code, output = _nvidia_smi("-L", stderr=subprocess.STDOUT)
    if code == 0:
        return ""
    output = (output.strip().splitlines() or [f"exit code {code}"])[0]
    return f"there is an NVIDIA GPU ({files[0]}), but nvidia-smi fails ({output})"


def are_hidden() -> bool:
    """Whether CUDA_VISIBLE_DEVICES or MEGARL_DEVICE (launch/env.sh reads it too) asks for the
    CPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return os.environ.get("MEGARL_DEVICE") == "cpu" or (
        visible is not None and visible.strip() in ("", "-1", "NoDevFiles")
    )


@functools.cache
def why_unseen(cuda: str | None) -> str:
    """Why torch sees none of this machine's GPUs, and what to do; "" if there are none, or they are
    hidden. Asks the driver once in a process. `cuda`: `torch.version.cuda`.
    """
    if are_hidden():
        return ""
    rather = "or set CUDA_VISIBLE_DEVICES to nothing to run on the CPU"
    gpus = driver_gpus()
    if not gpus:
        problem = failure()
        mended = "reboot, which loads the driver that is installed, or install it again"
        return f"{problem}; {mended}, {rather}" if problem else ""
    listed = f"nvidia-smi lists {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({gpus[0].name})"
    if cuda is None:
        return (
            f"{listed}, but this torch is built for CPUs; make the environment for GPUs with"
            f" MEGARL_DEVICE=cuda bash launch/env.sh, {rather}"
        )
    if problem := driver_problem(gpus[0].driver, cuda):
        return f"{listed}, but torch sees none: {problem}, {rather}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    note = (
        " MIG is on: CUDA sees a slice only by its name (nvidia-smi -L)."
        if any(gpu.is_cut for gpu in gpus)
        else ""
    )
    shown = f"CUDA_VISIBLE_DEVICES is {visible!r}" if visible else "no variable hides them"
    return (
        f"{listed}, but torch for CUDA {cuda} sees none; {shown}.{note} See what"
        f" python -c 'import torch; torch.cuda.init()' says, {rather}"
    )


def driver_problem(driver: str, cuda: str) -> str:
    """Why driver "580.65.06" cannot run a torch for CUDA "12.8", and what to do; "" if it can."""
    major, needed = driver.split(".")[0], OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    if needed is None or not major.isdecimal() or int(major) >= needed:
        return ""
    return (
        f"the driver is {driver}, and torch is built for CUDA {cuda}, which needs driver {needed}"
        " or newer; update the driver"
    )


def beyond(index: int, names: list[str]) -> str:
    """Why the rank with this LOCAL_RANK cannot have a GPU of its own; "" if it can. `names`: of the
    GPUs that torch sees.
    """
    if index < len(names):
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible else ""
    note = ""
    if any("MIG" in name for name in names):
        note = ": of GPUs cut by MIG a process sees one slice, so that a run has one rank"
    return (
        f"rank {index} of this host needs a GPU of its own, but torch sees {len(names)}"
        f"{shown}{note}; start as many ranks on a host as it has GPUs, or make more of them visible"
    )
