"""Checks of `megarl doctor` on communication: shared memory, gloo, Ray."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator

from megarl.apps.doctor.findings import Finding, ask_python, run_program


def check_memfd() -> Iterator[Finding]:
    """Check of `megarl doctor`: yields one finding (status, what was found, advice), `ok` if
    another process can read this process's anonymous memory file (memfd_create) through /proc, as
    the transfer of weights to engines by shared memory requires, otherwise `FAIL`, or `late` if
    that takes too long.
    """
    fix = (
        "allow memfd_create and mount /proc without hidepid (a sandbox or seccomp profile"
        " forbids it)"
    )
    try:
        with open(os.memfd_create("megarl-doctor"), "wb", buffering=0) as file:
            file.write(b"weights!")
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
            answer = run_program(["cat", path], within_s=10)
    except OSError as error:
        yield Finding("FAIL", str(error), fix)
        return
    yield answer.finding("weights can be shared between processes", fix)


def check_cumem() -> Iterator[Finding]:
    """Check of `megarl doctor`: yields one finding (status, what was found, advice), `warn` if the
    environment variable NCCL_CUMEM_ENABLE is 0, as NCCL before 2.22 needed beside vLLM, else `ok`.
    """
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        found = (
            "NCCL_CUMEM_ENABLE is 0: NVLink between nodes is not used, and ranks whose values of it"
            " differ do not connect"
        )
        yield Finding("warn", found, "unset it; NCCL 2.22 and newer do not need it beside vLLM")
    else:
        yield Finding("ok", "cuMem is not switched off")


GLOO = """
import datetime, os, sys, torch, torch.distributed as dist
child = os.fork()
wait = datetime.timedelta(seconds=60)  # longer than this program is given
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=int(child == 0), world_size=2, timeout=wait)
value = torch.tensor([1.0 if child else 2.0])
dist.all_reduce(value)
assert value.item() == 3.0, value
dist.barrier()
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]) if child else 0)
"""
"""Python program of two gloo ranks (all-reduce, then barrier); its one argument is the path of a
new file for torch's FileStore. Exit code 0 means success."""


def check_gloo() -> Iterator[Finding]:
    """Check of `megarl doctor`: yields one finding (status, what was found, advice), `ok` if two
    gloo processes on this host can all-reduce, otherwise `FAIL`, or `late` if that takes too long.
    Blocks for at most 45 s.
    """
    # A file as store: a port that is free now may be taken by Ray a moment later.
    with tempfile.TemporaryDirectory() as folder:
        answer = ask_python(GLOO, os.path.join(folder, "store"), CUDA_VISIBLE_DEVICES="")
    fix = (
        "check that this host's name resolves (getent hosts $(uname -n)); GLOO_SOCKET_IFNAME=lo"
        " names an interface"
    )
    yield answer.finding("all-reduce right", fix)


RAY = """
import os, sys, ray
ray.init(address="local", num_cpus=1, num_gpus=0, include_dashboard=False,
         object_store_memory=80 * 2**20, logging_level="ERROR",
         log_to_driver=False, _temp_dir=sys.argv[1])
def pid():
    return os.getpid()
found = ray.get(ray.remote(pid).remote(), timeout=60)
assert found != os.getpid()
ray.shutdown()
"""
"""Python program that starts Ray, runs a task in a worker and stops Ray; its one argument is the
folder for Ray's sockets and logs. Exit code 0 means success."""


def check_ray() -> Iterator[Finding]:
    """Check of `megarl doctor`: yields one finding (status, what was found, advice), `ok` if Ray
    starts on this host, runs a task in a worker and stops, otherwise `FAIL`, or `late` if that
    takes too long. Blocks for at most 45 s; Ray's logs are kept in /tmp after a failure.
    """
    # In /tmp, not TMPDIR: the paths of Ray's sockets may have 107 characters at most.
    folder = tempfile.mkdtemp(prefix="megarl-doctor-", dir="/tmp")
    # Inside, since Ray lets all users write to the folder that it is given.
    answer = ask_python(RAY, f"{folder}/ray", RAY_AUTH_TOKEN=secrets.token_hex(32))
    if answer.code == 0:
        shutil.rmtree(folder, ignore_errors=True)
    fix = (
        f"look at the logs in {folder}/ray/session_latest/logs; /tmp must be writable and not full"
    )
    yield answer.finding("and runs a task", fix)
