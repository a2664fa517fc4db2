"""The command line: `megarl train | distill | sft | preference | eval | launch | report`, also as
`python -m megarl`.

    megarl train RECIPE.yaml [--section.key value ...] [--print-config]
    torchrun --nproc-per-node 2 -m megarl train RECIPE.yaml

Exit codes: 0 success, 2 a mistake in recipe or data (one error message), 130 / 143 ended by a
signal, 1 any other error.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from megarl import console, signals
from megarl.errors import UserError
from megarl.quick_imports import quick_imports
from megarl.schema import shortened

LONGEST_MESSAGE = 2000
"""Characters of an error message; a text of the user's that it repeats may be longer."""

END_WITHIN_S = 6.0
"""Seconds after a signal until everything this process started has ended, by force if need be."""

SAVED_AND_ENDED_WITHIN_S = signals.SAVE_WITHIN_S + 1.0
"""The same for a command that saves a checkpoint first."""


@dataclass(frozen=True)
class Command:
    """A subcommand of `megarl`.

    The functions are named, not imported, so that a mistake in a recipe is reported before
    DeepSpeed and Ray are imported.
    """

    summary: str
    """What the command does, for the help text."""
    run: str
    """"module:function" of (config, inputs) -> exit code; of (arguments) for a command without
    recipe."""
    config: str = ""
    """Class in `megarl.config` for the recipe; empty for a command without recipe."""
    check: str = ""
    """"module:function" of (config) -> inputs; raises `ValueError` for what the user can
    correct."""
    end_within_s: float = END_WITHIN_S
    """Seconds after a signal until everything the command started has ended."""
    owns_folder: bool = False
    """Whether the command writes to its run folder, which then belongs to it alone."""
    arguments: str = ""
    """For a command that is given something else than a recipe first: "module:function" of (command
    line) -> (class in `megarl.config`, command line with a recipe first)."""
    first: str = "RECIPE.yaml"
    """What the command is given first."""
    flags: tuple[tuple[str, str], ...] = ()
    """(flag, recipe key) of short names for keys of the recipe."""


COMMANDS = {
    "train": Command(
        summary="reinforcement learning",
        config="RunConfig",
        check="megarl.checks.preflight:check_train",
        run="megarl.loops.rl:main",
        end_within_s=SAVED_AND_ENDED_WITHIN_S,
        owns_folder=True,
    ),
    "distill": Command(
        summary="on-policy distillation: learn a teacher's distributions",
        config="DistillConfig",
        check="megarl.checks.preflight:check_train",
        run="megarl.loops.distill:main",
        end_within_s=SAVED_AND_ENDED_WITHIN_S,
        owns_folder=True,
    ),
    "sft": Command(
        summary="supervised fine-tuning",
        config="SftConfig",
        check="megarl.checks.supervised:check_sft",
        run="megarl.loops.sft:main",
        end_within_s=SAVED_AND_ENDED_WITHIN_S,
        owns_folder=True,
    ),
    "preference": Command(
        summary="learn from pairs of responses: DPO and its relatives",
        config="PreferenceConfig",
        check="megarl.checks.supervised:check_preference",
        run="megarl.loops.preference:main",
        end_within_s=SAVED_AND_ENDED_WITHIN_S,
        owns_folder=True,
    ),
    "reward-model": Command(
        summary="train a reward model on pairs of responses",
        config="RewardModelConfig",
        check="megarl.checks.supervised:check_reward_model",
        run="megarl.loops.reward_model:main",
        end_within_s=SAVED_AND_ENDED_WITHIN_S,
        owns_folder=True,
    ),
    "eval": Command(
        summary="score models on held-out problems, with pass@k of several samples",
        config="RunConfig",
        check="megarl.checks.evaluation:check_eval",
        run="megarl.loops.evaluate:main",
    ),
    "sample": Command(
        summary="best of n responses, or pairs of them, as a data set",
        config="RunConfig",
        check="megarl.checks.sampling:check_sample",
        run="megarl.loops.sample:main",
    ),
    "rollout": Command(
        summary="print a few rollouts of a recipe, turn by turn (--num 4)",
        config="RunConfig",
        check="megarl.checks.sampling:check_rollout",
        run="megarl.loops.show_rollouts:main",
        flags=(("--num", "--sample.shown"),),
    ),
    "replay": Command(
        summary="train again on the batches that a run has recorded, and compare",
        config="RunConfig",
        arguments="megarl.checks.replay:arguments",
        first="RUN",
        check="megarl.checks.replay:check_replay",
        run="megarl.loops.replay:main",
        end_within_s=SAVED_AND_ENDED_WITHIN_S,
        owns_folder=True,
    ),
    "serve-reward": Command(
        summary="verifiers, a reward model or a judge as an HTTP server",
        config="ServeRewardConfig",
        check="megarl.checks.reward_server:check_serve_reward",
        run="megarl.loops.serve_reward:main",
        end_within_s=70.0,  # more than server.drain_s may be
    ),
    "launch": Command(
        summary="train, distill or sft with Ray and engines, here or on Slurm's nodes (--help)",
        run="megarl.cluster.launch:main",
        end_within_s=90.0,  # more than the launcher gives the ranks, and then Ray
    ),
    "report": Command(
        summary="write a run folder's report.html again (megarl report RUN)",
        run="megarl.observe.report:main",
    ),
    "ledger": Command(
        summary="what became of every group of a run, audited (megarl ledger RUN [--json])",
        run="megarl.ledger.command:main",
    ),
    "status": Command(
        summary="what each process of a run does, and on whom it waits (megarl status RUN)",
        run="megarl.checks.status:main",
    ),
    "timeline": Command(
        summary="what the processes of a run did, for Perfetto (megarl timeline RUN [--out FILE])",
        run="megarl.observe.timeline:main",
    ),
    "torchrun": Command(
        summary="a training command on several ranks: --nproc-per-node N train RECIPE.yaml",
        run="megarl.parallel.torchrun:command",
        end_within_s=90.0,
    ),
    "doctor": Command(
        summary="what this machine has, and whether it is enough",
        run="megarl.checks.doctor:main",
    ),
}
"""{name on the command line: subcommand}"""


def usage() -> str:
    """The help text of the command line."""
    lines = ["usage: megarl COMMAND ...", ""]
    for name, command in COMMANDS.items():
        recipe = f" {command.first} [--section.key value ...]" if command.config else ""
        lines.append(f"  megarl {name + recipe:50} {command.summary}")
    return "\n".join(
        [
            *lines,
            "",
            "  --print-config   print the resolved recipe and stop",
            "  --check          check everything that can be checked without starting, and stop",
            "  --check --ranks N     the same for a run of N ranks, without starting them",
            "  --help           after a recipe: every key with its meaning",
        ]
    )


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; always ends the process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        sys.exit(0 if arguments else 2)
    command, rest = arguments[0], arguments[1:]
    if sys.flags.optimize > 1:
        fail("PYTHONOPTIMIZE=2 removes docstrings, which transformers reads; unset it")
    if command not in COMMANDS:
        fail(f"unknown command {command!r}; use {', '.join(COMMANDS)}")
    if COMMANDS[command].owns_folder:
        signals.die_with_launcher()
    signals.guard(COMMANDS[command].end_within_s)
    signals.handle()
    try:
        code = dispatch(command, rest)
    except UserError as error:
        fail(str(error))
    except console.Reported as reported:
        code = reported.code
    except Exception:
        # Python's own shutdown may hang: a library's exit handler waits for a rank that is gone.
        traceback.print_exc()
        code = 1
    except signals.Ended as ended:
        code = 128 + ended.number
    leave(code)


def dispatch(name: str, rest: list[str]) -> int:
    """Run command `name` with the arguments `rest`; returns the exit code.

    Raises `UserError` for what the user can correct in recipe, data or machine.
    """
    command = COMMANDS[name]
    if not command.config:
        return load(command.run)(rest)
    flags = {flag for flag in ("--print-config", "--check") if flag in rest}
    rest = [word for word in rest if word not in flags]
    rest = [_long(word, command.flags) for word in rest]
    ranks = _take_ranks(rest) if "--check" in flags else None
    if not rest or rest[0].startswith("-"):
        what = "a recipe" if command.first == "RECIPE.yaml" else "a run folder"
        raise UserError(
            f"megarl {name} needs {what} first: "
            f"megarl {name} {command.first} [--section.key value ...]"
        )
    from megarl import config as configs

    kind = command.config
    try:
        if command.arguments:
            kind, rest = load(command.arguments)(rest)
        config = configs.load(getattr(configs, kind), rest[0], rest[1:])
    except ValueError as error:
        raise mistake(error) from error
    if "--print-config" in flags:
        print(configs.dump(config), end="")
        return 0
    with console.diverted(), ExitStack() as stack:
        try:
            with console.phase("checks"):
                from megarl.cluster.process_env import prepare_environment

                prepare_environment(getattr(config, "training", config).num_threads)
                owner = None
                if command.owns_folder:  # before the imports of the checks, which take seconds
                    owned = load("megarl.checks.folder_checks:owned_folder")
                    owner = stack.enter_context(owned(config, starts="--check" not in flags))
                with quick_imports():
                    check = load(command.check)
                inputs = check(config, ranks)
                if owner is not None:
                    inputs = replace(inputs, owner=owner)
        except ValueError as error:
            raise mistake(error) from error
        if "--check" in flags:
            console.say(f"checked: {inputs}")
            return 0
        with quick_imports():
            run = load(command.run)
        return run(config, inputs)


def _long(word: str, flags: tuple[tuple[str, str], ...]) -> str:
    """A word of the command line with the recipe's key in place of a short name for it."""
    name, equals, value = word.partition("=")
    return f"{dict(flags).get(name, name)}{equals}{value}"


def mistake(error: ValueError) -> UserError:
    """The error as one line, whatever text of the user's the message repeats."""
    return UserError(shortened(str(error), LONGEST_MESSAGE))


def _take_ranks(words: list[str]) -> int | None:
    """Remove `--ranks N` from a command line; returns N, or None where it is not there."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--ranks":
            value = value if equals else "".join(words[index + 1 : index + 2])
            del words[index : index + (1 if equals else 2)]
            if not (value.isascii() and value.isdecimal() and 1 <= int(value[:9]) <= 2**16):
                raise UserError(f"--ranks is {value[:40]!r}; write a number, as in --ranks 8")
            return int(value[:9])
    return None


def load(place: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)


def fail(message: str) -> NoReturn:
    """Print one error line and exit with code 2.

    Rank 0 prints first, since most mistakes concern every rank.
    """
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        print(f"megarl: error: {message}", file=sys.stderr)
    else:
        # Rank 0 prints mistakes that all ranks share, and the launcher then kills the others; a
        # mistake of this rank alone is printed after the wait.
        try:
            time.sleep(3)
        except signals.Ended:  # the launcher, after rank 0 has printed it
            leave(2)
        print(f"megarl: error on rank {rank}: {message}", file=sys.stderr)
    sys.exit(2)


def leave(code: int) -> NoReturn:
    """Exit without running destructors of libraries, which may hang after a signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
