"""Starts a tool again as N ranks, each a process of its own with one thread, and ends them all with
the tool.

    answers = launch(__file__, {"tokens": 16}, num_ranks=4, deadline_s=300)      in the tool
    if rank_task() is not None: answer(work(rank_task()))                        in the same file,
    as a rank

What is asked and answered is JSON, in files of a folder that goes away. A rank that fails ends the
others.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TASK, ANSWER = "MEGARL_TOOL_TASK", "MEGARL_TOOL_ANSWER"
QUIET = 0.05
"""Share of the CPU that others may use before a tool says that its times are worth little."""


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_task() -> dict[str, Any] | None:
    """What this process was started for as a rank; None where it is the tool itself."""
    path = os.environ.get(TASK)
    if path is None:
        return None
    # A tool that is killed cannot end its ranks: Linux does it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    return json.loads(Path(path).read_text())


def answer(value: dict[str, Any]) -> None:
    """Give the tool this rank's result."""
    Path(os.environ[ANSWER]).write_text(json.dumps(value))


def _environment(
    rank: int, num_ranks: int, port: int, folder: Path, extra: dict[str, str]
) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
        TASK: str(folder / "task"),
        ANSWER: str(folder / f"answer-{rank}"),
        **extra,
    }


def _last_words(text: str) -> str:
    """The error a rank ended with, or the end of what it said."""
    lines = [
        re.sub(r"^\[rank\d+\]: ?", "", line)
        for line in text.strip().splitlines()
        if not line.startswith("USDT:")
    ]
    errors = [line for line in lines if line.startswith(("ValueError: ", "RuntimeError: "))]
    return errors[-1].split(": ", 1)[1] if errors else "\n".join(lines[-25:])


def launch(
    script: str,
    task: dict[str, Any],
    *,
    num_ranks: int,
    deadline_s: float,
    environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Each rank's answer. Raises `RuntimeError` with a rank's last words, or when they are not done
    after `deadline_s`.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder, port = Path(name), free_port()
        (folder / "task").write_text(json.dumps(task))
        outputs = [folder / f"output-{rank}" for rank in range(num_ranks)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, path in enumerate(outputs):
                with path.open("wb") as output:
                    command = [sys.executable, str(Path(script).resolve())]
                    variables = _environment(rank, num_ranks, port, folder, environment or {})
                    ranks.append(
                        subprocess.Popen(
                            command, env=variables, stdout=output, stderr=subprocess.STDOUT
                        )
                    )
            end = time.monotonic() + deadline_s
            while any(process.poll() is None for process in ranks):
                if any(process.poll() not in (None, 0) for process in ranks):
                    break
                if time.monotonic() > end:
                    said = "\n".join(
                        f"rank {rank}: {_tail(path)}" for rank, path in enumerate(outputs)
                    )
                    raise RuntimeError(
                        f"{num_ranks} ranks were not done after {deadline_s:g} s; raise"
                        f" --deadline\n{said}"
                    )
                time.sleep(0.05)
            # Who failed first says why; others say that it left.
            codes = [process.poll() for process in ranks]
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        failed = {
            rank: outputs[rank].read_text(errors="replace")
            for rank, code in enumerate(codes)
            if code not in (None, 0)
        }
        for rank in sorted(failed, key=lambda rank: "Connection closed by peer" in failed[rank]):
            raise RuntimeError(
                f"rank {rank} of {num_ranks} ended with {codes[rank]}: {_last_words(failed[rank])}"
            )
        return [json.loads((folder / f"answer-{rank}").read_text()) for rank in range(num_ranks)]


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "(said nothing)"


# ---------------------------------------------------------------- the machine, and who else uses it


def machine() -> dict[str, Any]:
    """What this runs on."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )
    found = {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


class Others:
    """The share of the CPU that processes outside of this tool took while it was open, in
    `share`.
    """

    share = 0.0

    def __enter__(self) -> Others:
        self._begun, self._busy, self._ours = (
            time.monotonic(),
            self._machine_s(),
            self._children_s(),
        )
        return self

    def __exit__(self, *_: object) -> None:
        available = (time.monotonic() - self._begun) * (os.cpu_count() or 1)
        theirs = self._machine_s() - self._busy - (self._children_s() - self._ours)
        self.share = max(0.0, theirs / available)

    @staticmethod
    def _machine_s() -> float:
        """CPU seconds that all processes have used since boot, and those the machine was denied."""
        fields = [
            int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        ]
        user, nice, system, _idle, _wait, interrupt, soft, steal = fields[:8]
        return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def _children_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime


def end_on_sigterm() -> None:
    """Have SIGTERM run the `finally` blocks, which end the ranks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, smallest, largest, and all in their order."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }


def numbers(text: str) -> list[int]:
    """Whole numbers of 1 or more, separated by commas."""
    found = [int(word) for word in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def run_tool(
    name: str,
    *,
    arguments: Callable[[list[str]], Any],
    work: Callable[[dict[str, Any]], dict[str, Any]],
    measure: Callable[[Any], dict[str, Any]],
    show: Callable[[dict[str, Any]], Iterable[str]],
    argv: list[str] | None,
) -> int:
    """The command line of a tool that launches itself: as a rank it does its `work`, else it prints
    what `measure` finds.

    `measure` gets what `arguments` made of the command line, `show` makes lines of {machine, task,
    what was measured}; with
    --json they are printed as they are. Returns the exit status.
    """
    task = rank_task()
    if task is not None:
        answer(work(task))
        return 0
    args = arguments(sys.argv[1:] if argv is None else argv)
    end_on_sigterm()
    try:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        result = {"machine": machine(), "task": settings, **measure(args)}
    except (RuntimeError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result) if args.json else "\n".join(show(result)))
    return 0
