"""What `megarl run` would start on GPUs, computed before anything is started: trainer ranks,
inference engines, and the GPU of each.

    recipe + Options --make_launch_plan--> LaunchPlan
    LaunchPlan + GPUs of the nodes --deal_gpus or deal_cpu--> Gpus
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config import AnyConfig, RunConfig
from megarl.console import Options
from megarl.parallel.layout import resolve
from megarl.schema import require
from megarl.signals import SAVE_WITHIN_S
from megarl.trainer.places import RolePlace, role_places


@dataclass(frozen=True)
class LaunchPlan:
    """How many processes a run has, before they are assigned to GPUs: trainer ranks, one for each
    GPU, and inference engines. `roles` has, for each role, its ranks and its degrees of data,
    sequence and tensor parallelism. A role is a model with a task: policy, critic, reference, ...
    """

    folder: str
    """Path of the run folder, as in the recipe."""
    roles: dict[str, RolePlace]
    """{role: its trainer ranks, and their data, sequence and tensor-parallel layout}; the policy
    comes first."""
    num_ranks: int
    """Number of trainer ranks of all roles together; roles may share ranks."""
    num_engines: int
    tensor: int
    """Tensor-parallel GPUs of each engine."""
    colocated: bool
    """Whether the engines use the GPUs of the policy's ranks, in turns with these."""
    save_within_s: float = SAVE_WITHIN_S
    """Seconds that writing a checkpoint may take after a signal: the recipe's
    `training.checkpoint.save_within_s`."""
    hidden: str = ""
    """Name of the environment variable with the token for reward servers, which Ray's processes do
    not get; empty for none."""

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
    """Find out how many processes the run of a recipe has: trainer ranks, with the ranks and
    parallel layout (data, sequence, tensor) of each model (policy, critic, ...), and inference
    engines with their number of GPUs. A run on a fixed data set (fine-tuning, preferences, a reward
    model) has ranks of one model and no engines. Raises `ValueError` if `--ranks`
    contradicts the recipe, or if ranks and layouts do not fit.
    """
    training = config.training
    within_s = training.checkpoint.save_within_s
    num_ranks = count_ranks(config, options)
    if not isinstance(config, RunConfig):
        wanted = training.layout
        layout = resolve(
            data=wanted.data, sequence=wanted.sequence, tensor=wanted.tensor, num_ranks=num_ranks
        )
        roles = {"policy": RolePlace(tuple(range(num_ranks)), layout)}
        return LaunchPlan(config.folder, roles, num_ranks, 0, 1, False, within_s)
    rollout = config.rollout
    try:
        roles = role_places(config, num_ranks)
    except ValueError as error:
        raise ValueError(f"{num_ranks} trainer ranks, one a GPU: {error}") from error
    policy = roles["policy"]
    engines, tensor = rollout.num_engines, rollout.engine.tensor
    samples = rollout.groups_per_step * rollout.group_size // training.num_mini_batches
    require(
        samples >= policy.layout.data,
        f"a mini-batch has {samples} samples for {policy.layout.data} data ranks; raise"
        " rollout.groups_per_step or group_size, or lower training.num_mini_batches",
    )
    return LaunchPlan(
        config.folder,
        roles,
        num_ranks,
        engines,
        tensor,
        rollout.placement == "colocated",
        within_s,
        config.environment.remote.token_variable,
    )


def ranks_apart(config: AnyConfig) -> dict[str, tuple[int, ...]]:
    """{section of the recipe, such as "critic" or "critics.NAME": its ranks} of the models that are
    placed on trainer ranks which hold no part of the policy.
    """
    roles = config.other_roles if isinstance(config, RunConfig) else {}
    return {name: role.ranks for name, role in roles.items() if role.ranks}


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
    (data x sequence x tensor parallelism), and those that hold other models only. If the recipe has
    `training.layout.data: 0`, which leaves the number of data-parallel ranks open, the policy has
    as many ranks as colocated engines have GPUs, or else one data-parallel rank.
    """
    layout, apart = config.training.layout, ranks_apart(config)
    num_apart = len({rank for ranks in apart.values() for rank in ranks})
    rest = layout.sequence * layout.tensor
    return (layout.data * rest or max(rest, shared_ranks(config))) + num_apart


def count_ranks(config: AnyConfig, options: Options) -> int:
    """Number of trainer ranks of a run, of all its models together: `--ranks` or, without it, the
    fewest that the recipe allows. Raises `ValueError` if `--ranks` differs from the recipe's layout
    and the ranks that other models have of their own, which settings such as `critic.ranks` list,
    or if such a list has a rank that is not below the number.
    """
    layout = config.training.layout
    rest = layout.sequence * layout.tensor
    apart = ranks_apart(config)
    num_apart = len({rank for ranks in apart.values() for rank in ranks})
    beside = f", and {' and '.join(apart)} have {num_apart} ranks of their own" if apart else ""
    num_ranks = options.ranks or fewest_ranks(config)
    wanted = layout.data * rest + num_apart
    if layout.data and num_ranks != wanted:
        left = num_ranks - num_apart
        fits = left > 0 and left % rest == 0
        other = f", or training.layout.data to {left // rest}" if fits else ""
        raise ValueError(
            f"--ranks is {num_ranks}, but training.layout is data {layout.data} x sequence"
            f" {layout.sequence} x tensor {layout.tensor} = {layout.data * rest} ranks, one a GPU"
            f"{beside}; set --ranks to {wanted}{other}"
        )
    require(
        num_ranks > num_apart,
        f"--ranks is {num_ranks}, which leaves the policy no rank{beside}; set it to at least"
        f" {num_apart + rest}",
    )
    for name, ranks in apart.items():
        beyond = [rank for rank in ranks if rank >= num_ranks]
        require(
            not beyond,
            f"{name}.ranks names rank {', '.join(map(str, beyond))}, but the run has {num_ranks}"
            f" trainer ranks, numbered from 0 to {num_ranks - 1} without gaps:"
            f" {num_ranks - num_apart} of the policy{beside}; set {name}.ranks to numbers below"
            f" {num_ranks}, or training.layout.data so that the policy has more ranks",
        )
    return num_ranks


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
