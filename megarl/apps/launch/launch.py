"""`megarl launch`: one recipe on this machine, or on all nodes of a Slurm allocation.

    recipe --launch_plan--> Plan, Gpus --launch_processes--> processes --launch_run--> exit code

Whatever ends it, what it started has ended, and nothing else has.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl import config as configs
from megarl.apps.launch.launch_plan import (
    Gpus,
    Options,
    Plan,
    ProgramCommand,
    deal,
    deal_cpu,
    make_plan,
    make_supervised_plan,
    parse_options,
)
from megarl.apps.launch.launch_processes import (
    RAY_PORT,
    TORCH_PORT,
    Addresses,
    Process,
    by_hand,
    processes,
    refuse_port,
    refuse_transport,
)
from megarl.apps.launch.launch_run import Launch, Launcher, announce
from megarl.apps.launch.slurm import allocated_hosts, early_kill, requeue, srun
from megarl.checkpoints.lease import take
from megarl.config import RunConfig, SftConfig
from megarl.console import result
from megarl.errors import UserError
from megarl.parallel.launcher import free_port
from megarl.schema import require
from megarl.signals import SAVE_WITHIN_S, EndedBySignal

SECTIONS = {"teacher": configs.DistillConfig, "demonstrations": SftConfig}
"""{section of a recipe: the configuration that alone has it}."""


def main(arguments: list[str]) -> int:
    """`megarl launch`: start Ray and the trainer ranks, or with --dry-run print the commands.
    Returns the exit code.
    """
    try:
        options = parse_options(arguments)
        written = configs.written_tree(options.recipe)
        own = os.uname().nodename
        planned = options.num_nodes is not None  # for nodes that this process need not be on
        hosts = [own] if planned else allocated_hosts(os.environ, own)
        num_nodes = options.num_nodes or len(hosts)
        refuse_port(options, num_nodes)
        # Every recipe without a section that only another command has is one of `megarl train`.
        kind = next((one for section, one in SECTIONS.items() if section in written), RunConfig)
        command = configs.COMMANDS[kind]
        config = configs.read(kind, options.recipe, options.overrides, announce)
        require(
            not options.requeue or config.resume is not False,
            "--requeue needs a run that goes on from its checkpoint; set resume to auto",
        )
        require(
            not options.requeue or options.dry_run or "SLURM_JOB_ID" in os.environ,
            "--requeue is for a job of Slurm, and this is none; leave it out",
        )
        plan = plan_of(config, options)
        gpus = find_gpus(plan, options, num_nodes)
        if isinstance(config, RunConfig):
            refuse_transport(config.weight_sync.transport, gpus)
    except ValueError as error:
        raise UserError(str(error)) from error
    by_us = not planned or num_nodes == 1
    at = addresses(options, hosts) if by_us else Addresses(ray_port=options.port or RAY_PORT)
    started = processes(plan, gpus, options, command, at)
    facts = {
        "recipe": str(Path(options.recipe).resolve()),
        "folder": plan.folder,
        "host": " ".join(hosts),
        "python": sys.executable,
    }
    if options.overrides:
        facts["overrides"] = " ".join(options.overrides)
    # Imported here: the parameter tables import torch, and a mistake is told without it.
    from megarl.apps.launch.placement_table import placement

    lines = [*(f"{name:9} {value}" for name, value in facts.items()), ""]
    lines += [placement(config, plan, gpus), ""]
    lines += shown_processes(started, hosts, at) if by_us else by_hand(started, num_nodes)
    elsewhere = hosts[0].split(".")[0] != own.split(".")[0]
    there = srun(hosts[0], [sys.executable, "-m", "megarl", "launch", *arguments])
    if options.dry_run:
        if elsewhere:
            lines += ["", f"started from {hosts[0]}, the allocation's first host, through:"]
            lines += [f"  {ProgramCommand({}, there)}"]
        result("\n".join([*lines, "", "the recipe passes; nothing was started"]))
        return 0
    if elsewhere:
        announce(f"this is not the allocation's first host; going to {hosts[0]}")
        os.execvp(there[0], there)  # noqa: S606 - srun itself, no shell
    refuse_owned(config)
    if warning := early_kill(os.environ, plan.save_within_s):
        announce(warning)
    print("\n".join(lines), file=sys.stderr, flush=True)
    job, restarts = (os.environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "RESTART_COUNT"))
    logs = Path(plan.folder, "logs", f"{job}-{restarts or 0}" if job else "launch")
    more_s = max(0.0, plan.save_within_s - SAVE_WITHIN_S)
    return run_launch(Launch(started, hosts, at, logs, more_s), job if options.requeue else "")


def plan_of(config: RunConfig | SftConfig, options: Options) -> Plan:
    """Plan how many trainer ranks and engines a launch starts and how many GPUs they need, for a
    recipe of `megarl train` or `megarl sft`. Raises `ValueError`, which begins with the path of the
    recipe, if recipe and options contradict each other.
    """
    try:
        if isinstance(config, SftConfig):
            return make_supervised_plan(config, options)
        return make_plan(config, options)
    except ValueError as error:
        raise ValueError(f"{options.recipe}: {error}") from error


def run_launch(launch: Launch, again: str) -> int:
    """Run a launch; returns the exit code. `again`: number of the Slurm job to put back into the
    queue after SIGTERM, or when a node does not answer; empty for none.
    """
    launcher, interrupted = Launcher(launch), False
    try:
        code = launcher.run()
        if code != 0 and launcher.silent:
            announce(f"error: {', '.join(launcher.silent)} did not end in time: is the node dead?")
            interrupted = True
        return code
    except EndedBySignal as ended:
        interrupted = ended.number != signal.SIGINT
        raise
    finally:
        if again and interrupted:
            announce(requeue(again))


def addresses(options: Options, hosts: Sequence[str]) -> Addresses:
    """Addresses of a run that this process starts on `hosts`, of which it is on the first."""
    several = len(hosts) > 1
    return Addresses(
        head=hosts[0] if several else "127.0.0.1",
        ray_port=options.port or free_port(),
        torch_port=free_port() if several else TORCH_PORT,
        client_port=free_port(),
        # /tmp and not TMPDIR: Ray's sockets lie inside, and their paths may have 107 characters.
        state=f"/tmp/megarl-{os.getpid()}-{secrets.token_hex(4)}",
        python=sys.executable,
    )


def shown_processes(started: Sequence[Process], hosts: Sequence[str], at: Addresses) -> list[str]:
    """The lines that tell which processes are started."""
    lines: list[str] = []
    if any(one.kind == "ray" for one in started):
        lines += [f"on the CPU: the rollout service, and Ray on port {at.ray_port}", ""]
    lines += ["commands, each with the same random RAY_AUTH_TOKEN in its environment:"]
    for one in started:
        through = f"{' '.join(srun(hosts[one.node], []))} " if len(hosts) > 1 else ""
        lines += [f"  {through}{one.command}"]
    return lines


def refuse_owned(config: RunConfig | SftConfig) -> None:
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


def find_gpus(plan: Plan, options: Options, num_nodes: int) -> Gpus:
    """Assign GPUs to the plan's processes: those in CUDA_VISIBLE_DEVICES, none if it is set to
    nothing, and all of the node without it, on `num_nodes` nodes alike. A dry run assumes the nodes
    that the options name, or without that variable one node with as many GPUs as are needed.
    """
    if options.on_cpu:
        return deal_cpu(plan, num_nodes)
    if options.gpus_per_node:
        count, each = options.num_nodes or 1, options.gpus_per_node
        nodes = [[str(gpu) for gpu in range(each)] for _ in range(count)]
        words = f"--nodes {count} x --gpus-per-node {each} are {count * each}"
        return deal(plan, nodes, words)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        hides_all = not visible.strip()
        found = f"CUDA_VISIBLE_DEVICES is {visible}"
        if hides_all:
            found = "CUDA_VISIBLE_DEVICES is empty, which hides all GPUs: unset it to use them"
            found += ", or set --gpus-per-node" if options.dry_run else ""
        found += f" on each of {num_nodes} nodes" if num_nodes > 1 else ""
        names = [] if hides_all else gpu_names(visible)
        return deal(plan, [names] * num_nodes, found)
    if options.dry_run and num_nodes == 1:
        return deal(plan, [[str(gpu) for gpu in range(plan.num_gpus)]], "")
    listed = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60
        ).stdout
    count = sum(line.startswith("GPU") for line in listed.splitlines())
    found = f"nvidia-smi lists {count} GPUs" + (
        f" on this one of {num_nodes} nodes" if num_nodes > 1 else ""
    )
    return deal(plan, [[str(gpu) for gpu in range(count)]] * num_nodes, found)


def gpu_names(visible: str) -> list[str]:
    """The GPUs that a CUDA_VISIBLE_DEVICES of `visible` names. Raises `ValueError` for an empty, a
    negative or a repeated name, and for one that hides all GPUs.
    """
    names = [name.strip() for name in visible.split(",")]
    known = [name for name in names if name]
    wrong = {
        "an empty name": len(known) < len(names),
        "a negative number, at which CUDA stops reading": any(name[0] == "-" for name in known),
        "a GPU twice": len(set(known)) < len(known),
        "NoDevFiles, Slurm's word for a job without GPUs (--gpus-per-node)": "NoDevFiles" in known,
    }
    found = [what for what, is_so in wrong.items() if is_so]
    require(
        not found,
        f"CUDA_VISIBLE_DEVICES is '{visible}', which has {' and '.join(found)}; set it to each GPU"
        " once, separated by commas, such as 0,1,2",
    )
    return names
