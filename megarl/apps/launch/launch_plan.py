"""What `megarl run` would start on GPUs, computed before anything is started: trainer ranks and
inference engines, the GPU of each, and the processes as data.

    recipe + Options --make_launch_plan--> LaunchPlan
    LaunchPlan + GPUs of the nodes --deal_gpus or deal_cpu--> Gpus
    LaunchPlan, Gpus, Addresses --processes--> [Process(kind, node, command), ...]

Ray runs on every node that has engines or ranks of the policy, torchrun on every node that has
trainer ranks. They are started here or through `srun`. For several nodes outside Slurm, a dry run
prints their commands, to start by hand.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.apps.launch.slurm import srun
from megarl.parallel.layout import resolve
from megarl.settings.config import AnyConfig, RunConfig
from megarl.settings.recipe_paths import recipe_path
from megarl.settings.schema import require
from megarl.system.console import Options
from megarl.system.private_folder import MARK
from megarl.system.process_env import ENGINE_RANKS, RAY_ON_LOOPBACK, RAY_SETTINGS
from megarl.system.signals import SAVE_WITHIN_S, SHUTDOWN, SHUTDOWN_S
from megarl.trainer.role_placement import RolePlace, role_places

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
class LaunchPlan:
    """How many processes a run has, before they are assigned to GPUs."""

    config: AnyConfig
    roles: dict[str, RolePlace]
    """{role, such as policy or critic: its trainer ranks, and their data, sequence and
    tensor-parallel layout}; the policy comes first."""
    num_ranks: int
    """Number of trainer ranks of all roles together, one a GPU; roles may share ranks."""
    num_engines: int = 0
    tensor: int = 1
    """Tensor-parallel GPUs of each engine."""
    colocated: bool = False
    """Whether the engines use the GPUs of the policy's ranks, in turns with these."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the trainer ranks and the engines need together."""
        return self.num_ranks + (0 if self.colocated else self.num_engines * self.tensor)


@dataclass(frozen=True)
class Gpu:
    """A GPU, by the number of its node (from 0) and its name in CUDA_VISIBLE_DEVICES; with an empty
    name, a slot of the node for one process of a run on the CPU.
    """

    node: int
    """Number of the node, from 0."""
    name: str
    """The GPU as CUDA_VISIBLE_DEVICES names it, an index or a UUID; empty on the CPU."""


@dataclass(frozen=True)
class Gpus:
    """Placement of a run on GPUs: the GPU of each trainer rank, the GPUs of each engine, and those
    that are free, each as the number of its node and its name in CUDA_VISIBLE_DEVICES. In a run on
    the CPU (`on_cpu`) each entry says only the node of a process, with an empty name.
    """

    ranks: list[Gpu]
    """GPU of each trainer rank, by rank."""
    engines: list[list[Gpu]]
    """The GPUs of each engine. Where engines have GPUs of their own (disaggregated), Ray decides
    which engine gets which of these lists."""
    free: list[Gpu]
    """GPUs that no rank and no engine uses."""
    num_nodes: int = 1
    on_cpu: bool = False


def make_launch_plan(config: AnyConfig, options: Options) -> LaunchPlan:
    """The processes of a recipe's run. A run on a fixed data set has ranks of one model and no
    engines. Raises `ValueError` where ranks and layouts do not fit.
    """
    num_ranks = options.ranks or fewest_ranks(config)
    if not isinstance(config, RunConfig):
        layout = resolve(**dict(config.training.layout), num_ranks=num_ranks)
        return LaunchPlan(config, {"policy": RolePlace(tuple(range(num_ranks)), layout)}, num_ranks)
    rollout = config.rollout
    return LaunchPlan(
        config,
        role_places(config, num_ranks),
        num_ranks,
        rollout.num_engines,
        rollout.engine.tensor,
        rollout.placement == "colocated",
    )


def shared_ranks(config: AnyConfig) -> int:
    """Number of policy ranks whose GPUs the inference engines use too, if the recipe has
    `rollout.placement: colocated`: the number of engines times an engine's tensor-parallel size.
    0 if the engines have GPUs of their own, or the run has no engines.
    """
    if not isinstance(config, RunConfig) or config.rollout.placement != "colocated":
        return 0
    return config.rollout.num_engines * config.rollout.engine.tensor


def fewest_ranks(config: AnyConfig) -> int:
    """The smallest number of trainer ranks with which a run can be started: those of the policy
    (data x sequence x tensor parallelism), and those that other models have of their own. With
    `training.layout.data: 0` the policy has as many ranks as colocated engines have GPUs, or else
    one data-parallel rank.
    """
    roles = config.other_roles if isinstance(config, RunConfig) else {}
    num_apart = len({rank for role in roles.values() for rank in role.ranks})
    layout = config.training.layout
    rest = layout.sequence * layout.tensor
    return (layout.data * rest or max(rest, shared_ranks(config))) + num_apart


def deal_gpus(plan: LaunchPlan, nodes: Sequence[Sequence[str]], listed: str) -> Gpus:
    """Assign GPUs to the trainer ranks and engines of `plan`. `nodes`: the GPU names of each node,
    as in CUDA_VISIBLE_DEVICES. Every node that has ranks has equally many, on its first GPUs;
    engines get the GPUs that are left, each engine on one node. Colocated engines have no GPUs of
    their own: engine e uses those of the policy's ranks [e * tensor, (e + 1) * tensor), where
    `tensor` is its number of GPUs.

    `listed`: where the list of GPUs comes from, in words, for the message of the `ValueError`
    raised if there are too few GPUs or if no such assignment exists.
    """
    pool = [[Gpu(number, name) for name in names] for number, names in enumerate(nodes)]
    have = sum(map(len, pool))
    share, turns = "colocated " if plan.colocated else "", ""
    if not plan.colocated and 0 < plan.num_engines * plan.tensor <= plan.num_ranks <= have:
        turns = " set rollout.placement to colocated,"
    require(
        have >= plan.num_gpus,
        f"{plan.num_ranks} trainer ranks and {plan.num_engines} {share}engines of {plan.tensor}"
        f" need {plan.num_gpus} GPUs, but {listed};{turns} change the recipe's"
        " training.layout and rollout.num_engines, free GPUs, or rehearse with --cpu",
    )
    for each in range(min(len(pool[0]), plan.num_ranks), 0, -1):
        num_nodes, rest = divmod(plan.num_ranks, each)
        if rest or num_nodes > len(pool):
            continue
        ranks = [gpu for node in pool[:num_nodes] for gpu in node[:each]]
        left = [node[each:] if number < num_nodes else node for number, node in enumerate(pool)]
        engines = _engines(plan, ranks, left)
        if engines is not None:
            used = {gpu for engine in engines for gpu in engine}
            free = [gpu for node in left for gpu in node if gpu not in used]
            return Gpus(ranks, engines, free, len(pool))
    raise ValueError(
        f"{plan.num_ranks} trainer ranks do not fit on {len(pool)} nodes of {len(pool[0])} GPUs"
        f" with {plan.num_engines} {share}engines of {plan.tensor}: every node with ranks has"
        " equally many, and an engine is on one node; set --nodes, --gpus-per-node,"
        " rollout.engine.tensor, or the number of ranks"
    )


def deal_cpu(plan: LaunchPlan, num_nodes: int) -> Gpus:
    """Assign nodes to the trainer ranks and engines of a run on the CPU; the result has the number
    of a node, and an empty name, in the place of each GPU. The ranks are on as many nodes as can
    have equally many of them. Engines go to the nodes in turn, the last node first; a colocated
    engine is on the node of the ranks that it runs beside. Raises `ValueError` if those ranks are
    on several nodes.
    """
    hosts = max(hosts for hosts in range(1, num_nodes + 1) if plan.num_ranks % hosts == 0)
    each = plan.num_ranks // hosts
    ranks = [Gpu(rank // each, "") for rank in range(plan.num_ranks)]
    engines: list[list[Gpu]] | None = [
        [Gpu(-(number + 1) % num_nodes, "")] * plan.tensor for number in range(plan.num_engines)
    ]
    if plan.colocated:
        engines = _engines(plan, ranks, [])
        require(
            engines is not None,
            f"rollout.engine.tensor is {plan.tensor}, and a colocated engine would be on several of"
            f" the {hosts} nodes; set it to a divisor of the {each} trainer ranks of a node",
        )
    return Gpus(ranks, engines or [], [], num_nodes, on_cpu=True)


def _engines(
    plan: LaunchPlan, ranks: Sequence[Gpu], left: Sequence[Sequence[Gpu]]
) -> list[list[Gpu]] | None:
    """The GPUs of each engine, given the GPU of each rank and those left on each node; None if an
    engine would be on several nodes.
    """
    if plan.colocated:
        shared = [ranks[rank] for rank in plan.roles["policy"].ranks]
        groups = [
            shared[first : first + plan.tensor] for first in range(0, len(shared), plan.tensor)
        ]
        return groups if all(len({gpu.node for gpu in group}) == 1 for group in groups) else None
    groups = [
        list(node[first : first + plan.tensor])
        for node in left
        for first in range(0, len(node) - plan.tensor + 1, plan.tensor)
    ]
    return groups[: plan.num_engines] if len(groups) >= plan.num_engines else None


# -------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class ProgramCommand:
    """Command line of a program: `words` to run without a shell, with the variables in
    `environment` added to those of the process that starts it. `str` of it is a line to paste into
    a shell.
    """

    environment: dict[str, str]
    words: list[str]

    def __str__(self) -> str:
        """The command as one line to paste into a shell, which waits for the program to end."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return shlex.join([*(["env"] if settings else []), *settings, *self.words])


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
    engines = {gpu.node for engine in gpus.engines for gpu in engine}
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
    node_gpus = [gpu for engine in gpus.engines for gpu in engine if gpu.node == node]
    words = [at.python, "-m", "ray.scripts.scripts", "start", *(["--block"] if at.state else [])]
    # Colocated engines follow the policy's ranks, and Ray deals out nothing.
    words += [f"--num-gpus={0 if plan.colocated or gpus.on_cpu else len(node_gpus)}"]
    if gpus.on_cpu and not plan.colocated and gpus.num_nodes > 1:
        words += [f"--resources={json.dumps({ENGINE_RANKS: len(node_gpus)})}"]
    if node == 0:
        words += ["--head", f"--port={at.ray_port}", *HEAD_OPTIONS]
        words += [f"--ray-client-server-port={at.client_port}"] if at.client_port else []
    else:
        words += [f"--address={at.head}:{at.ray_port}", *RAY_OPTIONS]
    words += [f"--temp-dir={at.state}/{node}"] if at.state else []
    settings = RAY_SETTINGS | (RAY_ON_LOOPBACK if gpus.num_nodes == 1 else {})
    assert isinstance(plan.config, RunConfig), "no engines"
    token = plan.config.environment.remote.token_variable  # for reward servers, and not for Ray
    return _command(settings, {token: ""} if token else {}, node_gpus, plan, at, words)


def _torchrun(
    node: int,
    num_hosts: int,
    plan: LaunchPlan,
    gpus: Gpus,
    options: Options,
    at: Addresses,
) -> ProgramCommand:
    """The command that starts the trainer ranks of a node."""
    node_gpus = [gpu for gpu in gpus.ranks if gpu.node == node]
    words = [at.python, "-m", "megarl.parallel.torchrun"]
    # Engines on other nodes connect to the address of rank 0, also where all ranks are on one.
    several = gpus.num_nodes > 1
    if several:
        words += ["--nnodes", str(num_hosts), "--node-rank", str(node)]
    words += ["--nproc-per-node", str(len(node_gpus))]
    if several:
        words += ["--master-addr", at.head, "--master-port", str(at.torch_port)]
    words += ["-m", "megarl", "run", str(recipe_path(options.recipe).resolve())]
    words += options.overrides
    ray = RAY_SETTINGS if plan.num_engines else {}
    joins = {"RAY_ADDRESS": f"{at.head}:{at.ray_port}"} if plan.num_engines else {}
    return _command(ray, joins, node_gpus, plan, at, words)


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
