"""`megarl run`: which processes run a recipe on this machine.

--cpu, --dry-run, GPUs here, a job of Slurm    Ray and ranks, by `launch.planned`
several ranks                                  ranks, by `parallel.torchrun`
else, and in a rank                            this process
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from megarl.apps.launch.launch_plan import fewest_ranks, shared_ranks
from megarl.checkpoints.run_folder import plan_folder
from megarl.parallel import launcher
from megarl.parallel.devices import are_hidden, driver_gpus
from megarl.run.named_files import check_named_files
from megarl.settings.config import AnyConfig, handed
from megarl.settings.schema import require
from megarl.system.console import Options, say
from megarl.system.lookup import load
from megarl.system.signals import SHUTDOWN, SHUTDOWN_S
from megarl.trainer.role_placement import plan_ranks

PLACEMENT = ("port", "nodes", "gpus_per_node", "cpu", "dry_run", "requeue")
"""Options of `megarl run` with which Ray and ranks are placed on GPUs and nodes."""


def other_processes(name: str, options: Options, config: AnyConfig) -> Callable[[], int] | None:
    """The function that starts the run of a recipe in other processes, waits for it and returns its
    exit code; None where the run is this process. `name`: "run", or "replay", which has ranks but
    no placement; `config`: the recipe.

    Without `--ranks` the run has as many ranks as the recipe's layout, roles and colocated engines
    need, which a line on standard error says, and `options.ranks` is set to it. Raises `ValueError`
    for options that exclude each other.
    """
    launcher.refuse_wrong()
    places, is_rank = name == "run", "RANK" in os.environ
    is_told = bool(options.gpus_per_node or options.nodes or options.cpu)
    is_job = bool(os.environ.get("SLURM_JOB_ID"))
    has_gpus = places and not is_rank and (is_job or (not is_told and _has_gpus()))
    if options.dry_run and not is_rank and not (is_told or has_gpus):
        options.cpu = True
        say("megarl run: no GPU here, so the plan is for CPUs; for GPUs set --gpus-per-node N")
    placed = options.given(*PLACEMENT)
    _refuse_conflicts(options, placed, is_rank=is_rank)
    if options.print_config or is_rank:
        return None
    launches = bool(placed or has_gpus)
    if options.ranks is None and places:
        is_open = config.training.layout.data == 0
        if is_open or options.check or not launches:  # else the plan shows the ranks
            options.ranks = fewest_ranks(config)
        if options.ranks is not None and (options.ranks > 1 or launches):
            why = "as the recipe's layout asks for"
            if is_open and shared_ranks(config):
                why = "as the recipe's colocated engines ask for"
            elif is_open:
                why = "the fewest that the recipe's layout asks for; for more set --ranks"
            say(f"megarl run: {options.ranks} trainer rank{'s'[: options.ranks > 1]}, {why}")
    is_one = options.ranks in (None, 1)
    if options.check:
        if is_one and not launches:
            options.ranks = None  # the check takes this process for the rank
        return None
    if launches:
        return load("megarl.apps.launch.launch:planned")(config, options)
    if is_one:
        return None
    plan_ranks(config, options.ranks or 1)
    with plan_folder(config, starts=False):  # rank 0 takes it
        if places:
            check_named_files(config)
    words = ["--nproc-per-node", str(options.ranks), *_patience(config), "-m", "megarl", name]
    words += [options.words[0], *options.overrides]
    run_agent = "megarl.parallel.torchrun:run_agent"
    return lambda: load(run_agent)(words, environment=handed(config))


def _refuse_conflicts(options: Options, placed: list[str], *, is_rank: bool) -> None:
    """Raise `ValueError` for options of which one would be ignored, or that need another.
    `placed`: the options of a placement that were given.
    """
    require(
        not (options.ranks and options.print_config),
        "--print-config prints the same for any --ranks; leave one out",
    )
    asked = options.given("check", "print_config")
    require(
        not (asked and placed),
        f"{' and '.join(asked)} is not for a placement, which {' '.join(placed)} asks for; leave"
        " one out, or take --dry-run, which checks the recipe too and prints the placement",
    )
    starts = [*placed, *options.given("ranks")]
    require(
        not (is_rank and starts),
        f"{' '.join(starts)} is for the process that starts the ranks, but the environment variable"
        " RANK is set, as torchrun sets it in a rank; leave the option out, or unset RANK",
    )
    require(
        options.dry_run or not (options.nodes or options.gpus_per_node),
        "--nodes and --gpus-per-node plan a run without starting it: megarl run starts this node,"
        " or all nodes of a Slurm allocation; add --dry-run, which prints what to start on each"
        " node",
    )
    require(
        not (options.gpus_per_node and options.cpu),
        "--gpus-per-node and --cpu exclude each other; leave one out",
    )
    require(
        not options.nodes or options.gpus_per_node or options.cpu,
        "--nodes needs --gpus-per-node; set it to the number of GPUs that each node has",
    )


def _patience(config: AnyConfig) -> list[str]:
    """torchrun's option to wait long enough after a signal for a checkpoint of the recipe's
    `training.checkpoint.save_within_s`, as words; none where torchrun waits long enough without.
    """
    needs_s = math.ceil(config.training.checkpoint.save_within_s) + 5  # until the ranks have ended
    waits_s = launcher.number(SHUTDOWN, SHUTDOWN_S)
    return ["--shutdown-timeout", str(needs_s)] if needs_s > waits_s else []


def _has_gpus() -> bool:
    """Whether this machine has GPUs that the user has not hidden."""
    return not are_hidden() and bool(driver_gpus())
