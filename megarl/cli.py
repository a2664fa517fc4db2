"""The command line: `megarl train | sft | eval | launch | doctor`; `python -m megarl` is the same.

    megarl train RECIPE.yaml [--section.key value ...] [--print-config]
    torchrun --nproc-per-node 2 -m megarl train RECIPE.yaml

Exit codes: 0 done, 2 the recipe or its data are at fault (one message), 1 anything else, 130 / 143
ended by a signal.
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

END_WITHIN_S = 6.0
"""After a signal, everything a training process started is gone within this time, by force if need
be."""


@dataclass(frozen=True)
class Command:
    """A subcommand. What `check` and `run` name is imported when it is needed: a mistake in a
    recipe is reported before DeepSpeed or Ray are imported.
    """

    summary: str
    run: str
    """`module:function` of (config, inputs) -> exit code; of (arguments) without a recipe."""
    config: str = ""
    """Class in `megarl.config` that the recipe is read as; empty: the command has no recipe."""
    check: str = ""
    """`module:function` of (config) -> inputs; raises `ValueError` for what the user can
    correct.
    """
    end_within_s: float = END_WITHIN_S
    """After a signal, everything the command started is gone within this time."""


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


def usage() -> str:
    """The help text, from `COMMANDS`."""
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
    """Entry point; never returns."""
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
        # Not through the interpreter's own shutdown: with a peer gone, a library's exit handler may
        # wait for it for ever.
        traceback.print_exc()
        code = 1
    except Ended as ended:
        code = 128 + ended.number
    leave(code)


class Ended(BaseException):
    """SIGTERM or Ctrl-C arrived: unwinds like an error, so that everything started is taken
    down.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end(number: int, frame: FrameType | None) -> None:
    """First signal: unwind. `_guard` sees to it that this does not take too long.
    Later ones change nothing.
    """
    for known in SIGNALS:
        signal.signal(known, signal.SIG_IGN)
    raise Ended(number)


def _guard(within_s: float) -> None:
    """Arm the time limit of `within_s` the moment a signal arrives, even while this process is
    inside a library's C code.

    Python runs a handler only between its own instructions; the byte it writes to the wake-up
    descriptor comes at once.
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
    """Unwinding hangs: in a collective, say, whose other ranks are gone. Kill what this process
    started, and leave.
    """
    import psutil

    print(
        f"megarl: not down {within_s:g} s after signal {number}: killing what is left",
        file=sys.stderr,
        flush=True,
    )
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(128 + number)


def dispatch(name: str, rest: list[str]) -> int:
    """Run a command; raises `UserError` for what the user can correct in recipe, data or
    machine.
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
    """The function that `module:function` names."""
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)


def fail(message: str) -> NoReturn:
    """One line on standard error, from one rank only."""
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        print(f"megarl: error: {message}", file=sys.stderr)
    else:
        # Most mistakes are every rank's: rank 0 tells them. One that only this rank has is told
        # after a moment.
        time.sleep(3)
        print(f"megarl: error on rank {rank}: {message}", file=sys.stderr)
    sys.exit(2)


def leave(code: int) -> NoReturn:
    """End the process without the destructors of half a dozen libraries, which may hang after a
    signal.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
