"""Checks of `megarl doctor` on communication: ports, shared memory, gloo, Ray, the hub."""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from megarl.apps.doctor.findings import Finding, ask_python, run_program
from megarl.data.hub import hub_state


def check_port() -> list[Finding]:
    """Whether a free port on localhost can be opened and connected to."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=3):
                pass
    except OSError as error:
        fix = "bring up the loopback interface: ip link set lo up"
        return [Finding("ports", "FAIL", f"localhost cannot be connected to: {error}", fix)]
    return [Finding("ports", "ok", "a free port on localhost answers")]


def check_memfd() -> list[Finding]:
    """Whether another process can read an anonymous memory file, as `shared_memory` requires."""
    fix = (
        "allow memfd_create and mount /proc without hidepid (a sandbox or seccomp profile"
        " forbids it)"
    )
    try:
        with open(os.memfd_create("megarl-doctor"), "r+b") as file:
            file.write(b"weights!")
            file.flush()
            with mmap.mmap(file.fileno(), 8):
                path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
                answer = run_program(
                    [
                        sys.executable,
                        "-I",
                        "-S",
                        "-c",
                        f"print(open({path!r}, 'rb').read().decode())",
                    ],
                    within_s=10,
                )
    except (OSError, AttributeError, ValueError) as error:
        return [Finding("memfd_create", "FAIL", str(error), fix)]
    if answer.output != "weights!":
        return [
            replace(
                answer.failure("memfd_create", fix),
                found=f"another process cannot read it: {answer.last_error}",
            )
        ]
    return [Finding("memfd_create", "ok", "weights can be shared between processes")]


GLOO = """
import datetime, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
wait = datetime.timedelta(seconds=60)  # longer than this program is given
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
assert value.item() == 3.0, value
dist.barrier()
print("sum", value.item())
"""
"""Program of one of two gloo ranks: all-reduce, then barrier."""


def check_gloo() -> list[Finding]:
    """Whether two gloo processes on this host can all-reduce."""
    started_at = time.monotonic()
    # A file as store: a port that is free now may be taken by Ray a moment later.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        meet = os.path.join(folder, "store")
        answers = list(
            pool.map(lambda rank: ask_python(GLOO, rank, meet, CUDA_VISIBLE_DEVICES=""), ("0", "1"))
        )
    bad = [answer for answer in answers if answer.code != 0]
    if bad:
        fix = (
            "check that this host's name resolves (getent hosts $(uname -n)); GLOO_SOCKET_IFNAME=lo"
            " names an interface"
        )
        return [bad[0].failure("gloo, two ranks", fix)]
    return [
        Finding(
            "gloo, two ranks",
            "ok",
            f"all-reduce right, {time.monotonic() - started_at:.0f} s with start-up",
        )
    ]


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
print("worker", found)
"""
"""Program that starts Ray, runs a task in a worker and stops Ray."""


def check_ray() -> list[Finding]:
    """Whether Ray starts, runs a task in a worker and stops."""
    started_at = time.monotonic()
    # In /tmp, not TMPDIR: the paths of Ray's sockets may have 107 characters at most.
    folder = tempfile.mkdtemp(prefix="megarl-doctor-", dir="/tmp")
    # Inside, since Ray lets all users write to the folder that it is given.
    answer = ask_python(RAY, f"{folder}/ray", RAY_AUTH_TOKEN=secrets.token_hex(32))
    if answer.code == 0:
        shutil.rmtree(folder, ignore_errors=True)
        return [Finding("Ray starts and stops", "ok", f"in {time.monotonic() - started_at:.0f} s")]
    fix = (
        f"look at the logs in {folder}/ray/session_latest/logs; /tmp must be writable and not full"
    )
    return [answer.failure("Ray starts and stops", fix)]


def check_hub() -> list[Finding]:
    """Whether the Hugging Face hub answers; a run does not need it."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(hub_state()), daemon=True)
    thread.start()
    thread.join(3.0)
    state = found[0] if found else "unreachable"
    shown = {
        "online": "answers",
        "offline": "not asked: HF_HUB_OFFLINE is set",
        "unreachable": (
            "no answer within 3 s; models and data by path work, HF_ENDPOINT names a mirror"
        ),
    }
    return [Finding("Hugging Face hub", "ok", shown[state])]
