"""What `megarl run` would start on GPUs, computed before anything is started: trainer ranks,
inference engines, and the GPU of each.

    recipe + Options --make_launch_plan--> LaunchPlan
    LaunchPlan + GPUs of the nodes --deal_gpus or deal_cpu--> Gpus
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.parallel.layout import resolve
from megarl.settings.config import AnyConfig, RunConfig
from megarl.settings.schema import require
from megarl.system.console import Options
from megarl.trainer.role_placement import RolePlace, role_places


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


def deal_gpus(plan: LaunchPlan, nodes: Sequence[Sequence[str]], found: str) -> Gpus:
    """Assign GPUs to the trainer ranks and engines of `plan`. `nodes`: the GPU names of each node,
    as in CUDA_VISIBLE_DEVICES. Every node that has ranks has equally many, on its first GPUs;
    engines get the GPUs that are left, each engine on one node. Colocated engines have no GPUs of
    their own: engine e uses those of the policy's ranks [e * tensor, (e + 1) * tensor), where
    `tensor` is its number of GPUs.

    `found`: where the list of GPUs comes from, in words, for the message of the `ValueError` raised
    if there are too few GPUs or if no such assignment exists.
    """
    pool = [[Gpu(number, name) for name in names] for number, names in enumerate(nodes)]
    have = sum(map(len, pool))
    share = "colocated " if plan.colocated else ""
    require(
        have >= plan.num_gpus,
        f"{plan.num_ranks} trainer ranks and {plan.num_engines} {share}engines of {plan.tensor}"
        f" need {plan.num_gpus} GPUs, but {found}; change the recipe's training.layout and"
        " rollout.num_engines, free GPUs, or rehearse with --cpu",
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
        return groups if all(len({gpu.node for gpu in one}) == 1 for one in groups) else None
    groups = [
        list(node[first : first + plan.tensor])
        for node in left
        for first in range(0, len(node) - plan.tensor + 1, plan.tensor)
    ]
    return groups[: plan.num_engines] if len(groups) >= plan.num_engines else None


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
        settings = [
            f"{name}={shlex.quote(value) if value else ''}"
            for name, value in self.environment.items()
        ]
        start = ["env", *settings] if settings else []
        return " ".join([*start, *map(shlex.quote, self.words)])
