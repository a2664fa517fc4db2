"""The command line, also as `python -m megarl`; its commands are in `command_line/table.py`.

Exit codes: 0 success, 2 a mistake in recipe or data (one error message on standard error), 129 /
130 / 143 ended by a signal (SIGHUP, Ctrl-C, SIGTERM), 1 any other error.
"""

from __future__ import annotations

import locale
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from megarl.command_line.table import COMMANDS, TASKS, Command
from megarl.errors import UserError, require, shortened
from megarl.system import console, signals
from megarl.system.lookup import load
from megarl.system.private_folder import run_folder
from megarl.system.quick_imports import quick_imports

if TYPE_CHECKING:
    from megarl.settings.config import AnyConfig, ServeRewardConfig
    from megarl.system.console import Options

LONGEST_MESSAGE = 2000
"""Of an error, which may repeat a text of the user's."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and end the process with its exit code. `arguments`: the words after `megarl`,
    by default those of this process.
    """
    if arguments is None:
        use_utf8()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    os.umask(os.umask(0o077) | 0o022)  # what a command and its processes write, only they change
    signals.handle()
    console.prepare()
    if sys.flags.optimize > 1:
        fail("PYTHONOPTIMIZE=2 removes docstrings, which transformers reads; unset it")
    start = None
    try:
        page = help_page(arguments)
        if page is not None:
            console.result(page)
            leave(0 if arguments else 2)
        start = plan(arguments)
        if start.owns_folder:
            signals.die_with_launcher()
        signals.guard(start.end_within_s)
        code = start.run()
    except UserError as error:
        fail(str(error))
    except SystemExit as shown:  # by `console`, or the user's code
        code = shown.code if isinstance(shown.code, int) else 1
        if isinstance(shown.code, str):
            print(shown.code, file=sys.stderr)
    except Exception:
        # Python's own shutdown may hang: a library's exit handler waits for a rank that is gone.
        traceback.print_exc()
        code = 1
    except KeyboardInterrupt as caught:
        ended = signals.ending(caught)
        name = arguments[0] if arguments else ""
        trains = name in COMMANDS and COMMANDS[name].owns_folder
        signals.say_end(name, ended, trains=trains if start is None else start.owns_folder)
        code = 128 + ended.number
    leave(code)


def use_utf8() -> None:
    """If the locale is not UTF-8, start again in Python's UTF-8 mode: files are then UTF-8 here
    and, by PYTHONUTF8, in all processes.
    """
    is_utf8 = sys.flags.utf8_mode or locale.getencoding().lower().replace("-", "") == "utf8"
    if not is_utf8 and os.environ.get("PYTHONUTF8") != "1":  # it is ignored under python -E
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def help_page(arguments: list[str]) -> str | None:
    """The text for a command line that starts nothing (help, versions, completion), else None.
    Raises `UserError` for an unknown command.
    """
    from megarl.command_line import pages  # here: signals are heard by now
    from megarl.command_line.words import asks, closest

    words = list(arguments) or ["--help"]
    if words[0] == "help" or asks(words[0]):
        words = [*words[1:2], "--help", *words[2:]]
    name, rest = words[0], words[1:]
    if asks(name):
        return pages.usage()
    if name == "--version":
        return load("megarl.command_line.versions:versions")()
    if name == "completion":
        return load("megarl.command_line.pages:completion")(rest)
    if name not in COMMANDS:
        close = closest(name, [*COMMANDS, "completion"]) or f"; use {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {name!r}{close}")
    return pages.page(name, rest) if any(map(asks, rest)) else None


@dataclass(frozen=True)
class Start:
    """What a command line starts: `run` returns the exit code."""

    run: Callable[[], int]
    end_within_s: float
    """After a signal, until everything that `run` started has ended."""
    owns_folder: bool = False
    """Whether this process is to own the run folder."""


def plan(arguments: list[str]) -> Start:
    """What a command line starts. Raises `UserError` for mistakes in the words and in the recipe's
    task.
    """
    from megarl.command_line.words import parse, refuse_unknown
    from megarl.settings.recipe_paths import typed

    name, *words = map(typed, arguments)
    command = COMMANDS[name]
    refuse_unknown(name, words)
    if command.first == "RUN":
        refuse_no_run(words)
    kinds = command.kinds()
    if not kinds:
        return Start(lambda: load(command.run)(words), command.end_within_s)
    options = parse(name, words)
    try:
        if command.arguments:
            load(command.arguments)(options)
        config = read_recipe(name, options)
        processes = load(command.starts)(name, options, config) if command.starts else None
        if processes is not None:
            return Start(processes, 90.0)  # more than it gives the ranks, and then Ray
    except (ValueError, PermissionError) as error:
        raise mistake(error) from error
    run = partial(run_recipe, command, config, options)
    return Start(run, command.end_within_s, command.owns_folder)


def read_recipe(name: str, options: Options) -> AnyConfig | ServeRewardConfig:
    """The configuration of a command's recipe. Raises `ValueError` for a mistake in it, or if the
    command does not take its task.
    """
    from megarl.settings import config as configs

    kinds, recipe = COMMANDS[name].kinds(), options.recipe

    def recipe_class(tree: dict[str, Any]) -> type[AnyConfig | ServeRewardConfig]:
        if "" in kinds:
            return kinds[""]
        config_class = configs.task_class(tree, f"recipe {recipe}")
        require(
            config_class in kinds.values(),
            f"recipe {recipe} has task: {config_class.model_fields['task'].default}, and megarl"
            f" {name} needs a recipe with task: {' or '.join(COMMANDS[name].tasks)}",
        )
        return config_class

    say = console.say if os.environ.get("RANK", "0") == "0" else str
    handed = configs.take_handed()
    return handed or configs.read(recipe_class, recipe, options.overrides, say)


def run_recipe(command: Command, config: AnyConfig | ServeRewardConfig, options: Options) -> int:
    """Run a command in this process: plan everything, run. Raises `UserError` for mistakes in
    recipe, data or machine.
    """
    from megarl.settings import config as configs

    is_main = os.environ.get("RANK", "0") == "0"
    say = console.say if is_main else str
    if options.print_config:
        console.result(configs.dump(config).rstrip("\n"))
        return 0
    work = command
    if isinstance(config, configs.AnyConfig) and not command.run:
        work = TASKS[config.task]
    with console.diverted(), ExitStack() as stack:
        stack.enter_context(run_folder())
        try:
            with console.phase("checks"):
                from megarl.system import process_env
                from megarl.trainer import threads

                process_env.prepare_environment(threads.process_threads(config))
                # Folder and files before the imports of the plan, which take seconds.
                folder = load("megarl.checkpoints.run_folder:plan_folder")
                owns, starts = command.owns_folder, not options.check
                owner = stack.enter_context(folder(config, owns=owns, starts=starts))
                if command.reads_files and is_main:
                    files = load("megarl.run.named_files:check_named_files")
                    files(config, trains=command.owns_folder)
                with quick_imports():
                    check = load(work.check)
                    if getattr(getattr(config, "training", None), "precision", "") == "auto":
                        config = load("megarl.trainer.precision:resolved")(config, say)
                inputs = check(config, options.ranks)
                if owner is not None:
                    inputs = replace(inputs, owner=owner)
        except (ValueError, PermissionError) as error:
            raise mistake(error) from error
        if options.check:
            console.say(f"checked: {inputs}")
            if command.owns_folder:
                outlook = load("megarl.checkpoints.run_files:outlook")
                line = outlook(config, inputs.resume_from, inputs.num_rows)
                console.say(line) if line else None
            return 0
        with quick_imports():
            run = load(work.run)
        return run(config, inputs)


def refuse_no_run(words: list[str]) -> None:
    """Raise `UserError` if the named run folder (the first word, without options and the value of
    `--out`) does not exist.
    """
    for before, word in zip(["", *words], words, strict=False):
        if not word.startswith("-") and before != "--out":
            if not os.path.isdir(word):
                problem = "is a file" if os.path.exists(word) else "does not exist"
                raise UserError(
                    f"{word} {problem}; name the run folder, which the recipe has as folder"
                )
            return


def mistake(error: ValueError | PermissionError) -> UserError:
    """A `UserError` on one line; of a `PermissionError` with what to do."""
    message = str(error)
    if isinstance(error, PermissionError) and error.filename is not None:
        message = (
            f"{error.filename} cannot be opened: {error.strerror}; give this user the right to it"
            " and to the folders above, or set another path in the recipe"
        )
    return UserError(shortened(message, LONGEST_MESSAGE))


def fail(message: str) -> NoReturn:
    """Print an error and exit with 2. Ranks but 0 wait 3 seconds: most mistakes concern all, and
    the launcher ends them.
    """
    rank = os.environ.get("RANK", "0")
    who = "" if rank == "0" else f" on rank {rank}"
    # Rank 0 prints mistakes that all ranks share, and the launcher then kills the others; a mistake
    # of another rank alone is printed after the wait.
    try:
        time.sleep(3 if who else 0)
    except KeyboardInterrupt:  # the launcher, after rank 0 has printed it
        leave(2)
    console.say(f"megarl: error{who}: {message}")
    sys.exit(2)


def leave(code: int) -> NoReturn:
    """End the process at once: exit handlers of libraries may hang after a signal."""
    console.flush_streams()
    os._exit(code)


if __name__ == "__main__":
    main()
