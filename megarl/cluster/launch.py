"""`megarl launch`: one recipe on one node, under bash or sbatch.

    recipe --launch_plan--> Plan, Gpus --commands--> Ray, torchrun --run--> exit code

Whatever ends it, what it started has ended, and nothing else has.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO

from megarl import config as configs
from megarl.checkpoints.lease import take
from megarl.cluster.launch_plan import (
    USAGE,
    Command,
    Gpus,
    Options,
    Plan,
    deal,
    make_plan,
    parse,
    slurm_host,
)
from megarl.cluster.node_commands import (
    HEAD_OPTIONS,
    node_commands,
    refuse_port,
    refuse_transport,
)
from megarl.cluster.process_env import RAY_SETTINGS
from megarl.config import RunConfig
from megarl.errors import UserError
from megarl.parallel.ports import free_port
from megarl.schema import require

READY_WITHIN_S = 120.0
"""Seconds within which Ray must answer after it is started."""
TRAINERS_END_WITHIN_S = 45.0
RAY_ENDS_WITHIN_S = 15.0
MARK = "MEGARL_LAUNCH"
"""Name of an environment variable set in every process that the launcher starts, to find them
again."""
POLL_S = 0.2
FOLLOWER = """import sys
from megarl.environments.die_with_parent import run
run(int(sys.argv[1]), sys.argv[3:], int(sys.argv[2]))"""
"""Program that becomes the command in its arguments: parent's process id, signal, command."""


def main(arguments: list[str]) -> int:
    """`megarl launch`: start Ray and the trainer ranks, or with --dry-run print the commands.
    Returns the exit code.
    """
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if {"-h", "--help"} & set(words):
        print(USAGE, end="")
        return 0
    try:
        options = parse(arguments)
        refuse_port(options)
        require(
            Path(options.recipe).is_file(),
            f"recipe {options.recipe} does not exist; name a .yaml file (see launch/recipes/)",
        )
        own = os.uname().nodename
        host = own if options.num_nodes else slurm_host(os.environ, own)
        # Only `megarl distill` has a teacher; every other recipe is one of `megarl train`.
        distills = "teacher" in configs.written_tree(options.recipe)
        kind = configs.DistillConfig if distills else configs.RunConfig
        config = configs.load(kind, options.recipe, list(options.overrides))
        try:
            plan = make_plan(config, options)
        except ValueError as error:
            raise ValueError(f"{options.recipe}: {error}") from error
        gpus = find_gpus(plan, options)
        if gpus.ranks:
            refuse_transport(config.weight_sync.transport, gpus)
    except ValueError as error:
        raise UserError(str(error)) from error
    # /tmp and not TMPDIR: Ray's sockets lie inside, and their paths may have 107 characters.
    state = Path(f"/tmp/megarl-{os.getpid()}-{secrets.token_hex(4)}")
    port = options.port or free_port()
    command = "distill" if distills else "train"
    several = (options.num_nodes or 1) > 1
    started = [] if several else commands(plan, gpus, options, command, port=port, state=state)
    facts = {
        "recipe": str(Path(options.recipe).resolve()),
        "folder": plan.folder,
        "host": host,
        "python": sys.executable,
    }
    if options.overrides:
        facts["overrides"] = " ".join(options.overrides)
    # Imported here: the parameter tables import torch, and a mistake is told without it.
    from megarl.cluster.placement_table import placement

    lines = [*(f"{name:9} {value}" for name, value in facts.items()), ""]
    lines += [placement(config, plan, gpus), ""]
    if several:
        lines += node_commands(plan, gpus, options, command)
    else:
        lines += [f"on the CPU: the rollout service, and Ray on port {port}", ""]
        lines += ["commands, each with the same random RAY_AUTH_TOKEN in its environment:"]
        lines += [f"  {one}" for one in started]
    shown = "\n".join(lines)
    elsewhere = host.split(".")[0] != own.split(".")[0]
    there = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none"]
    there += [f"--nodelist={host}", sys.executable, "-m", "megarl", "launch", *arguments]
    if options.dry_run:
        print(shown)
        if elsewhere:
            print(f"\nall of it on {host}, the allocation's host, through:\n  ", end="")
            print(Command({}, there))
        print("\nthe recipe passes; nothing was started")
        return 0
    if elsewhere:
        say(f"this is not the allocation's host; going to {host}")
        os.execvp(there[0], there)  # noqa: S606 - srun itself, no shell
    refuse_owned(config)
    print(shown, file=sys.stderr, flush=True)
    return run(started, state, port)


def refuse_owned(config: RunConfig) -> None:
    """Raise `UserError` if another run owns the run folder: rank 0 takes the folder later, but Ray
    has started by then.
    """
    try:
        # A folder that cannot be written is rank 0's to explain.
        with contextlib.suppress(OSError):
            take(
                Path(config.folder), patience_s=config.training.checkpoint.owner_timeout_s
            ).release()
    except ValueError as error:
        raise UserError(str(error)) from None


def say(text: str) -> None:
    """Print a line on standard error."""
    print(f"megarl launch: {text}", file=sys.stderr, flush=True)


def find_gpus(plan: Plan, options: Options) -> Gpus:
    """Assign GPUs to the plan's processes: those in CUDA_VISIBLE_DEVICES, else all of the node. A
    dry run assumes the nodes that the options name, or one node with as many GPUs as are needed.
    """
    if options.on_cpu:
        return Gpus([], [[] for _ in range(plan.num_engines)], [])
    if options.gpus_per_node:
        count, each = options.num_nodes or 1, options.gpus_per_node
        nodes = [[str(gpu) for gpu in range(each)] for _ in range(count)]
        words = f"--nodes {count} x --gpus-per-node {each} are {count * each}"
        return deal(plan, nodes, words)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        return deal(plan, [gpu_names(visible)], f"CUDA_VISIBLE_DEVICES is {visible}")
    if options.dry_run:
        return deal(plan, [[str(gpu) for gpu in range(plan.num_gpus)]], "")
    listed = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60
        ).stdout
    count = sum(line.startswith("GPU") for line in listed.splitlines())
    return deal(plan, [[str(gpu) for gpu in range(count)]], f"nvidia-smi lists {count} GPUs")


def gpu_names(visible: str) -> list[str]:
    """The GPUs that a CUDA_VISIBLE_DEVICES of `visible` names. Raises `ValueError` for an empty, a
    negative or a repeated name.
    """
    names = [name.strip() for name in visible.split(",")]
    known = [name for name in names if name]
    wrong = {
        "an empty name": len(known) < len(names),
        "a negative number, at which CUDA stops reading": any(name[0] == "-" for name in known),
        "a GPU twice": len(set(known)) < len(known),
    }
    found = [what for what, is_so in wrong.items() if is_so]
    require(
        not found,
        f"CUDA_VISIBLE_DEVICES is '{visible}', which has {' and '.join(found)}; set it to each GPU"
        " once, separated by commas, such as 0,1,2",
    )
    return names


def commands(
    plan: Plan, gpus: Gpus, options: Options, command: str, *, port: int, state: Path
) -> list[Command]:
    """The commands that start Ray's head node, check whether Ray is ready, and start the trainer
    ranks, which run `megarl COMMAND`.
    """
    python = sys.executable
    shared = RAY_SETTINGS | {MARK: str(state)}
    for_engines = [gpu.name for engine in gpus.engines for gpu in engine]
    # Ray deals GPUs out to disaggregated engines only: colocated ones follow the policy's ranks.
    num_dealt = 0 if plan.colocated else len(for_engines)
    ray = [python, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    ray += [f"--port={port}", f"--ray-client-server-port={free_port()}", *HEAD_OPTIONS]
    ray += [f"--num-gpus={num_dealt}", f"--temp-dir={state}/ray"]
    ready = [python, "-m", "ray.scripts.scripts", "health-check", "--address", f"127.0.0.1:{port}"]
    train = [python, "-m", "megarl.parallel.torchrun", "--standalone", "--local-addr", "127.0.0.1"]
    train += ["--nproc-per-node", str(plan.num_ranks), "-m", "megarl", command]
    train += [str(Path(options.recipe).resolve()), *options.overrides]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.name for gpu in gpus.ranks)}
    hidden = {plan.hidden: ""} if plan.hidden else {}
    threads = {"OMP_NUM_THREADS": str(plan.num_threads)}
    return [
        Command(shared | hidden | {"CUDA_VISIBLE_DEVICES": ",".join(for_engines)}, ray),
        Command({}, ready),
        Command(shared | {"RAY_ADDRESS": f"127.0.0.1:{port}"} | visible | threads, train),
    ]


def run(started: Sequence[Command], state: Path, port: int) -> int:
    """Start Ray and the trainer ranks, wait for the ranks, then end all processes. Returns the
    ranks' exit code, or 1 if Ray fails. After an error Ray's logs stay in the folder `state`.
    """
    ray, ready, trainers = started
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    # DeepSpeed looks for ninja beside Python; ranks, Ray and its workers agree on the token.
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    processes: list[tuple[subprocess.Popen[bytes], float]] = []
    code = 143  # a signal's, unless one of the lines below is reached
    try:
        state.mkdir(mode=0o700)
        with (state / "ray.log").open("wb") as log:
            # SIGTERM, on which Ray's head node ends its own processes.
            head = start(ray, environment, signal.SIGTERM, log)
        processes.append((head, RAY_ENDS_WITHIN_S))
        if not wait_for_ray(head, ready, environment | RAY_SETTINGS):
            show_end(state / "ray.log")
            say(
                f"error: Ray was not ready on port {port} within {READY_WITHIN_S:g} s (its last"
                " lines are above); is the port taken (--port), or /tmp full?"
            )
            code = 1
        else:
            ranks = start(trainers, environment, signal.SIGKILL)
            processes.append((ranks, TRAINERS_END_WITHIN_S))
            while ranks.poll() is None and head.poll() is None:
                time.sleep(POLL_S)
            if ranks.poll() is not None:
                code = ranks.returncode if ranks.returncode >= 0 else 128 - ranks.returncode
            else:
                show_end(state / "ray.log")
                say(
                    f"error: Ray ended with exit code {head.returncode} while the trainers were"
                    " running (its last lines are above); ending them"
                )
                code = 1
        return code
    finally:
        hurry = threading.Event()  # what was started is being ended; a second signal: at once
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: hurry.set())
        end(processes, str(state), hurry)
        if code in (0, 2) or code >= 128:
            shutil.rmtree(state, ignore_errors=True)
        else:
            say(f"exit code {code}; Ray's logs are in {state} (remove it when read)")


def start(
    command: Command,
    environment: dict[str, str],
    at_our_end: signal.Signals,
    log: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` in a new session; standard output and standard error go to `log`. The process
    gets the signal `at_our_end` when this one ends, even if this one is killed.
    """
    follower = [sys.executable, "-c", FOLLOWER, str(os.getpid()), str(int(at_our_end))]
    return subprocess.Popen(
        [*follower, *command.words],
        env=environment | command.environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for_ray(
    head: subprocess.Popen[bytes], ready: Command, environment: dict[str, str]
) -> bool:
    """Whether Ray answers within `READY_WITHIN_S`."""
    deadline = time.monotonic() + READY_WITHIN_S
    while head.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            asked = subprocess.run(ready.words, env=environment, capture_output=True, timeout=20)
            if asked.returncode == 0:
                return True
        time.sleep(POLL_S)
    return False


def show_end(log: Path) -> None:
    """Print the last lines of a log file on standard error."""
    lines = log.read_text(errors="replace").splitlines()[-20:]
    print("\n".join(lines), file=sys.stderr)


def end(
    processes: Sequence[tuple[subprocess.Popen[bytes], float]], mark: str, hurry: threading.Event
) -> None:
    """Terminate processes, given as (process, seconds to wait), in reverse order of their start.
    Then kill every process of this launch (see `started_processes`) that still runs. Once `hurry`
    is set, nothing is waited for.
    """
    for process, patience_s in reversed(processes):
        if process.poll() is None:
            process.terminate()
            deadline = time.monotonic() + patience_s
            while process.poll() is None and time.monotonic() < deadline:
                if hurry.wait(POLL_S / 4):
                    break
    leaders = {process.pid for process, _ in processes}
    left = started_processes(mark, leaders)
    for _ in range(10):
        if not left:
            return
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(POLL_S)
        left = started_processes(mark, leaders)
    if left:
        say(f"still running after SIGKILL (a driver holds them): {' '.join(map(str, left))}")


def started_processes(mark: str, leaders: Collection[int]) -> list[int]:
    """Ids of the running processes that this launch started, with all their descendants: those with
    `mark` in their environment, and those in the session of a process in `leaders`.
    """
    import psutil

    found: set[int] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            marked = process.environ().get(MARK) == mark
            if not marked and os.getsid(process.pid) not in leaders:
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found |= {process.pid, *(child.pid for child in process.children(recursive=True))}
    return sorted(found - {os.getpid()})
