"""Programs with which `megarl doctor` tries communication between processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megarl.apps.doctor.findings import Finding, ask_python


class TrialProgram(NamedTuple):
    """A Python program whose exit code 0 means success, what is then said, and the advice where it
    fails.
    """

    program: str
    good: str
    fix: str


MEMFD = """
import os, subprocess
with open(os.memfd_create("megarl-doctor"), "wb", buffering=0) as file:
    file.write(b"weights!")
    subprocess.run(["cat", f"/proc/{os.getpid()}/fd/{file.fileno()}"], check=True)
"""
GLOO = """
import datetime, os, tempfile, torch, torch.distributed as dist
with tempfile.TemporaryDirectory() as folder:
    child = os.fork()
    # A file as store: a port that is free now may be taken by Ray a moment later.
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=int(child == 0), world_size=2)
    value = torch.tensor([1.0 if child else 2.0])
    dist.all_reduce(value)
    assert value.item() == 3.0, value
    dist.barrier()
    if not child:
        os._exit(0)
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
RAY = """
import os, secrets, shutil, tempfile
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
import ray
# In /tmp, not TMPDIR: the paths of Ray's sockets may have 107 characters at most. Inside of it,
# since Ray lets all users write to the folder that it is given.
folder = tempfile.mkdtemp(prefix="megarl-doctor-", dir="/tmp")
ray.init(address="local", num_cpus=1, num_gpus=0, include_dashboard=False,
         object_store_memory=80 * 2**20, logging_level="ERROR",
         log_to_driver=False, _temp_dir=folder + "/ray")
def pid():
    return os.getpid()
assert ray.get(ray.remote(pid).remote(), timeout=60) != os.getpid()
ray.shutdown()
shutil.rmtree(folder, ignore_errors=True)
"""
VLLM = """
import vllm
from vllm.v1.engine.async_llm import AsyncLLM
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
# vLLM itself does not fail where its kernels cannot be loaded; this line then says why.
if current_platform.is_cpu() and not hasattr(torch.ops._C, "init_cpu_memory_env"):
    import vllm._C
"""
TRIALS = {
    "memfd_create": TrialProgram(
        MEMFD,
        "weights can be shared between processes",
        "allow memfd_create and mount /proc without hidepid (a sandbox or seccomp profile"
        " forbids it)",
    ),
    "gloo, two ranks": TrialProgram(
        GLOO,
        "all-reduce right",
        "check that this host's name resolves (getent hosts $(uname -n)); GLOO_SOCKET_IFNAME=lo"
        " names an interface",
    ),
    "Ray starts and stops": TrialProgram(
        RAY,
        "and runs a task",
        "look at the logs in /tmp/megarl-doctor-*/ray/session_latest/logs; /tmp must be writable"
        " and not full",
    ),
    "vLLM imports": TrialProgram(
        VLLM,
        "with its compiled kernels",
        "bash launch/env.sh; for libnuma: install libnuma1 (Debian) or numactl-libs (Fedora); the"
        " whole error: python -c 'import vllm'",
    ),
}
"""{name of a check: its program}"""


def try_program(name: str) -> Iterator[Finding]:
    """Check of `megarl doctor`: `ok` if the program `name` of `TRIALS` succeeds, else `FAIL`."""
    trial = TRIALS[name]
    yield ask_python(trial.program).finding(trial.good, trial.fix)
