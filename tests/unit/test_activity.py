"""What processes record of themselves, and how `megarl status` shows it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.commands import ROOT, started, until

from megarl.apps.runs import status as status_command
from megarl.apps.runs.status import main as status
from megarl.apps.runs.status import stacks_of
from megarl.checkpoints import lease
from megarl.errors import UserError
from megarl.system import spans
from megarl.system.process_state import condition, start_of
from megarl.system.spans import Event, Recording, Requests, TraceWriter, activity, step_begins
from megarl.system.trace_files import ProcessTrace, newest_traces, read_traces

BEGIN = """
import ctypes, os, signal, sys, time
from megarl.system.spans import Recording, activity, step_begins
close = Recording(sys.argv[1], "run").open(sys.argv[2])
"""
"""Beginning of the program of another process of a run."""
Start = Callable[[str, str], subprocess.Popen[str]]


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    made = Recording.of(tmp_path, "run", enabled=True)
    assert made is not None
    made.make(keep=False)
    return made


@pytest.fixture
def opened(recording: Recording) -> Iterator[Path]:
    """RUN/activity, in which this process records as rank0."""
    close = recording.open("rank0")
    yield Path(recording.folder)
    close()


@pytest.fixture
def other(recording: Recording) -> Iterator[Start]:
    """Starts another process of the run, which prints a line once it does what it does."""
    with ExitStack() as stack:

        def start(name: str, body: str) -> subprocess.Popen[str]:
            program = started(BEGIN + body, recording.folder, name, stderr=subprocess.DEVNULL)
            process, line = stack.enter_context(program)
            assert line == "ready"
            return process

        yield start


def during(call: str, then: str = "time.sleep(600)") -> str:
    """Program of a process that is in an activity."""
    return f'with activity({call}):\n    print("ready", flush=True)\n    {then}\n'


def step() -> None:
    with activity("step", kind="train"):
        pass


def of_rank0(folder: Path) -> ProcessTrace:
    """The newest trace of rank0."""
    return next(trace for trace in newest_traces(read_traces(folder)) if trace.name == "rank0")


def names(events: Iterable[Event]) -> list[str]:
    return [event["name"] for event in events]


# -------------------------------------------------------------------------------- what is recorded


def test_spans_begin_and_end(opened: Path) -> None:
    step_begins(7, 6)
    with activity("step 7", kind="train"):
        with activity("rollouts", kind="wait", of=["service", 0, 1], deadline_s=600):
            outer, inner = of_rank0(opened).open
            assert names([outer, inner]) == ["step 7", "rollouts"]
            assert outer["args"] == {"waits on": [], "deadline_s": 0}
            assert inner["args"] == {"waits on": ["service", "rank0", "rank1"], "deadline_s": 600}
        assert names(of_rank0(opened).open) == ["step 7"]
    with activity("all-reduce", kind="wait", of=range(17)):
        assert of_rank0(opened).open[0]["args"] == {"waits on": ["17 ranks"], "deadline_s": 0}
    with pytest.raises(KeyError), activity("fails", kind="train"):
        raise KeyError
    with (opened / "rank0.json").open("a") as file:  # events of others are passed over
        file.write(f'{{}},\n[1],\n{{"ph":"B","pid":{os.getpid()}}},\n{{"ph":"M","args":3}},\n"x"\n')
    with activity("next", kind="train"):
        assert names(of_rank0(opened).open) == ["next"]
    trace = of_rank0(opened)
    assert trace.open == [] and trace.is_alive
    assert [event["args"] for event in trace.steps] == [{"step": 7, "version": 6}]
    assert outer["ts"] <= inner["ts"] <= trace.spans[2]["end"] <= trace.spans[1]["end"]
    assert abs(trace.last - time.time()) < 60  # the clock is the world's


def test_a_process_that_cannot_write_goes_on(
    tmp_path: Path, opened: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a full disk, or an engine of another host, where the run folder is not."""
    assert Recording.of(tmp_path, "run", enabled=False) is None
    with Path("/dev/full").open("ab", buffering=0) as full:
        spans.WRITERS[0]._file = full
        for _ in range(3):
            step()
    assert capsys.readouterr().err.count("is recorded no more") == 1
    close = Recording(str(tmp_path / "absent" / "activity"), "run").open("engine0")
    for _ in range(3):
        step()
    close()
    assert capsys.readouterr().err.count("what engine0 does is not recorded") == 1
    assert not (tmp_path / "absent").exists()


def test_a_killed_process_leaves_whole_lines_and_the_next_goes_on(
    recording: Recording, other: Start
) -> None:
    """The lines of all processes together, as docs/activity.md has them, are a trace for viewers."""
    body = """
print("ready", flush=True)
while True:
    with activity("outer", kind="train"):
        with activity("inner", kind="wait", of="service"):
            pass
"""
    process, path = other("rank0", body), Path(recording.folder) / "rank0.json"
    until(lambda: path.read_bytes().count(b"\n") > 300)
    process.kill()
    process.wait()
    with path.open("ab") as file:
        file.write(b'{"name":"step","ph":"B","cat":"tra')
    close = recording.open("rank0")
    step_begins(1, 0)
    step()
    close()
    TraceWriter(recording, "engine0").close()
    killed, ended, engine = read_traces(path.parent)
    assert killed.condition == "gone" and len(killed.spans) > 50
    assert ended.condition == engine.condition == "ended" and names(ended.spans.values()) == [
        "step"
    ]
    assert newest_traces([killed, ended, engine]) == [ended, engine]
    page = (ROOT / "docs" / "activity.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("(echo [; grep"))
    shell = line.replace("runs/tiny", str(path.parent.parent)).partition(" > ")[0]
    merged = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    events = json.loads(merged.stdout.rstrip(",\n") + "]")
    heads = [event for event in events if event["ph"] == "M"]
    assert [event["args"]["name"] for event in heads] == ["engine0", "rank0", "rank0"]
    assert len({event["pid"] for event in heads}) == 3
    assert names(event for event in events if event["ph"] == "i") == ["closed", "step 1", "closed"]


def test_the_processes_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    folder = str(tmp_path / "activity")
    for run, processes in (("a", ("rank0", "engine0", "engine10", "engine9")), ("b", ("rank0",))):
        Recording(folder, run).make(keep=run == "b")
        for name in processes:
            Recording(folder, run).open(name)()
    traces = read_traces(Path(folder))
    assert [trace.name for trace in traces] == ["rank0", "rank0", "engine0", "engine9", "engine10"]
    assert [(trace.name, trace.run) for trace in newest_traces(traces)] == [("rank0", "b")]


def test_the_file_is_bounded_and_keeps_what_is_open(
    opened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "MAX_BYTES", 5000)
    step_begins(3, 2)
    with activity("whole", kind="train"):
        for number in range(300):
            with activity(f"part {number}", kind="score"):
                pass
        assert names(of_rank0(opened).open) == ["whole"]
        assert of_rank0(opened).steps[-1]["args"] == {"step": 3, "version": 2}
    sizes = {path.name: path.stat().st_size for path in opened.glob("*.json")}
    assert set(sizes) == {"rank0.json", "rank0.1.json"}
    assert all(size <= 5000 + 1000 for size in sizes.values())
    (trace,) = read_traces(opened)
    assert "end" in trace.spans[1] and trace.spans[1]["name"] == "whole"


def test_a_quiet_span_is_written_only_if_it_lasts(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "QUIET_S", 0.1)
    close, folder = recording.open("rank0"), Path(recording.folder)
    for _ in range(5):
        with activity("short", kind="wait", quiet=True):
            pass
    with activity("long", kind="wait", of=[1], quiet=True):
        until(lambda: of_rank0(folder).open)
    assert names(of_rank0(folder).spans.values()) == ["long"]
    assert of_rank0(folder).open == []
    close()


async def test_requests_that_overlap_are_one_span(opened: Path) -> None:
    requests = Requests("responses", kind="generate", of="engine0")

    async def ask(wait_s: float) -> None:
        with requests:
            await asyncio.sleep(wait_s)

    for _ in range(2):
        await asyncio.gather(*(ask(0.001 * number) for number in range(50)))
    first, second = of_rank0(opened).spans.values()
    assert first["name"] == second["name"] == "responses"
    assert first["end"] - first["ts"] >= 49_000 and first["end"] <= second["ts"]
    with requests:
        assert names(of_rank0(opened).open) == ["responses"]


async def test_spans_that_overlap_have_lanes_of_their_own(opened: Path) -> None:
    """A viewer closes the span that began last in a lane."""

    async def work(name: str) -> None:
        with activity(name, kind="score"):
            await asyncio.sleep(0.01)

    with activity("outer", kind="train"):
        await asyncio.gather(work("a"), work("b"))
    assert {span["name"]: span["tid"] for span in of_rank0(opened).spans.values()} == {
        "outer": 0,
        "a": 1,
        "b": 2,
    }


# ------------------------------------------------------------------------------------------- status


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("time.sleep(600)", "in waits_in_here"),
        # PyDLL keeps Python's lock while C code sleeps: no Python thread runs.
        ("while True: ctypes.PyDLL(None).sleep(600)", "in waits_in_here"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "none: the process is stopped by a signal"),
    ],
)
def test_stacks_of_a_process_that_waits_is_stuck_or_stopped(
    body: str,
    expected: str,
    recording: Recording,
    other: Start,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ready = 'print("ready", flush=True)'
    process = other("rank0", f"def waits_in_here():\n    {ready}\n    {body}\nwaits_in_here()")
    if "SIGSTOP" in body:
        until(lambda: condition(process.pid, start_of(process.pid)) == "stopped by a signal")
    assert status([str(Path(recording.folder).parent), "--stacks"]) == 0
    assert expected in capsys.readouterr().out
    assert process.poll() is None  # it lives on


def test_a_signal_goes_only_to_the_process_that_recorded_it(recording: Recording) -> None:
    """Process ids are used again, and an unhandled signal would end another program."""
    recording.open("rank0")()
    (trace,) = read_traces(Path(recording.folder))
    with started("import time; print(flush=True); time.sleep(600)") as (sleeper, _):
        trace.pid, trace.is_closed = sleeper.pid, False
        assert stacks_of(Path(recording.folder), [trace]) == {"rank0": "none: the process is gone"}
        assert sleeper.poll() is None


def test_status_of_a_living_and_a_dead_process(
    opened: Path,
    other: Start,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dead = other("engine0", during('"model", kind="load"'))
    dead.kill()
    dead.wait()
    run = opened.parent
    (run / "metrics.jsonl").write_text('{"step": 4, "loss": 1, "accuracy": 0.25}\n{"step": 5, "lo')
    step_begins(5, 4)
    with activity("rollouts of step 5", kind="wait", of="service", deadline_s=90):
        assert status([str(run), "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert status([str(run)]) == 0
        shown = capsys.readouterr().out
    assert (summary["step"], summary["version"], summary["trained"]) == (5, 4, 4)
    rank, engine = summary["processes"]
    assert (rank["name"], rank["condition"], rank["alive"]) == ("rank0", "alive", True)
    (does,) = rank["does"]
    assert does["waits_on"] == ["service"] and does["deadline_s"] == 90
    assert (engine["condition"], engine["does"][0]["what"]) == ("gone", "model")
    assert "step 5, weights 4; 4 steps trained" in shown and "owner: none" in shown
    assert "step 4: accuracy 0.25, loss 1\n" in shown
    assert re.search(r"rollouts of step 5, for \d\.\d s of 1 min 30 s, waits on service\n", shown)
    for steps in (4, 5):  # of the recipe
        (run / "recipe.yaml").write_text(f"steps: {steps}\n")
        assert status([str(run), "--json"]) == status([str(run)]) == 0
        printed, first, *_ = capsys.readouterr().out.splitlines()
        summary = json.loads(printed)
        assert (summary["steps"], summary["finished"]) == (steps, steps == 4)
        assert f"4 of {steps} steps trained" in first and first.endswith("finished") is (steps == 4)


@pytest.mark.parametrize("in_terminal", [True, False])
def test_watch_prints_again_until_the_run_has_ended(
    in_terminal: bool,
    opened: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = opened.parent
    owner = lease.take(run, patience_s=1)
    monkeypatch.setattr(status_command, "in_terminal", lambda: in_terminal)
    waits = iter((lambda: step_begins(1, 0), owner.release))
    monkeypatch.setattr(status_command.time, "sleep", lambda _: next(waits)())
    assert status([str(run), "--watch"]) == 0
    printed = capsys.readouterr().out
    _, *screens = printed.split("\x1b[H\x1b[2J" if in_terminal else str(run))
    shown = [re.findall(r": (no step|step 1)|, (alive|ended)\n", text) for text in screens]
    assert shown == [
        [("no step", ""), ("", "alive")],
        [("step 1", ""), ("", "alive")],
        [("step 1", ""), ("", "ended")],
    ]


@pytest.mark.parametrize("words", [[], ["a", "b"], ["--what", "a"], ["absent"]])
def test_a_wrong_command_line_is_one_error(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError):
        status([str(tmp_path / word) if word[0] != "-" else word for word in words])


def test_a_forked_child_records_nothing(opened: Path) -> None:
    child = os.fork()
    if not child:
        step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert of_rank0(opened).spans == {} and signal.SIGRTMIN < spans.SIGNAL < signal.SIGRTMAX
