"""The processes of a run as data: Ray on every node that has engines or ranks of the policy, and
torchrun on every node that has trainer ranks.

    LaunchPlan, Gpus, Addresses --processes--> [Process(kind, node, command), ...]

They are started here or through `srun`. For several nodes outside Slurm, a dry run prints their
commands, to start by hand.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.apps.launch.launch_plan import Gpu, Gpus, LaunchPlan, ProgramCommand
from megarl.apps.launch.slurm import srun
from megarl.settings.config import RunConfig
from megarl.settings.recipe_paths import recipe_path
from megarl.system.console import Options
from megarl.system.private_folder import MARK
from megarl.system.process_env import ENGINE_RANKS, RAY_ON_LOOPBACK, RAY_SETTINGS
from megarl.system.signals import SAVE_WITHIN_S, SHUTDOWN, SHUTDOWN_S

HEAD = "NODE0"
"""Placeholder for the address of the first node in commands that the user starts by hand."""
RAY_PORT, TORCH_PORT = 6379, 29500
RAY_OPTIONS = (
    "--disable-usage-stats",
    # By default Ray's workers have ports 10002 to 19999, and Ray refuses a --port among these.
    "--min-worker-port=0",
    "--max-worker-port=0",
    "--dashboard-agent-listen-port=0",
)
"""Options of every `ray start`. With 0 as a port, the system chooses one."""
HEAD_OPTIONS = (*RAY_OPTIONS, "--include-dashboard=false")
"""Options of `ray start --head`, with which Ray starts on the first node."""


@dataclass(frozen=True)
class Addresses:
    """Where the processes of a run find each other (address of the first node and ports for Ray and
    torchrun), and by which Python interpreter Ray and torchrun are called.
    """

    head: str = HEAD
    """Host name or IP address of the first node."""
    ray_port: int = RAY_PORT
    torch_port: int = TORCH_PORT
    """Port of torchrun's rendezvous on node 0; not used on one node."""
    client_port: int = 0
    """Port of Ray's client server on node 0; 0 for Ray's default."""
    state: str = ""
    """Absolute path of the launch's private folder, which each node has in its own /tmp; empty for
    commands that the user starts by hand."""
    python: str = sys.executable
    """Path of the Python interpreter."""


@dataclass(frozen=True)
class Process:
    """A process that `megarl run` has to start: the number of its node, the command, and its
    kind, `ray` for a node of Ray, `ranks` for torchrun with all trainer ranks of the node.
    """

    kind: Literal["ray", "ranks"]
    node: int
    """Number of the node, from 0."""
    command: ProgramCommand


def processes(plan: LaunchPlan, gpus: Gpus, options: Options, at: Addresses) -> list[Process]:
    """Make the commands that start a run, in the order in which they have to run: Ray's head on
    node 0, Ray on the other nodes, then torchrun on each node with trainer ranks. Returns one
    object (node, command, kind) for each process. `plan`, `gpus`: the ranks and engines, and where
    they are; `at`: addresses and ports.
    """
    engines = {gpu.node for one in gpus.engines for gpu in one}
    hosts = sorted({gpu.node for gpu in gpus.ranks})
    # Each rank of the policy joins Ray through its own node; ranks of other roles do not join.
    joining = {gpus.ranks[rank].node for rank in plan.roles["policy"].ranks}
    joined = sorted({0} | engines | joining) if plan.num_engines else []
    rays = [Process("ray", node, _ray(node, plan, gpus, at)) for node in joined]
    ranks = [
        Process("ranks", node, _torchrun(node, len(hosts), plan, gpus, options, at))
        for node in hosts
    ]
    return rays + ranks


def shown_commands(started: Sequence[Process], hosts: Sequence[str]) -> list[str]:
    """The commands that start a run, as lines without newlines, with the `srun` that starts each on
    its node if there are several `hosts`, the names of the nodes; without names (empty `hosts`), by
    node, to start by hand.
    """
    lines: list[str] = []
    if not hosts:
        for node in sorted({process.node for process in started}):
            lines += [
                f"# node {node}",
                *(str(process.command) for process in started if process.node == node),
            ]
        return lines
    for process in started:
        through = f"{' '.join(srun(hosts[process.node], []))} " if len(hosts) > 1 else ""
        lines.append(f"{through}{process.command}")
    return lines


def _ray(node: int, plan: LaunchPlan, gpus: Gpus, at: Addresses) -> ProgramCommand:
    """The command that starts Ray on a node: the head on node 0."""
    mine = [gpu for one in gpus.engines for gpu in one if gpu.node == node]
    words = [at.python, "-m", "ray.scripts.scripts", "start", *(["--block"] if at.state else [])]
    # Colocated engines follow the policy's ranks, and Ray deals out nothing.
    words += [f"--num-gpus={0 if plan.colocated or gpus.on_cpu else len(mine)}"]
    if gpus.on_cpu and not plan.colocated and gpus.num_nodes > 1:
        words += [f"--resources={json.dumps({ENGINE_RANKS: len(mine)})}"]
    if node == 0:
        words += ["--head", f"--port={at.ray_port}", *HEAD_OPTIONS]
        words += [f"--ray-client-server-port={at.client_port}"] if at.client_port else []
    else:
        words += [f"--address={at.head}:{at.ray_port}", *RAY_OPTIONS]
    words += [f"--temp-dir={at.state}/{node}"] if at.state else []
    settings = RAY_SETTINGS | (RAY_ON_LOOPBACK if gpus.num_nodes == 1 else {})
    assert isinstance(plan.config, RunConfig), "no engines"
    token = plan.config.environment.remote.token_variable  # for reward servers, and not for Ray
    return _command(settings, {token: ""} if token else {}, mine, plan, at, words)


def _torchrun(
    node: int,
    num_hosts: int,
    plan: LaunchPlan,
    gpus: Gpus,
    options: Options,
    at: Addresses,
) -> ProgramCommand:
    """The command that starts the trainer ranks of a node."""
    mine = [gpu for gpu in gpus.ranks if gpu.node == node]
    words = [at.python, "-m", "megarl.parallel.torchrun"]
    # Engines on other nodes connect to the address of rank 0, also where all ranks are on one.
    several = gpus.num_nodes > 1
    if several:
        words += ["--nnodes", str(num_hosts), "--node-rank", str(node)]
    words += ["--nproc-per-node", str(len(mine))]
    if several:
        words += ["--master-addr", at.head, "--master-port", str(at.torch_port)]
    words += ["-m", "megarl", "run", str(recipe_path(options.recipe).resolve())]
    words += options.overrides
    ray = RAY_SETTINGS if plan.num_engines else {}
    joins = {"RAY_ADDRESS": f"{at.head}:{at.ray_port}"} if plan.num_engines else {}
    return _command(ray, joins, mine, plan, at, words)


def _command(
    settings: dict[str, str],
    more: dict[str, str],
    gpus: Sequence[Gpu],
    plan: LaunchPlan,
    at: Addresses,
    words: list[str],
) -> ProgramCommand:
    """The command `words` with the environment of the launch's processes on `gpus`."""
    marks = {MARK: at.state} if at.state else {}
    # torchrun and `node_process` wait longer for a checkpoint after a signal.
    more_s = math.ceil(plan.config.training.checkpoint.save_within_s - SAVE_WITHIN_S)
    if more_s > 0:
        marks |= {SHUTDOWN: str(SHUTDOWN_S + more_s)}
    visible = ",".join(gpu.name for gpu in gpus if gpu.name)  # empty on the CPU
    return ProgramCommand(settings | marks | more | {"CUDA_VISIBLE_DEVICES": visible}, words)
