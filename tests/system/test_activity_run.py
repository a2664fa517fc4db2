"""A real run whose processes are stopped by a signal: the wait is named in time, and the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.commands import command, finish, megarl, start, tiny_run, write_recipe
from support.tiny import write_model

from megarl.activity.files import read

STEPS = 60


def test_who_waits_on_whom(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tree = tiny_run(tmp_path, write_model(tmp_path / "model"), steps=STEPS)
    tree["environment"]["time_limit_s"] = 2.0
    tree["training"]["checkpoint"]["every"] = STEPS
    tree["evaluation"]["every"] = STEPS
    process, mark = start(command("train", write_recipe(tmp_path / "recipe.yaml", tree)))
    try:
        wait_for(lambda: step_of(run) >= 2, 240)
        found = {one["process"]: one for one in status(run)["processes"]}
        assert set(found) == {"rank0", "service", "environment", "engine0", "engine0-core"}
        assert all(one["alive"] for one in found.values())

        stopped = found["environment"]["pid"]
        os.kill(stopped, signal.SIGSTOP)
        try:
            wait_for(lambda: list(run.glob("waits-*.txt")), 60)
            shown = status(run, "--stacks")
        finally:
            with contextlib.suppress(ProcessLookupError):  # the run may have replaced it by now
                os.kill(stopped, signal.SIGCONT)
        done = finish(process, mark, 240)
    finally:
        if process.poll() is None:
            process.kill()
            finish(process, mark, 60)
    assert done.code == 0, done.err[-3000:]

    now = {one["process"]: one for one in shown["processes"]}
    assert now["environment"]["condition"] == "stopped by a signal"
    assert "environment" in [of for does in now["service"]["does"] for of in does["waits_on"]]
    (waits,) = now["rank0"]["does"]
    assert waits["what"].startswith("rollouts of step ") and waits["waits_on"] == ["service"]
    assert "in take" in now["rank0"]["stacks"]
    assert "run_busy_loop" in now["engine0-core"]["stacks"]  # vLLM's second process

    (report,) = run.glob("waits-*.txt")
    text = report.read_text()
    line = text.splitlines()[0]
    assert (
        line.startswith("megarl: service has waited ") and "for verdicts (deadline 7.0 s)" in line
    )
    assert "environment is stopped by a signal" in line and str(report) in line
    assert done.err.count("has waited") == 1 and line in done.err
    assert all(f"==== {name} (process " in text for name in now)

    after = status(run)
    assert after["trained"] == after["step"] == after["version"] == STEPS
    assert {one["alive"] for one in after["processes"]} == {False}
    trace = megarl("timeline", str(run))
    events = json.loads(Path(trace.out.strip()).read_text())["traceEvents"]
    assert sum(one["ph"] == "i" for one in events) == STEPS
    kinds = {one["cat"] for one in events if one["ph"] == "X"}
    assert kinds >= {"generate", "score", "wait", "train", "publish", "checkpoint", "evaluate"}
    assert '<div class="who">engine0</div>' in (run / "report.html").read_text()


def status(run: Path, *flags: str) -> dict[str, Any]:
    """What `megarl status` says."""
    found = megarl("status", str(run), "--json", *flags)
    assert found.code == 0, found.err
    return json.loads(found.out)


def step_of(run: Path) -> int:
    """The newest step that rank 0 has begun."""
    lives = [one for one in read(run / "activity") if one.process == "rank0"]
    return max((one["args"]["step"] for life in lives for one in life.steps), default=0)


def wait_for(condition: Callable[[], object], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.05)
