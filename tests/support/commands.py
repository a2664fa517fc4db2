"""Runs the real command line as a user does, with a deadline, and knows which processes it left
behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from support.fork_server import MARK, PYTHON, UNFORKED

ROOT = Path(__file__).resolve().parents[2]
PROBE_BOUND = 1e-4
"""Largest difference of log-probs between trainer and engine in float32."""


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    survivors: list[str]
    """Command lines of processes it started that are still there."""


def start(arguments: list[str], **environment: str) -> tuple[subprocess.Popen[str], str]:
    """Start a command; every process below it carries a mark in its environment, by which it is
    found again.
    """
    mark = uuid.uuid4().hex
    settings = {**os.environ, MARK: mark, "HF_HUB_OFFLINE": "1", **environment}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=settings, text=True, start_new_session=True, **pipes
    )
    return process, mark


def dies_with_us() -> list[str]:
    """The words before a command that have it killed when this process ends."""
    code = "import sys; from megarl.system.signals import become; become(int(sys.argv[1]), sys.argv[2:])"
    return [PYTHON, "-c", code, str(os.getpid())]


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that carry `mark`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def finish(process: subprocess.Popen[str], mark: str, timeout_s: float) -> Done:
    """Wait for the command, then end, by id, whatever it left behind."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        for left in marked(mark):
            left.kill()
        out, err = process.communicate()
        raise AssertionError(
            f"{process.args} took longer than {timeout_s} s:\n{out[-1500:]}\n{err[-4000:]}"
        ) from None
    psutil.wait_procs(marked(mark), timeout=3)
    alive = marked(mark)  # anew: where nobody reaps orphans, those that ended stay as zombies
    survivors = [f"{left.pid} {left.name()}" for left in alive]
    for left in alive:
        left.kill()
    return Done(process.returncode, out, err, survivors)


def megarl(*arguments: str, ranks: int = 1, timeout_s: float = 240.0, **environment: str) -> Done:
    """`megarl ...`, under torchrun for more than one rank; asserts that nothing survives.

    Nothing is forked where `environment` changes how Python starts.
    """
    if any(name.startswith(("PYTHON", "LC_")) for name in environment):
        environment |= UNFORKED
    process, mark = start(command(*arguments, ranks=ranks), **environment)
    done = finish(process, mark, timeout_s)
    assert done.survivors == [], done.survivors
    return done


def ledger(run: Path) -> dict[str, Any]:
    """What `megarl ledger RUN --json` says of a run; it must not contradict itself."""
    finished = megarl("ledger", str(run), "--json")
    assert finished.code == 0, finished.err
    return json.loads(finished.out)


def replayed(run: Path, steps: int) -> None:
    """Training again on the batches of `run` gives its metrics and weights, bit by bit."""
    done = megarl("replay", str(run))
    assert done.code == 0, done.out + done.err[-3000:]
    found = json.loads(done.out)
    assert found["steps"] == steps and f"step_{steps:06d}" in found["checkpoints_compared"]
    assert found["steps_that_differ"] == {} and found["checkpoints_that_differ"] == []


def command(*arguments: str, ranks: int = 1) -> list[str]:
    """The command line of `megarl ...`."""
    if ranks == 1:
        return [sys.executable, "-m", "megarl", *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(ranks)]
    return [*launcher, "-m", "megarl", *arguments]


def python(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """A new Python with these words, in the repository's root; `settings` are those of
    `subprocess.run`.
    """
    usual: dict[str, Any] = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": 300}
    return subprocess.run([sys.executable, *words], check=False, **usual | settings)


TASK_OF = {"teacher": "distill", "demonstrations": "sft", "prompts": "rl"}
"""{section of a recipe: the task that has it, the first of those that a recipe has}"""


def write_recipe(path: Path, tree: dict[str, Any]) -> str:
    """A recipe file; a recipe of preferences says its task itself."""
    tasks = [{"task": task} for section, task in TASK_OF.items() if section in tree]
    path.write_text(yaml.safe_dump({**dict(*tasks[:1]), **tree}))
    return str(path)


def tiny_run(folder: Path, model: Path, steps: int, **changes: Any) -> dict[str, Any]:
    """A recipe: DAPO on one-digit sums, as small as it gets."""
    write_rows(folder / "prompts.jsonl", [
        {"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)
    ])  # fmt: skip
    # A random model never gives a right answer; this reward differs within a group and is bounded
    # as a verdict must be.
    (folder / "reward.py").write_text(
        "def score(prompt, response):\n    return (len(response) % 3) / 2\n"
    )
    read = {"source": str(folder / "prompts.jsonl"), "max_prompt_tokens": 8}
    return {
        "folder": str(folder / "run"), "steps": steps, "seed": 5, "model": {"path": str(model)},
        "prompts": read,
        "environment": {"verifier": f"{folder}/reward.py:score", "require_stop": False},
        "rollout": {
            "groups_per_step": 4, "group_size": 4, "max_new_tokens": 12, "max_staleness": 0,
        },
        "training": {
            "num_mini_batches": 2, "micro_batch_tokens": 64, "optimizer": {"learning_rate": 1e-2},
            "checkpoint": {"every": 2, "keep": 2},
        },
        "evaluation": {"prompts": read | {"limit": 20, "shuffle": False}},
    } | changes  # fmt: skip


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """A .jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def records(path: Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def started(code: str, *words: str, **settings: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A new Python that runs `code` with these words, and the first line it prints; it is killed at
    the end. `settings` are those of `subprocess.Popen`.
    """
    usual: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    command = [sys.executable, "-c", code, *words]
    with subprocess.Popen(command, **usual | settings) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait for what other processes or threads bring about."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)
