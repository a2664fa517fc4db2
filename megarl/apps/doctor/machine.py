"""Checks of `megarl doctor` on the machine: GPUs, memory, disk."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator

from megarl.apps.doctor.findings import GIB, Finding, ask_python
from megarl.parallel.devices import why_unseen
from megarl.system.host_memory import free_memory
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
"""Python program that prints one line of JSON, [torch's CUDA version or null, [[name, free bytes,
total bytes, whether it computes in bfloat16], ...]], with an entry for each GPU.
"""


def check_accelerators() -> Iterator[Finding]:
    """A finding for each GPU with its free memory, or one for the CPU cores if there is no GPU. The
    status is `FAIL` where there is a GPU that torch cannot use, `warn` where other processes use a
    GPU or it lacks bfloat16, else `ok`.
    """
    cores = f"{threads.cores()} CPU cores"
    answer = ask_python(DEVICES)
    if answer.code != 0:
        by_hand = "see nvidia-smi, and python -c 'import torch; torch.cuda.init()'"
        yield answer.finding("", by_hand if shutil.which("nvidia-smi") else "bash launch/env.sh")
        return
    build, devices = json.loads(answer.output.splitlines()[-1])
    if not devices:
        found, _, fix = why_unseen(build).partition("; ")
        if found:
            yield Finding("FAIL", f"{cores}; {found}", fix)
        else:
            yield Finding("ok", f"no GPU; {cores}: small models on CPU")
    for index, (name, free, total, has_bfloat16) in enumerate(devices):
        found = f"{name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        fix = ""
        if not has_bfloat16:
            found += ", no bfloat16"
            fix = "set training.precision and rollout.engine.dtype to float16"
        if free < 0.9 * total:
            fix = "another process uses it (nvidia-smi); choose others with CUDA_VISIBLE_DEVICES"
        yield Finding("warn" if fix else "ok", found, fix, f"GPU {index}")


def check_memory() -> Iterator[Finding]:
    """Free host memory within the container's memory limit: `ok` from 6 GiB on, `FAIL` if less than
    2 GiB are free and the total is below 6 GiB, otherwise `warn`.
    """
    free, total = free_memory()
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free >= 6 * GIB:
        yield Finding("ok", found)
        return
    fix = "free memory or raise the container's limit: the quick start needs about 6 GiB"
    yield Finding("FAIL" if total < 6 * GIB and free < 2 * GIB else "warn", found, fix)


def check_shared_memory() -> Iterator[Finding]:
    """/dev/shm,
    which Ray's object store and vLLM's ranks use: `ok` with a GiB of free space or more, `warn`
    with less, `FAIL` if there is no /dev/shm.
    """
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        yield Finding("FAIL", str(error), "mount a tmpfs at /dev/shm")
        return
    if free < GIB:
        fix = "give the container more, for example docker run --shm-size=8g"
        yield Finding("warn", f"{free / GIB:.2f} GiB free: Ray falls back to slow files", fix)
    else:
        yield Finding("ok", f"{free / GIB:.1f} GiB free")


def check_disk() -> Iterator[Finding]:
    """Free space, for the current folder (in which run folders are made) and for the temporary
    folder (for sockets and logs): `warn` below 10 GiB, `FAIL` below 64 MiB or where the folder is
    not writable, else `ok`.
    """
    for name, folder in (("this folder", os.getcwd()), ("temporary", tempfile.gettempdir())):
        free, name = shutil.disk_usage(folder).free, f"disk ({name})"
        found = f"{free / GIB:.1f} GiB free in {folder}"
        if not os.access(folder, os.W_OK):
            fix = "go to a folder that you may write to"
            yield Finding("FAIL", f"{found}, not writable", fix, name)
        elif free < 10 * GIB:
            fix = "free some: a checkpoint takes 14 to 18 bytes a parameter"
            yield Finding("FAIL" if free < 64 * 2**20 else "warn", found, fix, name)
        else:
            yield Finding("ok", found, check=name)
