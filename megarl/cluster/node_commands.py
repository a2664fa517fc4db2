"""The commands that start a run on several nodes, by hand or from a scheduler's script: Ray on
every node that has engines or ranks of the policy, torchrun on every node that has trainer ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.cluster.launch_plan import Command, Gpus, Options, Plan
from megarl.cluster.process_env import RAY_SETTINGS
from megarl.schema import require

HEAD = "NODE0"
"""Placeholder for the address of the first node."""
RAY_PORT, TORCH_PORT = 6379, 29500
RAY_OPTIONS = (
    "--disable-usage-stats",
    # By default Ray's workers have ports 10002 to 19999, and Ray refuses a --port among these.
    "--min-worker-port=0",
    "--max-worker-port=0",
    "--dashboard-agent-listen-port=0",
)
"""Options of every `ray start`. At port 0 the system chooses."""
HEAD_OPTIONS = (*RAY_OPTIONS, "--include-dashboard=false")
"""Options of a `ray start --head`."""
TAKEN_PORTS = {
    TORCH_PORT: "torchrun's --master-port",
    8265: "that of Ray's dashboard",
    10001: "that of Ray's client server",
}
"""{port: what has it on node 0}. Ray refuses its own two even if nothing listens there."""


def refuse_port(options: Options) -> None:
    """Raise `ValueError` if `--port` of a run on several nodes is a port that something else has
    there.
    """
    used = TAKEN_PORTS.get(options.port or RAY_PORT)
    require(
        used is None or (options.num_nodes or 1) == 1,
        f"--port is {options.port}, which is {used} on node 0; set --port to another one, or leave"
        f" it out ({RAY_PORT})",
    )


def refuse_transport(transport: str, gpus: Gpus) -> None:
    """Raise `ValueError` if weights have to go to another node by a transport that works within
    one.
    """
    used = {gpu.node for gpu in gpus.ranks} | {gpu.node for one in gpus.engines for gpu in one}
    require(
        len(used) == 1 or transport in ("point_to_point", "disk"),
        f"weight_sync.transport is {transport!r}, which works within one node, but ranks and"
        f" engines are on {len(used)}; set it to 'point_to_point'",
    )


def node_commands(plan: Plan, gpus: Gpus, options: Options, command: str) -> list[str]:
    """The lines that a dry run prints for a run on several nodes: for each node, first the command
    that starts Ray there, if the node needs it, then the one that starts its trainer ranks. The
    ranks run `megarl COMMAND`, where `command` is for example "train".
    """
    port = options.port or RAY_PORT
    used = sorted(
        {gpu.node for gpu in gpus.ranks} | {gpu.node for one in gpus.engines for gpu in one}
    )
    hosts = sorted({gpu.node for gpu in gpus.ranks})
    lines = [
        "megarl launch starts the ranks of one node. On several, write the address of node 0 for"
        f" {HEAD}, set RAY_AUTH_TOKEN",
        "to the same random text on every node, and start Ray, on node 0 first, then torchrun:",
    ]
    for node in used:
        lines += ["", f"node {node}:"]
        lines += [f"  {one}" for one in _ray(node, plan, gpus, port)]
        if node in hosts:
            lines.append(f"  {_torchrun(node, len(hosts), plan, gpus, options, command, port)}")
    return lines


def _ray(node: int, plan: Plan, gpus: Gpus, port: int) -> Sequence[Command]:
    """The command that starts Ray on a node: the head on node 0; elsewhere none on a node without
    engines and ranks of the policy.
    """
    mine = [gpu.name for one in gpus.engines for gpu in one if gpu.node == node]
    # Each rank of the policy joins Ray through its own node; ranks of other roles do not join.
    joins = any(gpus.ranks[rank].node == node for rank in plan.roles["policy"].ranks)
    if node != 0 and not mine and not joins:
        return []
    # Colocated engines follow the trainer ranks, and Ray deals out nothing.
    words = ["ray", "start", f"--num-gpus={0 if plan.colocated else len(mine)}"]
    if node == 0:
        words += ["--head", f"--port={port}", *HEAD_OPTIONS]
    else:
        words += [f"--address={HEAD}:{port}", *RAY_OPTIONS]
    hidden = {plan.hidden: ""} if plan.hidden else {}
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
    return [Command(RAY_SETTINGS | hidden | visible, words)]


def _torchrun(
    node: int, num_hosts: int, plan: Plan, gpus: Gpus, options: Options, command: str, port: int
) -> Command:
    """The command that starts the trainer ranks of a node."""
    mine = [gpu.name for gpu in gpus.ranks if gpu.node == node]
    words = ["megarl", "torchrun", "--nnodes", str(num_hosts), "--node-rank", str(node)]
    words += ["--nproc-per-node", str(len(mine))]
    words += ["--master-addr", HEAD, "--master-port", str(TORCH_PORT)]
    words += [command, str(Path(options.recipe).resolve()), *options.overrides]
    environment = RAY_SETTINGS | {
        "RAY_ADDRESS": f"{HEAD}:{port}",
        "CUDA_VISIBLE_DEVICES": ",".join(mine),
        "OMP_NUM_THREADS": str(plan.num_threads),
    }
    return Command(environment, words)
