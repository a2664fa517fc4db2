"""Shared by the benchmarks: the command line, the machine's description, the CPU share of other
processes, and statistics over rounds. Imports the standard library only at module level: a
benchmark may import this module in an environment without megarl.

A benchmark that starts itself as several ranks (see launch_ranks.py):

    OPTIONS = {"--tokens": {"type": int, "default": 2048, "help": "tokens of a step"}}

    def arguments(argv): return command_line(__doc__, OPTIONS).parse_args(argv)
    def work(task): ...                              on a rank; returns what json can write
    def measure(args): ...                           in the tool, with launch_ranks.launch
    def show(result): ...                            lines of a table

    sys.exit(run_tool("layouts", arguments=arguments, work=work, measure=measure, show=show))
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QUIET = 0.05
"""Share of the CPU that other processes may use before a benchmark warns about its times."""

# ------------------------------------------------------------------------------- the command line


def command_line(doc: str | None, options: dict[str, dict[str, Any]]) -> argparse.ArgumentParser:
    """A parser with `--json` and `options`: {"--name": arguments of `add_argument`}."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    for name, settings in options.items():
        parser.add_argument(name, **settings)
    return parser


def require_positive(
    parser: argparse.ArgumentParser, args: argparse.Namespace, names: Iterable[str]
) -> None:
    """End the program with a usage error if one of the options `names` is below 1."""
    for name in names:
        if getattr(args, name) < 1:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} is {getattr(args, name)}; set it to 1 or more")


def numbers(text: str) -> list[int]:
    """Whole numbers of 1 or more, separated by commas. Raises `ValueError`."""
    found = [int(word) for word in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def end_on_sigterm() -> None:
    """Make SIGTERM run the `finally` blocks, which end the processes the benchmark started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def run_tool(
    name: str,
    *,
    arguments: Callable[[list[str]], argparse.Namespace],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    show: Callable[[dict[str, Any]], Iterable[str]],
    work: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    argv: list[str] | None = None,
) -> int:
    """Run a benchmark; returns its exit status.

    In a process that `launch_ranks.launch` started, only `work(task)` runs. In any other process
    `measure(args)` runs, and {"machine", "task", **measured} is printed as a table by `show`, or as
    one JSON object with --json. `RuntimeError` and `ValueError` become one line on stderr.
    """
    import launch_ranks

    task = launch_ranks.rank_task()
    if task is not None and work is not None:
        launch_ranks.answer(work(task))
        return 0
    args = arguments(sys.argv[1:] if argv is None else argv)
    end_on_sigterm()
    try:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        result = {"machine": machine(), "task": settings, **measure(args)}
    except (RuntimeError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, default=str) if args.json else "\n".join(show(result)))
    return 0


# ---------------------------------------------------------------- the machine, and who else uses it


def machine() -> dict[str, Any]:
    """CPU model, usable cores, memory in GiB, versions of Python and torch, and the GPU if any."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {
        "cpu": next(names, "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def machine_busy_s() -> float:
    """CPU seconds used by all processes since boot, and those a hypervisor withheld."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _wait, interrupt, soft, steal = fields[:8]
    return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")


def children_cpu_s() -> float:
    """CPU seconds of the child processes that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def adopt_orphans() -> None:
    """On Linux, have processes whose parent ends become children of this process, so that
    `reap_orphans` counts their CPU time: Ray's processes, and those of killed engines.
    """
    if sys.platform == "linux":
        set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_child_subreaper, 1)


def reap_orphans() -> None:
    """Collect adopted processes that have ended; `children_cpu_s` counts them from then on. No
    child that somebody else waits for may run.
    """
    with contextlib.suppress(ChildProcessError):  # no child is left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class Others:
    """Context manager: `share` is the share of the CPU that processes outside of the benchmark used
    inside it.

    `own_cpu_s` returns the CPU seconds used by the benchmark so far; by default those of its ended
    children.
    """

    share = 0.0

    def __init__(self, own_cpu_s: Callable[[], float] = children_cpu_s) -> None:
        self.own_cpu_s = own_cpu_s

    def __enter__(self) -> Others:
        self._started_at, self._busy, self._own = (
            time.monotonic(),
            machine_busy_s(),
            self.own_cpu_s(),
        )
        return self

    def __exit__(self, *_: object) -> None:
        available = (time.monotonic() - self._started_at) * (os.cpu_count() or 1)
        others = machine_busy_s() - self._busy - (self.own_cpu_s() - self._own)
        self.share = max(0.0, others / available)


def warn_if_not_quiet(share: float) -> list[str]:
    """A line of warning if other processes used more than `QUIET` of the CPU, else no line."""
    if share <= QUIET:
        return []
    return [
        f"NOT QUIET: other processes used up to {share:.0%} of the CPU; repeat on an idle machine"
        " for the times"
    ]


# ------------------------------------------------------------------------------------------ numbers


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, smallest, largest, and all values in the order of rounds."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }


def cell(found: dict[str, Any], form: str) -> str:
    """A spread as "median (min to max)", each number in the format `form`, such as ".2f"."""
    median, least, most = (format(found[name], form) for name in ("median", "min", "max"))
    return f"{median} ({least} to {most})"


def write_qwen2_config(folder: Path, **sizes: Any) -> str:
    """Write a Qwen2 config.json with `sizes` into `folder`; returns the folder's path."""
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    (folder / "config.json").write_text(json.dumps(config | sizes))
    return str(folder)
