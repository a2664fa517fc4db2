"""The command line: `megarl train | sft | eval | launch | doctor`; `python -m megarl` is the same.

    megarl train RECIPE.yaml [--section.key value ...] [--print-config]
    torchrun --nproc-per-node 2 -m megarl train RECIPE.yaml

Exit codes: 0 success, 2 a mistake in recipe or data (one error message), 130 / 143 ended by a
signal, 1 any other error.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from megarl.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals on which a run stops its processes and exits."""

END_WITHIN_S = 6.0
"""Seconds after a signal until everything this process started has ended, by force if need be."""


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


COMMANDS = {
    "train": Command(
        summary="reinforcement learning",
        config="RunConfig",
        check="megarl.checks.preflight:check_train",
        run="megarl.loops.rl:main",
    ),
    "sft": Command(
        summary="supervised fine-tuning",
        config="SftConfig",
        check="megarl.checks.preflight:check_sft",
        run="megarl.loops.sft:main",
    ),
    "eval": Command(
        summary="score a model on the recipe's held-out problems",
        config="RunConfig",
        check="megarl.checks.preflight:check_eval",
        run="megarl.loops.evaluate:main",
    ),
    "launch": Command(
        summary="a recipe of train on one node: Ray, engines and ranks (--help)",
        run="megarl.cluster.launch:main",
        end_within_s=90.0,  # more than the launcher gives the ranks, and then Ray
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
        recipe = " RECIPE.yaml [--section.key value ...]" if command.config else ""
        lines.append(f"  megarl {name + recipe:50} {command.summary}")
    return "\n".join(
        [
            *lines,
            "",
            "  --print-config   print the resolved recipe and stop",
            "  --check          check everything that can be checked without starting, and stop",
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
    if command not in COMMANDS:
        fail(f"unknown command {command!r}; use {', '.join(COMMANDS)}")
    _guard(COMMANDS[command].end_within_s)
    for number in SIGNALS:
        signal.signal(number, _end)
    try:
        code = dispatch(command, rest)
    except UserError as error:
        fail(str(error))
    except Exception:
        # Python's own shutdown may hang: a library's exit handler waits for a rank that is gone.
        traceback.print_exc()
        code = 1
    except Ended as ended:
        code = 128 + ended.number
    leave(code)


class Ended(BaseException):
    """SIGTERM or Ctrl-C: raised like an error, so that everything that was started is stopped."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end(number: int, frame: FrameType | None) -> None:
    """Signal handler: raise `Ended` at the first signal and ignore later ones.

    `_guard` limits how long the process takes to end.
    """
    for known in SIGNALS:
        signal.signal(known, signal.SIG_IGN)
    raise Ended(number)


def _guard(within_s: float) -> None:
    """Start the thread that ends this process at most `within_s` seconds after a signal.

    Python runs signal handlers only between its own instructions, so a process inside a library's C
    code would not notice; the byte that a signal writes to the wake-up descriptor arrives at once.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def wait() -> None:
        while True:
            number = ours.recv(1)[0]
            if number in SIGNALS:
                time.sleep(within_s)
                _end_now(number, within_s)

    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    threading.Thread(target=wait, daemon=True).start()


def _end_now(number: int, within_s: float) -> None:
    """Kill all child processes and exit: the regular way out hangs, for example in a collective."""
    import psutil

    print(
        f"megarl: still running {within_s:g} s after signal {number}: killing child processes",
        file=sys.stderr,
        flush=True,
    )
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(128 + number)


def dispatch(name: str, rest: list[str]) -> int:
    """Run command `name` with the arguments `rest`; returns the exit code.

    Raises `UserError` for what the user can correct in recipe, data or machine.
    """
    command = COMMANDS[name]
    if not command.config:
        return load(command.run)(rest)
    flags = {flag for flag in ("--print-config", "--check") if flag in rest}
    rest = [word for word in rest if word not in flags]
    if not rest or rest[0].startswith("-"):
        raise UserError(
            f"megarl {name} needs a recipe first: "
            f"megarl {name} RECIPE.yaml [--section.key value ...]"
        )
    from megarl import config as configs

    try:
        config = configs.load(getattr(configs, command.config), rest[0], rest[1:])
        if "--print-config" in flags:
            print(configs.dump(config), end="")
            return 0
        from megarl.cluster.process_env import prepare_environment

        prepare_environment(config.training.num_threads)
        inputs = load(command.check)(config)
    except ValueError as error:
        raise UserError(str(error)) from error
    if "--check" in flags:
        print(f"checked: {inputs}", file=sys.stderr)
        return 0
    return load(command.run)(config, inputs)


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
        time.sleep(3)
        print(f"megarl: error on rank {rank}: {message}", file=sys.stderr)
    sys.exit(2)


def leave(code: int) -> NoReturn:
    """Exit without running destructors of libraries, which may hang after a signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
