"""`megarl run`: the words of the command that starts the run of a recipe on this machine.

    recipe.yaml --steps 3  --words_to_start-->  train recipe.yaml --steps 3
                                                torchrun --nproc-per-node 2 train recipe.yaml ...
                                                launch recipe.yaml --gpus-train 2 -- --steps 3

Nothing is started here: the command line runs the words that are returned.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from megarl import config as configs
from megarl.apps.launch.launch_plan import (
    NUMBERS,
    SWITCHES,
    Options,
    add_options,
    fewest_ranks,
    shared_ranks,
    whole_number,
)
from megarl.console import Arguments, say
from megarl.errors import UserError
from megarl.parallel import launcher
from megarl.parallel.devices import are_hidden, driver_gpus
from megarl.recipe_kind import recipe_kind
from megarl.schema import require
from megarl.signals import SHUTDOWN, SHUTDOWN_S


class RunOptions(Options):
    """Parsed options of `megarl run`: those of `megarl launch` and three of its own, None or False
    where the option is not given.
    """

    ranks: int | None = None
    check: bool = False
    print_config: bool = False


def words_to_start(arguments: Sequence[str]) -> list[str]:
    """The words after `megarl` that do what `megarl run ARGUMENTS` asks for. `arguments`: the
    recipe, then options of `megarl run` and settings of the recipe in any order. The command that
    trains the recipe (train, distill, sft, preference or reward-model) is found by the recipe's
    sections. It is run

    - by `megarl launch`, on a machine with GPUs, in a job of Slurm, and with an option of `launch`;
    - elsewhere in this process, or by `megarl torchrun` where the run has several ranks.

    Without `--ranks` the run has as many ranks as the recipe's layout, roles and colocated engines
    need, which a line on standard error says. Raises `UserError` or `ValueError` for a mistake in
    the words or in the recipe.
    """
    if not arguments or arguments[0].startswith("-"):
        raise UserError(
            "megarl run needs a recipe first: megarl run RECIPE.yaml [--section.key value ...]"
        )
    recipe, *words = arguments
    if "--" in words:
        words.remove("--")
    parser = Arguments("megarl run")
    add_options(parser)
    parser.add_argument("--ranks", type=whole_number)
    for option in ("--check", "--print-config"):
        parser.add_argument(option, action="store_true")
    found, overrides = parser.parse_known_args(words, RunOptions())
    has_gpus = bool(os.environ.get("SLURM_JOB_ID")) or _has_gpus()
    if (
        found.dry_run
        and "RANK" not in os.environ
        and not (has_gpus or found.gpus_per_node or found.nodes or found.cpu)
    ):
        found.cpu = True
        say("megarl run: no GPU here, so the plan is for CPUs; for GPUs set --gpus-per-node N")
    of_launch = _options_of_launch(found)
    asked = [option for option in ("--check", "--print-config") if _value(found, option)]
    is_rank = "RANK" in os.environ  # torchrun has started this process
    _refuse_conflicts(found, of_launch, asked, is_rank=is_rank)
    kind = recipe_kind(configs.written_tree(recipe), overrides)
    plain = [configs.COMMANDS[kind], recipe, *overrides]
    if found.print_config or is_rank:
        return [*plain, *asked]
    launches = bool(of_launch or has_gpus)
    config, ranks = configs.read(kind, recipe, overrides), found.ranks
    if ranks is None and found.gpus_train is None:
        is_open = config.training.layout.data == 0
        if is_open or asked or not launches:  # else `megarl launch` counts and shows the ranks
            ranks = fewest_ranks(config)
        if ranks is not None and (ranks > 1 or launches):
            why = "as the recipe's layout asks for"
            if is_open and shared_ranks(config):
                why = "as the recipe's colocated engines ask for"
            elif is_open:
                why = "the fewest that the recipe's layout asks for; for more set --ranks"
            say(f"megarl run: {ranks} trainer rank{'s' if ranks > 1 else ''}, {why}")
    several = ranks is not None and ranks > 1
    if asked:  # without --ranks the check takes this process for a rank that has been started
        return [*plain, *asked, *(["--ranks", str(ranks)] if several or launches else [])]
    if launches:
        counted = ["--gpus-train", str(ranks)] if ranks else []
        settings = ["--", *overrides] if overrides else []
        return ["launch", recipe, *of_launch, *counted, *settings]
    if several:
        return ["torchrun", "--nproc-per-node", str(ranks), *_patience(config), *plain]
    return plain


def _refuse_conflicts(
    found: RunOptions, of_launch: list[str], asked: list[str], *, is_rank: bool
) -> None:
    """Raise `ValueError` for options of which one would be ignored. `of_launch`: the words of those
    of `megarl launch`; `asked`: those of --check and --print-config that were given; `is_rank`:
    whether this process is a rank, which starts no others.
    """
    require(
        not (found.ranks and found.gpus_train),
        "--ranks and --gpus-train both say how many trainer ranks there are; leave one out",
    )
    require(
        not (found.ranks and found.print_config),
        "--print-config prints the same for any --ranks; leave one out",
    )
    require(
        not (asked and of_launch),
        f"{' and '.join(asked)} is not for a placement, which {' '.join(of_launch)} asks for; leave"
        " one out, or take --dry-run, which checks the recipe too and prints the placement",
    )
    starts = [*of_launch, *(["--ranks", str(found.ranks)] if found.ranks else [])]
    require(
        not (is_rank and starts),
        f"{' '.join(starts)} is for the process that starts the ranks, but the environment variable"
        " RANK is set, as torchrun sets it in a rank; leave the option out, or unset RANK",
    )


def _patience(config: configs.AnyConfig) -> list[str]:
    """torchrun's option to wait long enough after a signal for a checkpoint of the recipe's
    `training.checkpoint.save_within_s`, as words; none where torchrun waits long enough without.
    """
    needs_s = math.ceil(config.training.checkpoint.save_within_s) + 5  # until the ranks have ended
    waits_s = launcher.number(SHUTDOWN, SHUTDOWN_S)
    return ["--shutdown-timeout", str(needs_s)] if needs_s > waits_s else []


def _options_of_launch(found: Options) -> list[str]:
    """The options of `megarl launch` that were given, as words."""
    words = []
    for option in (*NUMBERS, *SWITCHES):
        if value := _value(found, option):
            words += [option] if option in SWITCHES else [option, str(value)]
    return words


def _value(found: Options, option: str) -> int | bool | None:
    """The value of an option, such as "--dry-run"; None or False where it was not given."""
    return getattr(found, option.removeprefix("--").replace("-", "_"))


def _has_gpus() -> bool:
    """Whether this machine has GPUs that the user has not hidden."""
    return not are_hidden() and bool(driver_gpus())
