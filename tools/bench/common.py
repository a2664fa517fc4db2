"""The frame of all tools: the command line, the machine's description, the CPU share of other
processes, tables, and statistics over rounds. Imports no megarl and, at module level, no torch.

    OPTIONS = {"--tokens": (2048, "tokens of a step"), "--kinds": (["a"], "of them", ("a", "b"))}

    def measure(args: Args): ...                     returns what json can write
    def show(result) -> Lines: ...                   lines below the machine and the settings;
                                                     or the columns of a table of result["rows"];
                                                     or "" for a line for each name and value

    if __name__ == "__main__":
        run_tool(__doc__, OPTIONS, measure, show)

A tool that starts itself as several ranks (launch_ranks.py) has a function `work(task)` as well.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
QUIET = 0.05
"""Share of the CPU that other processes may use before a tool warns about its times."""
PR_SET_CHILD_SUBREAPER = 36  # of <sys/prctl.h>
NO_SETTINGS = ("json", "work", "deadline")
T = TypeVar("T")
Options = dict[str, tuple[Any, ...]]
Lines = Iterator[str]
Args = argparse.Namespace
"""What a command line says, with `work`; see `run_tool`."""

# ------------------------------------------------------------------------------- the command line


def _whole_number(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is too small; set it to {least} or more")
        return int(text)

    return number


def _argument(default: Any, about: str, of: Any = None) -> dict[str, Any]:
    """Arguments of `add_argument` for an option; see `command_line`."""
    if default is False:
        return {"action": "store_true", "help": about}
    if callable(of):
        return {"type": of, "default": default, "help": about}
    if isinstance(default, type):
        return {"type": default, "help": about, "choices": of}
    least = min(default) if isinstance(default, list) else default
    kind = _whole_number(min(1, least)) if isinstance(least, int) else type(least)
    if not isinstance(default, list):
        return {"type": kind, "default": default, "help": about, "choices": of}

    def words(text: str) -> list[Any]:
        found = [kind(word) for word in text.split(",")]
        if of and (unknown := [word for word in found if word not in of]):
            known = ", ".join(map(str, of))
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not known; choose of {known}")
        return found

    return {"type": words, "default": default, "help": f"{about}; separated by commas"}


def command_line(doc: str | None, options: Options) -> argparse.ArgumentParser:
    """A parser with `options`, {"--name" or "name": (default, help, of)}. The type is
    the default's: a list is given as words with commas between, False is a switch, and a type in
    the place of the default has none. Whole numbers are 1 or more, or 0 where that is the default.
    `of`: the values that there are, or a function that reads the text.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, option in options.items():
        parser.add_argument(name, **_argument(*option))
    return parser


def group_shape(text: str) -> tuple[int, int, int]:
    """(prompt tokens, samples of a group, response tokens) of "512:8x64". Raises `ValueError`."""
    found = tuple(map(int, text.replace("x", ":").split(":")))
    if len(found) != 3 or min(found) < 1:
        raise ValueError(text)
    return found


def progress(*words: object) -> None:
    """A line on standard error."""
    print(*words, file=sys.stderr, flush=True)


def run_tool(
    doc: str | None,
    options: Options,
    measure: Callable[[Args], dict[str, Any]],
    show: Callable[[dict[str, Any]], Iterable[str]] | str,
    work: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Run a tool and end the process.

    In a process that `launch_ranks.launch` started, only `work(task)` runs. In any other process
    `measure(args)` runs, with a temporary folder `args.work`, and {"machine", "task", "others",
    **measured} is printed as one JSON object with --json, or as the lines of `show`.
    `RuntimeError` and `ValueError` become one line on stderr, and exit status 1, as
    {"problem": text} in what was measured does at the end.
    """
    import launch_ranks

    if work is not None and (task := launch_ranks.rank_task()) is not None:
        launch_ranks.answer(work(task))
        return
    of_all = {
        "--deadline": (3600.0, "seconds that ranks, or a run of another program, may take"),
        "--json": (False, "print one JSON object instead of the table"),
    }
    args = command_line(doc, options | of_all).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the `finally` blocks
    if sys.platform == "linux":  # orphans of what is started become children of this process
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    tool = Path(sys.argv[0]).stem
    try:
        with tempfile.TemporaryDirectory(prefix=f"{tool}-") as folder, Others() as others:
            args.work = Path(folder)
            found = measure(args)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"{tool}: {error}")
    settings = {name: value for name, value in vars(args).items() if name not in NO_SETTINGS}
    result = {"machine": machine(), "task": settings, "others": others.share, **found}
    if args.json:
        print(json.dumps(result, default=str))
    else:
        here = result["machine"]
        print(f"{here.get('gpu', here['cpu'])}, {here['cores']} cores; torch {here['torch']}")
        print("; ".join(f"{name} {value}" for name, value in settings.items() if value))
        if isinstance(show, str):
            lines = table(found["rows"], show) if show else listed(result)
        else:
            lines = show(result)
        print(*lines, *warn_if_not_quiet(result["others"]), sep="\n")
    if found.get("problem"):
        sys.exit(found["problem"])


# ---------------------------------------------------------------- the machine, and who else uses it


def machine() -> dict[str, Any]:
    """CPU model, usable cores, memory in GiB, versions of Python and torch, and the GPU if any."""
    import psutil
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    found = {
        "cpu": next(names, "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def own_cpu_s() -> float:
    """CPU seconds used so far by this process and all that it has started, which must not end as
    orphans of somebody else.
    """
    import psutil

    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += sum(times[:4])  # user, system, and both of children that have ended
    return total


class Others:
    """Context manager: `share` is the share of the CPU that processes outside of the tool used
    inside it, with what a hypervisor withheld.
    """

    share = 0.0

    def __enter__(self) -> Others:
        self._before = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        wall, busy, own = (now - at for now, at in zip(self._now(), self._before, strict=True))
        self.share = max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))

    def _now(self) -> tuple[float, float, float]:
        import psutil

        all_times = psutil.cpu_times()
        busy = sum(all_times) - all_times.idle - all_times.iowait - all_times.guest
        return time.monotonic(), busy - all_times.guest_nice, own_cpu_s()


def warn_if_not_quiet(share: float) -> list[str]:
    """A line of warning if other processes used more than `QUIET` of the CPU, else no line."""
    if share <= QUIET:
        return []
    return [
        f"NOT QUIET: other processes used up to {share:.0%} of the CPU; repeat on an idle machine"
        " for the times"
    ]


# ------------------------------------------------------------------------------------------ numbers


def in_turns(
    rounds: int, ways: dict[str, Callable[[], T]], *, skipped: int = 0
) -> dict[str, list[T]]:
    """Call each of `ways` once in every round; {name: what it returned, by rounds}, without the
    first `skipped` rounds.
    """
    found: dict[str, list[T]] = {name: [] for name in ways}
    for _ in range(skipped + rounds):
        for name, way in ways.items():
            found[name].append(way())
    return {name: each[skipped:] for name, each in found.items()}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Statistics of one measurement repeated: median, mean, standard deviation of a sample (0 for
    one value), smallest, largest, and `values` themselves in their order.
    """
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The `spread` of ours / theirs, each pair measured in the same round."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def cell(found: Any, form: str, *, times: float = 1, middle: str = "median") -> str:
    """A number in the format `form`, such as ".2f", or a spread as "median (min to max)"; empty for
    None. `middle`: "mean" for "mean +- deviation".
    """
    if found is None or isinstance(found, str):
        return found or ""
    if not isinstance(found, dict):
        return format(times * found, form)
    names = ("mean", "deviation") if middle == "mean" else ("median", "min", "max")
    values = [format(times * found[name], form) for name in names]
    return " +- ".join(values) if middle == "mean" else "{} ({} to {})".format(*values)


def table(rows: Iterable[dict[str, Any]], columns: str, middle: str = "median") -> Iterator[str]:
    """A Markdown table. `columns`: "TITLE=KEY FORMAT; ...", with the key of a row, which may be
    "outer.inner" and be followed by "*NUMBER" to be multiplied, as in "peak MB=peak*1e-6 ,.1f".
    Without "TITLE=" the key is the title. For `middle` see `cell`.
    """
    whole = []
    for one in map(str.strip, columns.split(";")):
        title, equals, column = one.partition("=")
        whole.append((title, column) if equals else (one.partition(" ")[0], one))

    def text(row: Any, column: str) -> str:
        key, _, form = column.partition(" ")
        key, _, times = key.partition("*")
        for name in key.split("."):
            row = row.get(name) if row is not None else None
        return cell(row, form, times=float(times) if times else 1, middle=middle)

    lines = [[title for title, _ in whole], *([text(row, one) for _, one in whole] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        padded = (word.ljust(width) for word, width in zip(line, widths, strict=True))
        yield f"| {' | '.join(padded)} |"


def listed(result: dict[str, Any]) -> Iterator[str]:
    """A line for each name and value that a tool has measured."""
    names = (name for name in result if name not in ("machine", "task", "others"))
    yield from (f"{name:36}{result[name]}" for name in names)


def weights_of(folder: Path) -> dict[str, Any]:
    """{name: tensor} of a model's folder. Raises `RuntimeError` where it has none."""
    from safetensors.torch import load_file

    found = {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }
    if not found:
        raise RuntimeError(f"{folder} has no weights")
    return found


def qwen2(
    vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    """The config.json of a Qwen2."""
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        **more,
    }


def qwen3(*sizes: int, width: int) -> dict[str, Any]:
    """The config.json of a Qwen3; `sizes` as those of `qwen2`, `width`: of a head."""
    names = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    more = {"head_dim": width, "tie_word_embeddings": True, "max_position_embeddings": 131072}
    return qwen2(*sizes, **more) | names


QWEN3 = {
    "0.6b": qwen3(151936, 1024, 3072, 28, 16, 8, width=128),
    "tiny": qwen3(512, 64, 128, 2, 4, 2, width=32),
}
"""{size: config.json}; the first is that of Qwen3-0.6B."""


def write_config(folder: str | Path, config: dict[str, Any]) -> str:
    """Write a config.json into `folder`; returns the folder's path."""
    Path(folder, "config.json").write_text(json.dumps(config))
    return str(folder)


def engine_arguments(*, on_cpu: bool = True, **more: Any) -> dict[str, Any]:
    """Arguments of an engine of megarl, `on_cpu` of one thread, which ends a response at no token.
    `more`: others, or in their place.
    """
    from megarl.system.process_env import engine_environment

    environment = engine_environment(on_cpu=on_cpu, num_threads=1, kv_cache_gib=1)
    plain = {"number": 0, "stop_token_ids": [], "trust_remote_code": False, "seed": 0}
    return {**plain, **more, "environment": environment | more.get("environment", {})}
