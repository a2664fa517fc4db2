"""A real run whose processes are stopped by a signal: the wait is named in time, and the run goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.commands import finish, megarl, start, tiny_run, until, write_recipe
from support.tiny import write_model

STEPS = 12
STOPS = """
import signal, sys
from pathlib import Path
import psutil
from support.fork_server import below
from megarl.weight_sync.transports.shared_memory import Sender

plain, calls = Sender.begin, []
def begin(self, *arguments):
    calls.append(arguments)
    if len(calls) == 3:  # weights 2
        for one in below(psutil.Process()):
            if one.cmdline() and one.cmdline()[0].startswith("ray::Engine"):
                one.send_signal(signal.SIGSTOP)
        Path(sys.argv[2]).with_name("stopped").touch()
    return plain(self, *arguments)
Sender.begin = begin
from megarl.cli import main
sys.exit(main())
"""


def test_who_waits_on_whom(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tree = tiny_run(tmp_path, write_model(tmp_path / "model"), steps=STEPS)
    tree["weight_sync"] = tree.get("weight_sync", {}) | {"timeout_s": 20.0}
    tree["training"]["checkpoint"]["every"] = STEPS
    tree["evaluation"]["every"] = STEPS
    recipe = write_recipe(tmp_path / "recipe.yaml", tree)
    process, mark = start([sys.executable, "-c", STOPS, "run", recipe])
    try:
        until(lambda: (tmp_path / "stopped").exists() or process.poll() is not None, 300)
        shown = status(run, "--stacks")
        done = finish(process, mark, 240)
    finally:
        if process.poll() is None:
            process.kill()
            finish(process, mark, 60)
    assert done.code == 0, done.err[-3000:]

    now = {one["process"]: one for one in shown["processes"]}
    assert set(now) == {"rank0", "service", "engine0", "engine0-core"}
    assert all(one["alive"] for one in now.values())
    assert now["engine0"]["condition"] == "stopped by a signal"
    (waits,) = now["rank0"]["does"]
    assert waits["what"] == "publication of weights 2" and waits["waits_on"] == ["engines"], waits
    assert "in publish" in now["rank0"]["stacks"]
    assert "run_busy_loop" in now["engine0-core"]["stacks"]  # vLLM's second process

    (report,) = run.glob("waits-*.txt")
    text = report.read_text()
    line = text.splitlines()[0]
    assert line.startswith("megarl: rank0 has waited "), line
    assert "for publication of weights 2 (deadline 20.0 s)" in line
    assert "engine0 is stopped by a signal" in line and str(report) in line
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
