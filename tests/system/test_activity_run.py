"""A real run whose processes are stopped by a signal: `megarl status` shows the wait, and the run goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.commands import finish, megarl, start, tiny_run, until, write_recipe
from support.tiny import write_model

from megarl.system.trace_files import read_traces

STEPS = 12
STOPS = """
import signal, sys, threading, time
from pathlib import Path
import psutil
from support.fork_server import below
from megarl.weights.transports.shared_memory import Sender

plain, calls, recipe = Sender.begin, [], Path(sys.argv[2])

def go_on(engine):
    while not recipe.with_name("shown").exists():
        time.sleep(0.05)
    engine.send_signal(signal.SIGCONT)

def begin(self, *arguments, **options):
    calls.append(arguments)
    if len(calls) == 3:  # weights 2
        for process in below(psutil.Process()):
            if process.cmdline() and process.cmdline()[0].startswith("ray::Engine"):
                process.send_signal(signal.SIGSTOP)
                threading.Thread(target=go_on, args=(process,), daemon=True).start()
        recipe.with_name("stopped").touch()
    return plain(self, *arguments, **options)

Sender.begin = begin
from megarl.cli import main
sys.exit(main())
"""


def test_who_waits_on_whom(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tree = tiny_run(tmp_path, write_model(tmp_path / "model"), steps=STEPS)
    tree["weight_sync"] = tree.get("weight_sync", {}) | {"timeout_s": 60.0}
    tree["training"]["checkpoint"]["every"] = STEPS
    tree["evaluation"]["every"] = STEPS
    recipe = write_recipe(tmp_path / "recipe.yaml", tree)
    process, mark = start([sys.executable, "-c", STOPS, "run", recipe])
    try:
        until(lambda: (tmp_path / "stopped").exists() or process.poll() is not None, 300)
        shown = status(run, "--stacks")
        (tmp_path / "shown").touch()
        done = finish(process, mark, 240)
    finally:
        if process.poll() is None:
            process.kill()
            finish(process, mark, 60)
    assert done.code == 0, done.err[-3000:]

    now = {process["name"]: process for process in shown["processes"]}
    assert set(now) == {"rank0", "service", "engine0", "engine0-core"}
    assert all(process["alive"] for process in now.values())
    assert now["engine0"]["condition"] == "stopped by a signal"
    waits = now["rank0"]["does"][-1]
    assert waits["what"] == "publication of weights 2" and waits["waits_on"] == ["engines"], waits
    assert waits["deadline_s"] == 60.0
    assert "in publish" in now["rank0"]["stacks"]
    assert "run_busy_loop" in now["engine0-core"]["stacks"]  # vLLM's second process

    after = status(run)
    assert after["trained"] == after["step"] == after["version"] == STEPS
    assert {process["condition"] for process in after["processes"]} == {"ended", "gone"}
    traces = read_traces(run / "activity")
    assert [len(trace.steps) for trace in traces if trace.name == "rank0"] == [STEPS]
    kinds = {span["cat"] for trace in traces for span in trace.spans.values()}
    assert kinds >= {"generate", "score", "wait", "train", "publish", "checkpoint", "evaluate"}


def status(run: Path, *flags: str) -> dict[str, Any]:
    """What `megarl status` says."""
    shown = megarl("status", str(run), "--json", *flags)
    assert shown.code == 0, shown.err
    return json.loads(shown.out)
