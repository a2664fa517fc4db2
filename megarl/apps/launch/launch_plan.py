"""What `megarl launch` would start, computed before anything is: ranks, engines, and the GPU of
each.

    arguments --parse--> Options,  recipe + Options --make_plan--> Plan,  Plan + GPUs --deal--> Gpus
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config import RunConfig, SftConfig
from megarl.parallel.layout import resolve
from megarl.schema import require
from megarl.signals import SAVE_WITHIN_S
from megarl.trainer.places import RolePlace, role_places

NUMBERS = ("--gpus-train", "--gpus-engine", "--port", "--nodes", "--gpus-per-node")
SWITCHES = ("--cpu", "--dry-run", "--requeue")


@dataclass(frozen=True)
class Options:
    """Parsed command line of `megarl launch`."""

    recipe: str
    num_train_gpus: int | None = None
    num_engine_gpus: int | None = None
    port: int | None = None
    num_nodes: int | None = None
    gpus_per_node: int | None = None
    on_cpu: bool = False
    dry_run: bool = False
    requeue: bool = False
    overrides: tuple[str, ...] = ()
    """Overrides of settings in the recipe, in the form that `megarl train` accepts."""


@dataclass(frozen=True)
class Plan:
    """The processes of a run: trainer ranks, one for each GPU, and engines."""

    folder: str
    """The run folder."""
    roles: dict[str, RolePlace]
    """{role: its ranks and layout}, the policy's first."""
    num_ranks: int
    """Ranks of all roles together."""
    num_engines: int
    tensor: int
    """Tensor-parallel ranks of each engine."""
    colocated: bool
    """Whether the engines use the GPUs of the policy's ranks."""
    save_within_s: float = SAVE_WITHIN_S
    """The recipe's `training.checkpoint.save_within_s`."""
    hidden: str = ""
    """Name of the environment variable that Ray's processes do not get: the reward servers'
    token."""

    @property
    def num_gpus(self) -> int:
        """GPUs of the trainer ranks and the engines together."""
        return self.num_ranks + (0 if self.colocated else self.num_engines * self.tensor)


@dataclass(frozen=True)
class Gpu:
    """A GPU of a node."""

    node: int
    """Number of the node, from 0."""
    name: str
    """The GPU as CUDA_VISIBLE_DEVICES names it; empty for a place on the CPU."""


@dataclass(frozen=True)
class Gpus:
    """Which GPUs a plan's processes use; with `on_cpu`, on which nodes they are."""

    ranks: list[Gpu]
    """GPU of each trainer rank."""
    engines: list[list[Gpu]]
    """For each engine, its GPUs. For disaggregated engines Ray decides which engine gets which of
    these sets."""
    free: list[Gpu]
    """GPUs that nothing uses."""
    num_nodes: int = 1
    on_cpu: bool = False


def parse_options(arguments: Sequence[str]) -> Options:
    """Parse the command line. Raises `ValueError` that names the wrong argument and what to write
    instead.
    """
    words, overrides = list(arguments), ()
    if "--" in words:
        cut = words.index("--")
        words, overrides = words[:cut], tuple(words[cut + 1 :])
    numbers: dict[str, int] = {}
    switches: set[str] = set()
    recipes: list[str] = []
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in NUMBERS:
            if not equals:
                require(bool(words), f"{name} needs a value")
                value = words.pop(0)
            require(
                re.fullmatch("[1-9][0-9]{0,4}", value) is not None,
                f"{name} is '{value}'; set it to a whole number of at least 1",
            )
            numbers[name] = int(value)
        elif word in SWITCHES:
            switches.add(word)
        elif word.startswith("-"):
            known = ", ".join((*NUMBERS, *SWITCHES))
            raise ValueError(
                f"unknown option '{word}'; known are {known} and --help; settings of the recipe go"
                " after -- (megarl launch RECIPE.yaml -- --steps 10)"
            )
        else:
            recipes.append(word)
    require(
        len(recipes) == 1,
        f"megarl launch takes one recipe, but {len(recipes)} were given ({' '.join(recipes)});"
        " write: megarl launch RECIPE.yaml [OPTIONS] [-- OVERRIDES]",
    )
    planned = [name for name in ("--nodes", "--gpus-per-node") if name in numbers]
    require(
        not planned or "--dry-run" in switches,
        f"{' and '.join(planned)} plan a run without starting it: megarl launch starts this node,"
        " or all nodes of a Slurm allocation; add --dry-run, which prints what to start on each"
        " node",
    )
    require(
        "--gpus-per-node" not in numbers or "--cpu" not in switches,
        "--gpus-per-node and --cpu exclude each other; leave one out",
    )
    require(
        "--nodes" not in numbers or "--gpus-per-node" in numbers or "--cpu" in switches,
        "--nodes needs --gpus-per-node; set it to the number of GPUs that each node has",
    )
    return Options(
        recipes[0],
        *(numbers.get(name) for name in NUMBERS),
        on_cpu="--cpu" in switches,
        dry_run="--dry-run" in switches,
        requeue="--requeue" in switches,
        overrides=overrides,
    )


def make_plan(config: RunConfig, options: Options) -> Plan:
    """The plan of a recipe's trainer ranks and engines. Raises `ValueError` if the options
    contradict the recipe, or if ranks and layouts of the roles do not fit.
    """
    rollout, training = config.rollout, config.training
    colocated = rollout.placement == "colocated"
    num_ranks = count_ranks(config, options)
    try:
        roles = role_places(config, num_ranks)
    except ValueError as error:
        raise ValueError(f"{num_ranks} trainer ranks, one a GPU: {error}") from error
    policy = roles["policy"]
    engines, tensor = rollout.num_engines, rollout.engine.tensor
    require(
        options.num_engine_gpus in (None, engines * tensor),
        f"--gpus-engine is {options.num_engine_gpus}, but rollout.num_engines {engines} x"
        f" rollout.engine.tensor {tensor} needs {engines * tensor}; set --gpus-engine to"
        f" {engines * tensor}, or rollout.num_engines to match",
    )
    require(
        not colocated or engines * tensor == len(policy.ranks),
        f"rollout.placement is 'colocated', but rollout.num_engines {engines} x"
        f" rollout.engine.tensor {tensor} = {engines * tensor} engine ranks cannot share the GPUs"
        f" of the policy's {len(policy.ranks)} ranks; set rollout.num_engines so that they are as"
        " many",
    )
    samples = rollout.groups_per_step * rollout.group_size // training.num_mini_batches
    require(
        samples >= policy.layout.data,
        f"a mini-batch has {samples} samples for {policy.layout.data} data ranks; raise"
        " rollout.groups_per_step or group_size, or lower training.num_mini_batches",
    )
    return Plan(
        config.folder,
        roles,
        num_ranks,
        engines,
        tensor,
        colocated,
        training.checkpoint.save_within_s,
        config.environment.remote.token_variable,
    )


def make_supervised_plan(config: SftConfig, options: Options) -> Plan:
    """The plan of a run on a data set: ranks of one model, and no engines. Raises `ValueError` if
    the options contradict the recipe.
    """
    wanted = config.training.layout
    require(
        options.num_engine_gpus is None,
        f"--gpus-engine is {options.num_engine_gpus}, but megarl sft has no engines; leave it out",
    )
    num_ranks = options.num_train_gpus or wanted.data * wanted.sequence * wanted.tensor
    require(
        num_ranks > 0,
        "training.layout.data is 0, so the recipe leaves the number of ranks open; set"
        " --gpus-train",
    )
    layout = resolve(
        data=wanted.data, sequence=wanted.sequence, tensor=wanted.tensor, num_ranks=num_ranks
    )
    roles = {"policy": RolePlace(tuple(range(num_ranks)), layout)}
    training = config.training
    within_s = training.checkpoint.save_within_s
    return Plan(config.folder, roles, num_ranks, 0, 1, False, within_s)


def count_ranks(config: RunConfig, options: Options) -> int:
    """Number of trainer ranks of all roles together: `--gpus-train`, or as many as the policy's
    layout and the roles on ranks of their own have. Raises `ValueError` if these differ, or if a
    role has a rank beyond them.
    """
    layout, given = config.training.layout, options.num_train_gpus
    rest = layout.sequence * layout.tensor
    apart = {name: role.ranks for name, role in config.other_roles.items() if role.ranks}
    num_apart = len({rank for ranks in apart.values() for rank in ranks})
    beside = f", and {' and '.join(apart)} have {num_apart} ranks of their own" if apart else ""
    num_ranks = given or (layout.data * rest and layout.data * rest + num_apart)
    require(
        num_ranks > 0,
        "training.layout.data is 0, so the recipe leaves the number of ranks open; set"
        " --gpus-train",
    )
    wanted = layout.data * rest + num_apart
    if layout.data and num_ranks != wanted:
        left = num_ranks - num_apart
        fits = left > 0 and left % rest == 0
        other = f", or training.layout.data to {left // rest}" if fits else ""
        raise ValueError(
            f"--gpus-train is {num_ranks}, but training.layout is data {layout.data} x sequence"
            f" {layout.sequence} x tensor {layout.tensor} = {layout.data * rest} ranks, one a GPU"
            f"{beside}; set --gpus-train to {wanted}{other}"
        )
    require(
        num_ranks > num_apart,
        f"--gpus-train is {num_ranks}, which leaves the policy no rank{beside}; set it to at least"
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


def deal(plan: Plan, nodes: Sequence[Sequence[str]], found: str) -> Gpus:
    """Assign the GPUs of one or several `nodes` to trainer ranks and engines: every node that has
    ranks has equally many, on its first GPUs, and engines get the GPUs that are left, each engine
    on one node. A colocated engine e shares the GPUs of the policy's ranks [e * tensor, (e + 1) *
    tensor).

    `found` says where the list of GPUs comes from, for the `ValueError` raised if it is too short.
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


def deal_cpu(plan: Plan, num_nodes: int) -> Gpus:
    """The nodes of trainer ranks and engines that run on the CPU: every node that has ranks has
    equally many, as many nodes as possible have ranks, and engines go to the nodes in turn, to the
    last one first.
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
    plan: Plan, ranks: Sequence[Gpu], left: Sequence[Sequence[Gpu]]
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
    """A program to start with the variables in `environment` added."""

    environment: dict[str, str]
    words: list[str]

    def __str__(self) -> str:
        """The command as one line for a shell, which waits for the program to end."""
        settings = [
            f"{name}={shlex.quote(value) if value else ''}"
            for name, value in self.environment.items()
        ]
        start = ["env", *settings] if settings else []
        return " ".join([*start, *map(shlex.quote, self.words)])
