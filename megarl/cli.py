"""The command line, also as `python -m megarl`; its commands are in `command_line/table.py`.

    megarl run RECIPE.yaml [--ranks N] [--section.key value ...] [--print-config]
    megarl run RECIPE.yaml --help rollout
    torchrun --nproc-per-node 2 -m megarl train RECIPE.yaml

Exit codes: 0 success, 2 a mistake in recipe or data (one error message on standard error), 129 /
130 / 143 ended by a signal (SIGHUP, Ctrl-C, SIGTERM), 1 any other error.
"""

from __future__ import annotations

import locale
import os
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from megarl import console, signals
from megarl.command_line.table import COMMANDS
from megarl.errors import UserError, shortened
from megarl.files import refuse_unfit
from megarl.lookup import load
from megarl.private_folder import run_folder
from megarl.quick_imports import quick_imports

LONGEST_MESSAGE = 2000
"""Characters of an error message; a text of the user's that it repeats may be longer."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line `arguments`, the words after `megarl` (None: those of this process), and
    end the process with an exit code: 0 for success, 2 for a mistake of the user, 128 + the
    signal's number after a signal, 1 for any other error. Never returns.
    """
    if arguments is None:
        use_utf8()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    os.umask(os.umask(0o077) | 0o022)  # what a command and its processes write, only they change
    signals.handle()
    console.prepare()
    if sys.flags.optimize > 1:
        fail("PYTHONOPTIMIZE=2 removes docstrings, which transformers reads; unset it")
    try:
        arguments = words_of_command(arguments)
        page = told(arguments)
        if page is not None:
            console.result(page)
            leave(0 if arguments else 2)
        command = COMMANDS[arguments[0]]
        if command.owns_folder:
            signals.die_with_launcher()
        signals.guard(command.end_within_s)
        code = dispatch(arguments[0], arguments[1:])
    except UserError as error:
        fail(str(error))
    except console.Reported as reported:
        code = reported.code
    except Exception:
        # Python's own shutdown may hang: a library's exit handler waits for a rank that is gone.
        traceback.print_exc()
        code = 1
    except KeyboardInterrupt as caught:
        ended = signals.ending(caught)
        found = COMMANDS.get(arguments[0])
        signals.say_end(arguments[0], ended, trains=found is not None and found.owns_folder)
        code = 128 + ended.number
    leave(code)


def use_utf8() -> None:
    """If the locale is not UTF-8, replace this process by the same command in Python's UTF-8 mode
    (exec). File names, and text files that libraries and verifiers open without naming an encoding,
    are then UTF-8, in this process and, by the variable PYTHONUTF8, in all that it starts.
    """
    is_utf8 = sys.flags.utf8_mode or locale.getencoding().lower().replace("-", "") == "utf8"
    if not is_utf8 and os.environ.get("PYTHONUTF8") != "1":  # it is ignored under python -E
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def words_of_command(arguments: list[str]) -> list[str]:
    """The words after `megarl` with another command's in place of those of `megarl run`, which
    starts a recipe by whichever command suits recipe and machine; all other words are returned
    unchanged. Raises `UserError` for what the user can correct.
    """
    from megarl.command_line import pages
    from megarl.recipe_paths import typed

    command = COMMANDS.get(arguments[0]) if arguments else None
    rest = arguments[1:]
    if command is None or not command.becomes or any(map(pages.asks, rest)):
        return arguments
    pages.refuse_unknown(arguments[0], rest)
    try:
        return load(command.becomes)([typed(word) for word in rest])
    except (ValueError, PermissionError) as error:
        raise mistake(error) from error


def told(arguments: list[str]) -> str | None:
    """The text to print for a command line that starts nothing: help, versions or shell completion.
    None for a command line that runs a command. `arguments`: the words after `megarl`. Raises
    `UserError`, the error shown to the user in one line, for an unknown command.
    """
    from megarl.command_line import pages  # here: signals are heard by now

    words = list(arguments) or ["--help"]
    if words[0] == "help" or pages.asks(words[0]):
        words = [*words[1:2], "--help", *words[2:]]
    name, rest = words[0], words[1:]
    if pages.asks(name):
        return pages.usage()
    if name == "--version":
        return load("megarl.command_line.versions:versions")()
    if name == "completion":
        return load("megarl.command_line.completion:answer")(rest)
    if name not in COMMANDS:
        close = pages.closest(name, [*COMMANDS, "completion"]) or f"; use {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {name!r}{close}")
    if any(map(pages.asks, rest)):
        return pages.page(name, rest)
    return None


def dispatch(name: str, rest: list[str]) -> int:
    """Run the command `name` ("train", ...) with the words `rest` that follow it on the command
    line: read the recipe, check everything, and run until the end. Returns the exit code.

    Raises `UserError` for what the user can correct in recipe, data or machine.
    """
    from megarl.command_line import pages
    from megarl.recipe_paths import typed

    command = COMMANDS[name]
    rest = [typed(word) for word in rest]
    pages.refuse_unknown(name, rest)
    if command.first == "RUN":
        refuse_no_run(rest)
    if not command.config:
        return load(command.run)(rest)
    flags = {flag for flag in ("--print-config", "--check") if flag in rest}
    rest = [_long(word, command.flags) for word in rest if word not in flags]
    ranks = _take_ranks(rest)
    if ranks is not None and "--check" not in flags:
        raise UserError(
            f"--ranks is for --check; to start them: megarl torchrun --nproc-per-node {ranks}"
            f" {name} {command.first}"
        )
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
        say = console.say if os.environ.get("RANK", "0") == "0" else str
        config = configs.read(getattr(configs, kind), rest[0], rest[1:], say)
    except (ValueError, PermissionError) as error:
        raise mistake(error) from error
    if "--print-config" in flags:
        console.result(configs.dump(config).rstrip("\n"))
        return 0
    with console.diverted(), ExitStack() as stack:
        stack.enter_context(run_folder())
        try:
            with console.phase("checks"):
                from megarl.cluster import process_env
                from megarl.trainer import threads

                process_env.prepare_environment(threads.process_threads(config))
                owner = None
                if command.owns_folder:  # before the imports of the checks, which take seconds
                    owned = load("megarl.checks.folder_checks:owned_folder")
                    owner = stack.enter_context(owned(config, starts="--check" not in flags))
                if name not in ("replay", "serve-reward") and os.environ.get("RANK", "0") == "0":
                    files = load("megarl.checks.named_files:check_named_files")
                    files(config, trains=command.owns_folder)
                with quick_imports():
                    check = load(command.check)
                    if getattr(getattr(config, "training", None), "precision", "") == "auto":
                        config = load("megarl.trainer.precision:resolved")(config, say)
                inputs = check(config, ranks)
                if owner is not None:
                    inputs = replace(inputs, owner=owner)
        except (ValueError, PermissionError) as error:
            raise mistake(error) from error
        if "--check" in flags:
            console.say(f"checked: {inputs}")
            if command.owns_folder:
                told = load("megarl.checks.run_files:outlook")(config, inputs)
                console.say(told) if told else None
            return 0
        with quick_imports():
            run = load(command.run)
        return run(config, inputs)


def refuse_no_run(words: list[str]) -> None:
    """Raise `UserError` if the run folder that the command line names does not exist, is a file, or
    has an entry of the wrong kind: a FIFO, say, or a file where a run keeps a folder. The run
    folder is the first word that is neither an option nor the value of `--out`; without such a word
    nothing is checked.
    """
    for before, word in zip(["", *words], words, strict=False):
        if not word.startswith("-") and before != "--out":
            if not os.path.isdir(word):
                what = "is a file" if os.path.exists(word) else "does not exist"
                raise UserError(
                    f"{word} {what}; name the run folder, which the recipe has as folder"
                )
            try:
                refuse_unfit(Path(word))
            except ValueError as error:
                raise mistake(error) from None
            return


def _long(word: str, flags: dict[str, str]) -> str:
    """A word of the command line with the recipe's key in place of a short name for it."""
    name, equals, value = word.partition("=")
    return f"{flags.get(name, name)}{equals}{value}"


def mistake(error: ValueError | PermissionError) -> UserError:
    """A `UserError` with the message of `error`, on one line of at most 2000 characters. For a
    `PermissionError` the message asks for the right to the file, or for another path in the recipe.
    """
    said = str(error)
    if isinstance(error, PermissionError) and error.filename is not None:
        said = (
            f"{error.filename} cannot be opened: {error.strerror}; give this user the right to it"
            " and to the folders above, or set another path in the recipe"
        )
    return UserError(shortened(said, LONGEST_MESSAGE))


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


def fail(message: str) -> NoReturn:
    """Print the line "megarl: error: MESSAGE" on standard error and end the process with exit code
    2.

    Ranks other than 0 wait 3 seconds before they print: most mistakes concern every rank, and the
    launcher ends the others once rank 0 has printed its line.
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
    """Write out the standard streams and end the process at once with exit code `code`, without
    exit handlers and destructors of libraries, which may hang after a signal.
    """
    console.flush_streams()
    os._exit(code)


if __name__ == "__main__":
    main()
