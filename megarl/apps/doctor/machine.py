"""Checks of `megarl doctor` on the machine: GPUs, memory, disk, left-over processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import psutil

from megarl.apps.doctor.findings import GIB, Finding, Status, ask_python
from megarl.host_memory import free_memory
from megarl.parallel.devices import why_unseen
from megarl.trainer import threads

DEVICES = """
import json, torch
found = []
for index in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(index)
    bfloat16 = torch.cuda.get_device_capability(index) >= (8, 0)
    found.append([torch.cuda.get_device_name(index), free, total, bfloat16])
print(json.dumps([torch.version.cuda, found]))
"""
"""Program that prints torch's CUDA version, and for each GPU its name, free and total bytes, and
whether it computes in bfloat16, as JSON.
"""


def check_accelerators() -> list[Finding]:
    """List the GPUs with their free memory, or the CPU cores if there is no GPU."""
    cores = f"{threads.cores()} CPU cores"
    driver = shutil.which("nvidia-smi") is not None
    answer = ask_python(DEVICES)
    if answer.code != 0:
        fix = (
            "see nvidia-smi, and python -c 'import torch; torch.cuda.init()'"
            if driver
            else "bash launch/env.sh"
        )
        return [answer.failure("accelerators", fix)]
    build, devices = json.loads(answer.output.splitlines()[-1])
    if not devices:
        if problem := why_unseen(build):
            found, _, fix = problem.partition("; ")
            return [Finding("accelerators", "FAIL", f"{cores}; {found}", fix)]
        return [Finding("accelerators", "ok", f"no GPU; {cores}: small models on CPU")]
    findings = []
    for index, (name, free, total, has_bfloat16) in enumerate(devices):
        busy = free < 0.9 * total
        found = f"{name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        fix = (
            "another process uses it (nvidia-smi); choose other GPUs with CUDA_VISIBLE_DEVICES"
            if busy
            else ""
        )
        if not has_bfloat16:
            found += ", no bfloat16"
            fix = fix or "set training.precision and rollout.engine.dtype to float16"
        status: Status = "warn" if busy or not has_bfloat16 else "ok"
        findings.append(Finding(f"GPU {index}", status, found, fix))
    return findings


def check_memory() -> list[Finding]:
    """Whether there is enough host memory, within the container's memory limit; a warning where it
    is there, but others use it.
    """
    free, total = free_memory()
    status: Status = "FAIL" if total < 6 * GIB and free < 2 * GIB else "warn"
    status = status if free < 6 * GIB else "ok"
    fix = (
        "free memory or raise the container's limit: the quick start needs about 6 GiB"
        if status != "ok"
        else ""
    )
    return [Finding("memory", status, f"{free / GIB:.1f} of {total / GIB:.1f} GiB free", fix)]


def check_shared_memory() -> list[Finding]:
    """Whether /dev/shm, which Ray's object store and vLLM's ranks use, has free space."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return [Finding("/dev/shm", "FAIL", str(error), "mount a tmpfs at /dev/shm")]
    fix = "give the container more, for example docker run --shm-size=8g"
    if free < GIB:
        return [
            Finding(
                "/dev/shm", "warn", f"{free / GIB:.2f} GiB free: Ray falls back to slow files", fix
            )
        ]
    return [Finding("/dev/shm", "ok", f"{free / GIB:.1f} GiB free")]


def check_disk() -> list[Finding]:
    """Whether the current folder (for run folders) and the temporary folder (for sockets and logs)
    are writable and have free space.
    """
    findings = []
    for name, folder in (
        ("disk (this folder)", os.getcwd()),
        ("disk (temporary)", tempfile.gettempdir()),
    ):
        free = shutil.disk_usage(folder).free
        writable = os.access(folder, os.W_OK)
        status: Status = (
            "FAIL" if free < 64 * 2**20 or not writable else "warn" if free < 10 * GIB else "ok"
        )
        found = f"{free / GIB:.1f} GiB free in {folder}" + ("" if writable else ", not writable")
        fix = "" if status == "ok" else "free some: a checkpoint takes 14 to 18 bytes a parameter"
        if not writable:
            fix = "go to a folder that you may write to"
        findings.append(Finding(name, status, found, fix))
    return findings


def check_leftovers() -> list[Finding]:
    """Find processes of earlier runs that still run: those of this user whose parent process has
    ended.
    """
    orphans, running = [], 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, IndexError):
            if (
                process.uids().real != os.getuid()
                or process.pid == os.getpid()
                or process.status() == psutil.STATUS_ZOMBIE
            ):
                continue
            kind = _kind_of(process.cmdline())
            if not kind:
                continue
            parent = process.parent()
            if parent is None or parent.pid == 1:
                orphans.append((process.pid, kind))
            else:
                running += 1
    alive = f"{running} belong to runs under way" if running else "no run is under way"
    if not orphans:
        return [Finding("left-over processes", "ok", f"none ({alive})")]
    kinds = ", ".join(f"{kind} {pid}" for pid, kind in orphans[:6]) + (
        " ..." if len(orphans) > 6 else ""
    )
    fix = f"if no `ray start` of yours: kill {' '.join(str(pid) for pid, _ in orphans)}"
    return [
        Finding(
            "left-over processes",
            "warn",
            f"{len(orphans)} without a parent: {kinds} ({alive})",
            fix,
        )
    ]


def _kind_of(command: list[str]) -> str:
    """Which part of a run (such as Ray or vLLM) a command line belongs to; empty for any other
    command, `megarl doctor` included.
    """
    name = Path(command[0]).name
    if name in ("gcs_server", "raylet"):
        return name
    if name.startswith("ray::"):
        return "Ray worker"
    if name.startswith("VLLM::"):
        return "vLLM engine"
    megarl = [index for index, word in enumerate(command) if Path(word).name == "megarl"]
    if megarl and set(command[megarl[0] + 1 : megarl[0] + 2]) & {"train", "distill", "sft", "eval"}:
        return "megarl"
    return ""
