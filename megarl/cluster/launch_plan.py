"""What `megarl launch` would start on a node, computed before anything is: ranks, engines, and the
GPU of each.

    arguments --parse--> Options,  recipe + Options --make_plan--> Plan --describe--> text
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.config import RunConfig
from megarl.parallel.layout import resolve
from megarl.schema import require

USAGE = """\
usage: megarl launch RECIPE.yaml [OPTIONS] [-- OVERRIDES]

Runs a reinforcement learning recipe on one node: starts Ray and the trainer ranks, and ends them.

  --gpus-train N     GPUs of the trainer ranks, the first ones (default: as many as the recipe's
                     training.layout has ranks)
  --gpus-engine N    GPUs of the engines, the next ones (default: the recipe's rollout.num_engines x
                     rollout.engine.tensor); colocated engines use those of the trainer ranks
  --port N           port of this run's Ray (default: a free one)
  --cpu              the same processes without GPUs, to rehearse with a small recipe
  --dry-run          check the recipe, print every command, rank and GPU, and start nothing; needs
                     no GPU and no network
  -- OVERRIDES       settings of the recipe: -- --steps 10 --rollout.max_staleness 1

GPUs are those of CUDA_VISIBLE_DEVICES, else all of the node. Exit codes: 0 done, 2 the recipe or
this command is at fault, 130 / 143 ended by a signal, otherwise that of the rank that failed first.
"""

NUMBERS = ("--gpus-train", "--gpus-engine", "--port")
SWITCHES = ("--cpu", "--dry-run")


@dataclass(frozen=True)
class Options:
    """Parsed command line of `megarl launch`."""

    recipe: str
    num_train_gpus: int | None = None
    num_engine_gpus: int | None = None
    port: int | None = None
    on_cpu: bool = False
    dry_run: bool = False
    overrides: tuple[str, ...] = ()
    """Overrides of settings in the recipe, in the form that `megarl train` accepts."""


@dataclass(frozen=True)
class Plan:
    """The processes that a run starts on one node."""

    folder: str
    """The run folder."""
    num_ranks: int
    num_engines: int
    tensor: int
    """Tensor-parallel ranks of each engine."""
    colocated: bool
    """Whether the engines use the GPUs of the trainer ranks."""
    num_threads: int
    """CPU threads of each trainer rank."""
    hidden: str = ""
    """Name of the environment variable that Ray's processes do not get: the reward servers'
    token."""

    @property
    def num_gpus(self) -> int:
        """GPUs of the trainer ranks and the engines together."""
        return self.num_ranks + (0 if self.colocated else self.num_engines * self.tensor)


@dataclass(frozen=True)
class Gpus:
    """Which GPUs a plan's processes use; empty lists on the CPU."""

    ranks: list[str]
    """GPU of each trainer rank."""
    engines: list[list[str]]
    """For each engine, its GPUs. For disaggregated engines Ray decides which engine gets which of
    these sets."""


def parse(arguments: Sequence[str]) -> Options:
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
    return Options(
        recipes[0],
        *(numbers.get(name) for name in NUMBERS),
        on_cpu="--cpu" in switches,
        dry_run="--dry-run" in switches,
        overrides=overrides,
    )


def make_plan(config: RunConfig, options: Options) -> Plan:
    """The plan of a recipe's trainer ranks and engines. Raises `ValueError` if the options
    contradict the recipe.
    """
    rollout, training = config.rollout, config.training
    layout, colocated = training.layout, rollout.placement == "colocated"
    for name, role in config.other_roles.items():
        require(
            not role.ranks,
            f"{name}.ranks is {list(role.ranks)}, and megarl launch does not deal out GPUs to a"
            " role on ranks of its own; start the run with torchrun",
        )
    rest = layout.sequence * layout.tensor
    num_ranks = options.num_train_gpus or layout.data * rest
    require(
        num_ranks > 0,
        "training.layout.data is 0, so the recipe leaves the number of ranks open; set"
        " --gpus-train",
    )
    if layout.data and num_ranks != layout.data * rest:
        fits = num_ranks % rest == 0
        other = f", or training.layout.data to {num_ranks // rest}" if fits else ""
        raise ValueError(
            f"--gpus-train is {num_ranks}, but training.layout is data {layout.data} x sequence"
            f" {layout.sequence} x tensor {layout.tensor} = {layout.data * rest} ranks, one a GPU;"
            f" set --gpus-train to {layout.data * rest}{other}"
        )
    try:
        resolved = resolve(
            data=layout.data, sequence=layout.sequence, tensor=layout.tensor, num_ranks=num_ranks
        )
    except ValueError as error:
        raise ValueError(f"--gpus-train is {num_ranks}, one rank a GPU: {error}") from error
    engines, tensor = rollout.num_engines, rollout.engine.tensor
    require(
        options.num_engine_gpus in (None, engines * tensor),
        f"--gpus-engine is {options.num_engine_gpus}, but rollout.num_engines {engines} x"
        f" rollout.engine.tensor {tensor} needs {engines * tensor}; set --gpus-engine to"
        f" {engines * tensor}, or rollout.num_engines to match",
    )
    require(
        not colocated or engines * tensor == num_ranks,
        f"rollout.placement is 'colocated', but rollout.num_engines {engines} x"
        f" rollout.engine.tensor {tensor} = {engines * tensor} engine ranks cannot share the GPUs"
        f" of {num_ranks} trainer ranks; set rollout.num_engines so that they are as many",
    )
    samples = rollout.groups_per_step * rollout.group_size // training.num_mini_batches
    require(
        samples >= resolved.data,
        f"a mini-batch has {samples} samples for {resolved.data} data ranks; raise"
        " rollout.groups_per_step or group_size, or lower training.num_mini_batches",
    )
    return Plan(
        config.folder,
        num_ranks,
        engines,
        tensor,
        colocated,
        training.num_threads,
        config.environment.remote.token_variable,
    )


def deal(plan: Plan, gpus: Sequence[str], found: str) -> Gpus:
    """Assign the first of `gpus` to the trainer ranks and the following ones to the engines. A
    colocated engine e shares the GPUs of ranks [e * tensor, (e + 1) * tensor).

    `found` says where the list of GPUs comes from, for the `ValueError` raised if it is too short.
    """
    ranks, tensor = plan.num_ranks, plan.tensor
    share = "colocated " if plan.colocated else ""
    require(
        len(gpus) >= plan.num_gpus,
        f"{ranks} trainer ranks and {plan.num_engines} {share}engines of {tensor} need"
        f" {plan.num_gpus} GPUs, but {found}; change the recipe's training.layout and"
        " rollout.num_engines, free GPUs, or rehearse with --cpu",
    )
    first = 0 if plan.colocated else ranks
    starts = [first + engine * tensor for engine in range(plan.num_engines)]
    return Gpus(list(gpus[:ranks]), [list(gpus[start : start + tensor]) for start in starts])


def slurm_host(environment: Mapping[str, str], own: str) -> str:
    """The host of the Slurm allocation, or `own` outside Slurm. Raises `ValueError` if the
    allocation has several nodes, or if Slurm started several copies of this command.
    """
    if not environment.get("SLURM_JOB_ID"):
        return own
    host = environment.get("SLURM_JOB_NODELIST", own)
    nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or "1"
    require(
        nodes == "1",
        f"the Slurm allocation has {nodes} nodes ({host}), but megarl launch runs on one; allocate"
        " one: --nodes=1 (more nodes are not supported yet)",
    )
    tasks = environment.get("SLURM_NTASKS") or "1"
    require(
        tasks == "1" or not environment.get("SLURM_STEP_ID"),
        f"srun started this command {tasks} times; start it once: srun --ntasks=1",
    )
    return host


@dataclass(frozen=True)
class Command:
    """A program to start in a new session, with the variables in `environment` added."""

    environment: dict[str, str]
    words: list[str]

    def __str__(self) -> str:
        """The command as one line for a shell."""
        settings = [
            f"{name}={shlex.quote(value) if value else ''}"
            for name, value in self.environment.items()
        ]
        start = ["env", *settings, "setsid"] if settings else []
        return " ".join([*start, *map(shlex.quote, self.words)])


def describe(
    plan: Plan, gpus: Gpus, facts: Mapping[str, str], port: int, commands: Sequence[Command]
) -> str:
    """A text that lists the processes to start and their GPUs, after the lines in `facts`."""

    def on(numbers: Sequence[str]) -> str:
        return f"GPU {','.join(numbers)}" if numbers else "CPU"

    rows = [("process", "runs on")]
    rows += [
        (f"trainer rank {rank}", on(gpus.ranks[rank : rank + 1])) for rank in range(plan.num_ranks)
    ]
    rows += [
        (f"engine {engine} (tensor {plan.tensor})", on(numbers))
        for engine, numbers in enumerate(gpus.engines)
    ]
    rows += [("rollout service", "CPU"), (f"Ray (port {port})", "CPU")]
    return "\n".join(
        [
            *(f"{name:9} {value}" for name, value in facts.items()),
            "",
            *(f"{process:24} {place}" for process, place in rows),
            "",
            "commands, each with the same random RAY_AUTH_TOKEN in its environment:",
            *(f"  {command}" for command in commands),
        ]
    )
