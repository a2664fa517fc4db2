"""Starts a tool's own script again as N ranks, one process with one thread each, and ends all ranks
when the tool ends.

    answers = launch(__file__, {"tokens": 16, "deadline": 300.0}, 4)          in the tool
    if rank_task() is not None: answer(work(rank_task()))                     in a rank

Task and answers are JSON, in files of a temporary folder. A rank that fails ends the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT

ANSWER = "MEGARL_TOOL_ANSWER"
"""Environment variable of a rank: where its answer goes, in the folder with the task."""
PR_SET_PDEATHSIG = 1
POLL_S = 0.05


def rank_task() -> dict[str, Any] | None:
    """The task of this rank, or None in a process that `launch` did not start."""
    if ANSWER not in os.environ:
        return None
    # A tool that is killed cannot end its ranks: the kernel ends them with their parent.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return json.loads(Path(os.environ[ANSWER]).with_name("task").read_text())


@contextlib.contextmanager
def ready(deadline_s: float, *, threads: int = 1, checks_memory: bool = False) -> Iterator[Any]:
    """Context manager of a rank, or of a tool without ranks: process groups, with the device.
    `checks_memory`: on a CPU malloc returns freed memory at once, and peaks are found right.
    """
    import peak_memory
    import torch

    from megarl.parallel.mesh import finalise, initialise
    from megarl.system.process_env import prepare_environment

    prepare_environment(threads)  # DeepSpeed's built operators are found, as in a run
    torch.set_num_threads(threads)
    device = initialise(timeout_s=deadline_s)
    if checks_memory and device.type == "cpu":
        peak_memory.return_freed_memory(True)
        peak_memory.check()
    yield device
    finalise()


def make_role(model: str, mesh: Any, device: Any, *, steps: int = 1000, **training: Any) -> Any:
    """A policy of random weights that trains `steps` steps. `training`: of `TrainingConfig`."""
    from megarl.settings.training import ModelConfig, TrainingConfig
    from megarl.trainer.role import Role

    return Role(
        "policy",
        model=ModelConfig(path=model, from_scratch=True),
        training=TrainingConfig(**training),
        mesh=mesh,
        device=device,
        seed=1,
        optimizer_steps=steps,
    )


def share_of(groups: list[Any], micro_batch_tokens: int, **more: Any) -> Any:
    """What the only rank trains of `groups`."""
    from megarl.rollout import batch

    return batch.shares(
        step=0,
        drawn=groups,
        accepted=groups,
        seconds=1.0,
        num_data_ranks=1,
        num_mini_batches=1,
        micro_batch_tokens=micro_batch_tokens,
        transcripts=0,
        **more,
    ).share(0)


def answer(value: dict[str, Any]) -> None:
    """Return this rank's result to the tool."""
    Path(os.environ[ANSWER]).write_text(json.dumps(value))


def launch(
    script: str, task: dict[str, Any], num_ranks: int, **environment: str
) -> list[dict[str, Any]]:
    """Run `script` as `num_ranks` ranks, with these environment variables beside ours; returns each
    rank's answer.

    Raises `RuntimeError` with the error of the rank that failed first, or if the ranks have not
    ended after `task["deadline"]` seconds.
    """
    from megarl.parallel.launcher import free_port
    from megarl.system.process_env import prepare_environment

    prepare_environment(1)  # ranks find DeepSpeed's built operators, as in a run
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "task").write_text(json.dumps(task, default=str))
        settings = os.environ | {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "PYTHONPATH": os.pathsep.join(paths),
            **environment,
        }
        outputs = [folder / f"output-{rank}" for rank in range(num_ranks)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, path in enumerate(outputs):
                own = settings | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                own[ANSWER] = str(folder / f"answer-{rank}")
                command = [sys.executable, str(Path(script).resolve())]
                with path.open("wb") as out:
                    ranks.append(subprocess.Popen(command, env=own, stdout=out, stderr=out))
            _wait(ranks, outputs, task["deadline"])
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [json.loads((folder / f"answer-{rank}").read_text()) for rank in range(num_ranks)]


def _wait(ranks: list[subprocess.Popen[bytes]], outputs: list[Path], deadline_s: float) -> None:
    """Until all ranks have ended; see `launch` for what is raised."""
    end = time.monotonic() + deadline_s
    while None in (codes := [process.poll() for process in ranks]) and not any(codes):
        if time.monotonic() > end:
            said = [f"rank {n}: {_error_of(path, 1)}" for n, path in enumerate(outputs)]
            late = f"{len(ranks)} ranks were not done after {deadline_s:g} s; raise --deadline"
            raise RuntimeError("\n".join([late, *said]))
        time.sleep(POLL_S)
    failed = [(rank, _error_of(outputs[rank])) for rank, code in enumerate(codes) if code]
    # The rank that failed first gives the cause; the others report a closed connection.
    for rank, said in sorted(failed, key=lambda one: "Connection closed by peer" in one[1]):
        raise RuntimeError(f"rank {rank} of {len(ranks)} ended with {codes[rank]}: {said}")


def _error_of(output: Path, most: int = 25) -> str:
    """Message of the last `ValueError` or `RuntimeError` in a rank's output; if there is none, the
    last lines.
    """
    text = re.sub(r"^\[rank\d+\]: ?", "", output.read_text(errors="replace"), flags=re.MULTILINE)
    lines = [line for line in text.strip().splitlines() if not line.startswith("USDT:")]
    errors = [line for line in lines if line.startswith(("ValueError: ", "RuntimeError: "))]
    return errors[-1].split(": ", 1)[1] if errors else "\n".join(lines[-most:])
