"""Starts a benchmark's own script again as N ranks, one process with one thread each, and ends all
ranks when the benchmark ends.

    answers = launch(__file__, {"tokens": 16}, num_ranks=4, deadline_s=300)   in the benchmark
    if rank_task() is not None: answer(work(rank_task()))                     in a rank

Task and answers are JSON, in files of a temporary folder. A rank that fails ends the others.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT

TASK, ANSWER = "MEGARL_TOOL_TASK", "MEGARL_TOOL_ANSWER"
PR_SET_PDEATHSIG = 1
POLL_S = 0.05


def rank_task() -> dict[str, Any] | None:
    """The task of this rank, or None in a process that `launch` did not start."""
    path = os.environ.get(TASK)
    if path is None:
        return None
    # A benchmark that is killed cannot end its ranks: the kernel ends them with their parent.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return json.loads(Path(path).read_text())


def answer(value: dict[str, Any]) -> None:
    """Return this rank's result to the benchmark."""
    Path(os.environ[ANSWER]).write_text(json.dumps(value))


def launch(
    script: str,
    task: dict[str, Any],
    *,
    num_ranks: int,
    deadline_s: float,
    environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run `script` as `num_ranks` ranks; returns each rank's answer.

    Raises `RuntimeError` with the error of the rank that failed first, or if the ranks have not
    ended after `deadline_s` seconds.
    """
    from megarl.cluster.process_env import prepare_environment
    from megarl.parallel.launcher import free_port

    prepare_environment(1)  # ranks find DeepSpeed's built operators, as in a run
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder, port = Path(name), free_port()
        (folder / "task").write_text(json.dumps(task))
        outputs = [folder / f"output-{rank}" for rank in range(num_ranks)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, path in enumerate(outputs):
                variables = _environment(rank, num_ranks, port, folder, environment or {})
                command = [sys.executable, str(Path(script).resolve())]
                with path.open("wb") as output:
                    ranks.append(
                        subprocess.Popen(
                            command, env=variables, stdout=output, stderr=subprocess.STDOUT
                        )
                    )
            codes = _wait(ranks, outputs, deadline_s)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        _raise_first_failure(codes, outputs)
        return [json.loads((folder / f"answer-{rank}").read_text()) for rank in range(num_ranks)]


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
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TOKENIZERS_PARALLELISM": "false",
        TASK: str(folder / "task"),
        ANSWER: str(folder / f"answer-{rank}"),
        **extra,
    }


def _wait(
    ranks: list[subprocess.Popen[bytes]], outputs: list[Path], deadline_s: float
) -> list[int | None]:
    """Exit codes when all ranks have ended or one has failed; None for ranks still running."""
    end = time.monotonic() + deadline_s
    while any(process.poll() is None for process in ranks):
        if any(process.poll() not in (None, 0) for process in ranks):
            break
        if time.monotonic() > end:
            last = "\n".join(f"rank {rank}: {_tail(path)}" for rank, path in enumerate(outputs))
            raise RuntimeError(
                f"{len(ranks)} ranks were not done after {deadline_s:g} s; raise --deadline\n{last}"
            )
        time.sleep(POLL_S)
    return [process.poll() for process in ranks]


def _raise_first_failure(codes: list[int | None], outputs: list[Path]) -> None:
    failed = {
        rank: outputs[rank].read_text(errors="replace")
        for rank, code in enumerate(codes)
        if code not in (None, 0)
    }
    # The rank that failed first gives the cause; the others report a closed connection.
    for rank in sorted(failed, key=lambda rank: "Connection closed by peer" in failed[rank]):
        raise RuntimeError(
            f"rank {rank} of {len(codes)} ended with {codes[rank]}: {_error_of(failed[rank])}"
        )


def _error_of(output: str) -> str:
    """Message of the last `ValueError` or `RuntimeError` in a rank's output. If there is none, the
    last 25 lines of the output.
    """
    lines = [
        re.sub(r"^\[rank\d+\]: ?", "", line)
        for line in output.strip().splitlines()
        if not line.startswith("USDT:")
    ]
    errors = [line for line in lines if line.startswith(("ValueError: ", "RuntimeError: "))]
    return errors[-1].split(": ", 1)[1] if errors else "\n".join(lines[-25:])


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "(no output)"
