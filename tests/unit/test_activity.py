"""What processes record, who waits on whom, stacks, reports of overdue waits, status and timeline."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from megarl.activity import overdue, spans, stacks, watcher
from megarl.activity import recording as recordings
from megarl.activity.busy import Busy
from megarl.activity.files import Life, SpanRecord, read
from megarl.activity.process import descendants, machine, start_of, state_of
from megarl.activity.recording import Recording
from megarl.activity.spans import KINDS, activity, step_begins
from megarl.activity.state import chain
from megarl.apps.runs import report
from megarl.apps.runs.lanes import COLOURS, idle, last_steps
from megarl.apps.runs.lanes import cells as cells_of
from megarl.apps.runs.status import main as status
from megarl.apps.runs.timeline import lanes
from megarl.apps.runs.timeline import main as timeline
from megarl.errors import UserError
from megarl.ledger.recorder import Recorder
from megarl.types import START, Cursor

BEGIN = """
import ctypes, os, signal, sys, time
from megarl.activity.recording import Recording
from megarl.activity.spans import activity, step_begins
close = Recording(sys.argv[1], "run").open(sys.argv[2])
"""
"""Beginning of the program of another process of a run."""


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    found = Recording.of(tmp_path, "run", enabled=True)
    assert found is not None
    found.make(keep=False)
    return found


@pytest.fixture
def opened(recording: Recording) -> Iterator[Path]:
    """RUN/activity, in which this process records as rank0."""
    close = recording.open("rank0")
    yield Path(recording.folder)
    close()


@pytest.fixture
def other(recording: Recording) -> Iterator[Callable[[str, str], subprocess.Popen[str]]]:
    """Starts another process of the run, which prints a line once it does what it does."""
    started = []

    def start(name: str, body: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + body, recording.folder, name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def mine(folder: Path) -> Life:
    """The newest life of rank0."""
    return next(life for life in read(folder, only_last=True) if life.process == "rank0")


def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


# -------------------------------------------------------------------------------- what is recorded


def test_spans_nest_and_end(opened: Path) -> None:
    step_begins(7, 6)
    with activity("step 7", kind="train"):
        with activity("rollouts", kind="wait", of=["service", 0, 1], deadline_s=600):
            now = mine(opened).open
            assert [one.what for one in now] == ["rollouts"]
            assert now[0].of == ("service", "rank1") and now[0].deadline_s == 600
            assert [one.what for one in mine(opened).around(now[0])] == ["step 7"]
        assert [one.what for one in mine(opened).open] == ["step 7"]
    life = mine(opened)
    assert life.open == [] and life.is_alive and life.steps[0][1:] == (7, 6)
    inner, outer = life.spans[2], life.spans[1]
    assert outer.begin <= inner.begin <= life.ended_at(inner) <= life.ended_at(outer)
    assert abs(life.ended_at(outer) - time.time()) < 60  # the clock is the world's


def test_an_error_ends_the_span(opened: Path) -> None:
    with pytest.raises(KeyError), activity("step", kind="train"):
        raise KeyError
    with activity("next", kind="train"):
        assert [one.what for one in mine(opened).open] == ["next"]
        assert mine(opened).open[0].parent == 0


def test_without_a_recorder_nothing_is_written(tmp_path: Path) -> None:
    assert Recording.of(tmp_path, "run", enabled=False) is None
    with activity("step", kind="train"):
        step_begins(1, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_cannot_write_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine of another host, where the run folder is not."""
    recording = Recording(str(tmp_path / "absent" / "activity"), "run")
    close = recording.open("engine0")
    for _ in range(3):
        with activity("step", kind="train"):
            pass
    close()
    assert capsys.readouterr().err.count("what engine0 does is not recorded") == 1
    assert not (tmp_path / "absent").exists()


def test_a_full_disk_ends_the_record_and_not_the_run(
    opened: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(file: int, line: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spans.os, "write", full)
    for _ in range(3):
        with activity("step", kind="train"):
            pass
    monkeypatch.undo()
    assert capsys.readouterr().err.count("is recorded no more") == 1


def test_a_killed_process_leaves_a_torn_line_and_the_next_goes_on(recording: Recording) -> None:
    path = Path(recording.folder) / "rank0.jsonl"
    recording.open("rank0")()
    path.write_bytes(path.read_bytes() + b'{"begin":1,"kind":"tra')
    close = recording.open("rank0")
    with activity("step", kind="train"):
        pass
    close()
    lives = read(path.parent)
    assert len(lives) == 1 and lives[0].closed  # the same process: one life
    assert [one.what for one in lives[0].spans.values()] == ["step"]
    heads = [line for line in path.read_text().splitlines() if line.startswith('{"process"')]
    assert len(heads) == 2  # the second is a line of its own


def test_a_new_process_of_the_name_has_a_life_of_its_own(opened: Path) -> None:
    """A line of a process that was taken for dead is not its successor's."""
    own = mine(opened)
    head = {
        "process": "rank0",
        "host": own.host,
        "pid": 1,
        "started": "9",
        "machine": "",
        "run": "b",
    }
    head |= {"signal": 0, "wall": 100.0, "t": 0.0}
    path = opened / "rank0.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(head) + "\n")
        begin = {"begin": 1, "kind": "load", "what": "model", "t": 5.0}
        file.write(json.dumps(begin | {"p": 1}) + "\n")
        file.write(json.dumps(begin | {"begin": 2, "what": "late", "p": own.pid}) + "\n")
    newest = mine(opened)
    assert newest.run == "b" and [one.what for one in newest.open] == ["model"]
    assert newest.open[0].begin == 105.0 and newest.is_alive is None
    assert [life.run for life in read(opened)] == ["run", "b"]


def test_the_file_is_bounded_and_keeps_what_is_open(
    opened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "MAX_BYTES", 5000)
    step_begins(3, 2)
    with activity("whole", kind="train"):
        for number in range(300):
            with activity(f"part {number}", kind="score"):
                pass
        assert [one.what for one in mine(opened).open] == ["whole"]
        assert mine(opened).steps[-1][1:] == (3, 2)
    sizes = {path.name: path.stat().st_size for path in opened.glob("*.jsonl")}
    assert set(sizes) == {"rank0.jsonl", "rank0.1.jsonl"}
    assert all(size <= 5000 + 1000 for size in sizes.values())
    (life,) = read(opened)
    whole = next(one for one in life.spans.values() if one.what == "whole")
    assert whole.end is not None and whole.number == 1


def test_a_quiet_span_is_written_only_if_it_lasts(
    opened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "QUIET_S", 0.05)
    for _ in range(5):
        with activity("short", kind="wait", quiet=True):
            pass
    with activity("long", kind="wait", of=[1], quiet=True):
        until(lambda: mine(opened).open)
    assert [one.what for one in mine(opened).spans.values()] == ["long"]
    assert mine(opened).open == []


def test_many_requests_are_one_span_with_counts(opened: Path) -> None:
    busy = Busy("responses", kind="generate")

    async def one() -> None:
        with busy.request():
            await asyncio.sleep(0.01)

    async def many() -> None:
        await asyncio.gather(*(one() for _ in range(500)))

    asyncio.run(many())
    until(lambda: any(span.end is not None for span in mine(opened).spans.values()))
    (span,) = mine(opened).spans.values()
    assert span.done == 500 and span.what == "responses"
    assert '"most":500' in (opened / "rank0.jsonl").read_text()


def test_tasks_of_an_event_loop_have_spans_of_their_own(opened: Path) -> None:
    async def one(name: str) -> None:
        with activity(name, kind="score"):
            await asyncio.sleep(0.01)
            with activity(f"in {name}", kind="wait"):
                await asyncio.sleep(0.01)

    async def both() -> None:
        with activity("outer", kind="train"):
            await asyncio.gather(one("a"), one("b"))

    asyncio.run(both())
    found = {span.what: span for span in mine(opened).spans.values()}
    assert found["in a"].parent == found["a"].number and found["in b"].parent == found["b"].number
    assert found["a"].parent == found["b"].parent == found["outer"].number


# ------------------------------------------------------------------------------------ overdue waits


def reports(folder: Path) -> list[Path]:
    return sorted(folder.parent.glob("waits-*.txt"))


def fail_in(context: AbstractContextManager[object], after_s: float) -> None:
    """Raise an error in the context after some seconds."""
    with context:
        time.sleep(after_s)
        raise RuntimeError("late")


def test_an_overdue_wait_is_named_with_whom_it_waits_for(
    opened: Path,
    other: Callable[[str, str], subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    body = """
with activity("responses of step 3", kind="generate"):
    print("ready", flush=True)
    time.sleep(600)
"""
    engine = other("engine0", body)
    with activity("weights 3", kind="publish", of="engines", deadline_s=0.3):
        until(lambda: reports(opened))
        until(lambda: "waits-" in (said := capsys.readouterr().err) and said)
    (path,) = reports(opened)
    text = path.read_text()
    line = text.splitlines()[0]
    assert "rank0 has waited" in line and "for weights 3" in line and str(path) in line
    assert "engine0: responses of step 3, for" in line
    assert f"process {engine.pid} on" in text and "time.sleep" not in line
    assert "test_an_overdue_wait" in text  # the stack of this thread


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_wait_is_watched(opened: Path, kind: spans.Kind) -> None:
    with activity(f"a {kind}", kind=kind, of="service", deadline_s=0.05):
        until(lambda: reports(opened))
    assert f"for a {kind} (deadline" in reports(opened)[0].read_text()


def test_an_error_at_the_deadline_is_held_back_for_the_report(opened: Path) -> None:
    """The process may end by the error: the report is there before."""
    with pytest.raises(RuntimeError, match="late"):
        fail_in(activity("rollouts", kind="wait", of="service", deadline_s=0.01), 0.02)
    assert "for rollouts (deadline" in reports(opened)[0].read_text()


def test_no_report_before_the_deadline_and_none_without(opened: Path) -> None:
    with pytest.raises(RuntimeError, match="late"):
        fail_in(activity("a", kind="wait", of="service", deadline_s=60), 0.0)
    with pytest.raises(RuntimeError, match="late"):
        fail_in(activity("b", kind="wait", of="service"), 2 * watcher.POLL_S)
    assert reports(opened) == []


@pytest.mark.parametrize("limit", ["deadline_s", "quiet_s"])
def test_an_unanswered_request_is_named(opened: Path, limit: str) -> None:
    busy = Busy("verdicts", kind="wait", of="environment", **{limit: 0.2})

    async def ask() -> None:
        with busy.request():
            await asyncio.to_thread(until, lambda: reports(opened))

    asyncio.run(ask())
    assert "for verdicts (deadline" in reports(opened)[0].read_text()


def test_a_request_that_fails_at_its_deadline_is_named(opened: Path) -> None:
    busy = Busy("responses", kind="wait", of="engine0", deadline_s=0.01)
    with pytest.raises(RuntimeError, match="late"):
        fail_in(busy.request(), 0.02)
    until(lambda: reports(opened))
    assert "for responses (deadline" in reports(opened)[0].read_text()


def test_a_request_that_nobody_judges_is_named_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the event loop hangs that is to ask how long an engine was paused."""
    now = [100.0]
    monkeypatch.setattr("megarl.activity.busy.time.monotonic", lambda: now[0])
    busy = Busy("responses", kind="wait", of="engine0", deadline_s=10.0, judge_s=3.0)
    with busy.request():
        assert busy.overdue(112.9) == (0, 0, 0)
        assert busy.overdue(113.0) == (100, 13, 10)
        now[0] = 111.0
        busy.judged(11.0, 5.0)
        assert busy.overdue(123.9) == (0, 0, 0)
        assert busy.overdue(124.0) == (100, 24, 10)
        now[0] = 116.0
        busy.judged(16.0, 6.0)
        assert busy.overdue(116.0) == (100, 16, 16)


def test_several_processes_write_one_report(
    opened: Path, other: Callable[[str, str], subprocess.Popen[str]]
) -> None:
    """Three ranks and this one wait for the same service, and pass their deadline together."""
    body = """
with activity("rollouts", kind="wait", of="service", deadline_s=float({at!r}) - time.monotonic()):
    print("ready", flush=True)
    time.sleep(600)
"""
    at = time.monotonic() + 4.0
    for rank in (1, 2, 3):
        other(f"rank{rank}", body.format(at=at))
    with activity("rollouts", kind="wait", of="service", deadline_s=at - time.monotonic()):
        until(lambda: reports(opened))
        time.sleep(2 * watcher.POLL_S)  # every watcher looks once more
        with (opened / ".lock").open() as lock:  # and none is writing
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
    (path,) = reports(opened)
    assert all(f"  rank{rank} " in path.read_text() for rank in range(4))


def test_a_wait_that_lasts_is_named_after_another_that_has_ended(
    opened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both began before the first report, which a report of the same waits would only repeat."""
    monkeypatch.setattr(overdue, "AT_ONCE_S", 0.2)
    with activity("verdicts", kind="wait", of="service", deadline_s=2.0):
        with activity("arrays", kind="wait", of="service", deadline_s=0.1):
            until(lambda: reports(opened))
        until(lambda: len(reports(opened)) == 2)
    assert "for arrays" in reports(opened)[0].read_text().splitlines()[0]
    assert "for verdicts" in reports(opened)[1].read_text().splitlines()[0]


def test_a_chain_of_waits_ends_at_who_is_stopped(
    opened: Path, other: Callable[[str, str], subprocess.Popen[str]]
) -> None:
    body = """
with activity({what!r}, kind={kind!r}, of={of!r}):
    print("ready", flush=True)
    time.sleep(600)
"""
    other("service", body.format(what="responses of engine1", kind="wait", of="engine1"))
    other("engine0", body.format(what="responses", kind="generate", of=""))
    stopped = other("engine1", body.format(what="responses", kind="generate", of=""))
    os.kill(stopped.pid, signal.SIGSTOP)
    until(lambda: state_of(stopped.pid).startswith("stopped"))
    with activity("rollouts", kind="wait", of="service"):
        lives = {life.process: life for life in read(opened, only_last=True)}
        found = chain("rank0", lives["rank0"].open[0], lives, time.time())
    assert len(found) == 2
    assert found[0].startswith("service: responses of engine1, for")
    assert found[1].startswith("engine1 is stopped by a signal: responses, for")


def test_a_stopped_part_of_a_process_is_named(
    opened: Path, other: Callable[[str, str], subprocess.Popen[str]]
) -> None:
    body = """
with activity("responses", kind="generate"):
    print("ready", flush=True)
    time.sleep(600)
"""
    other("engine0", body)
    core = other("engine0-core", 'print("ready", flush=True)\ntime.sleep(600)\n')
    os.kill(core.pid, signal.SIGSTOP)
    until(lambda: state_of(core.pid).startswith("stopped"))
    with activity("responses of engine0", kind="wait", of="engine0"):
        lives = {life.process: life for life in read(opened, only_last=True)}
        found = chain("rank0", lives["rank0"].open[0], lives, time.time())
    assert found[0].startswith("engine0: responses, for")
    assert found[1:] == ["engine0-core is stopped by a signal"]


def test_a_circle_of_waits_is_said(opened: Path) -> None:
    now = time.time()

    def life(name: str, of: str) -> Life:
        own = (os.getpid(), start_of(os.getpid()), machine())
        made = Life(name, "here", own[0], own[1], own[2], "run", 0, now, now)
        made.spans[1] = SpanRecord(1, 0, "wait", f"for {of}", (of,), 0.0, now)
        return made

    lives = {"rank0": life("rank0", "rank1"), "rank1": life("rank1", "rank0")}
    found = chain("rank0", lives["rank0"].open[0], lives, now)
    assert found[-1] == "rank0 again: a circle"


# ------------------------------------------------------------------------------------------- stacks


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def here_it_waits():\n    time.sleep(600)\n", "in here_it_waits"),
        # PyDLL keeps Python's lock while C code sleeps: no Python thread runs.
        (
            "def here_it_waits():\n    while True: ctypes.PyDLL(None).sleep(600)\n",
            "answered only a signal",
        ),
        ("def here_it_waits():\n    os.kill(os.getpid(), signal.SIGSTOP)\n", "stopped by a signal"),
    ],
)
def test_stacks_of_a_process_that_waits_is_stuck_or_stopped(
    body: str,
    expected: str,
    recording: Recording,
    other: Callable[[str, str], subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = 'with activity("step", kind="train"):\n    print("ready", flush=True)\n    here_it_waits()\n'
    process = other("rank0", body + call)
    if "SIGSTOP" in body:
        until(lambda: state_of(process.pid).startswith("stopped"))
    assert status([str(Path(recording.folder).parent), "--stacks"]) == 0
    shown = capsys.readouterr().out
    assert expected in shown
    assert ("in here_it_waits" in shown) == ("SIGSTOP" not in body)
    assert process.poll() is None  # it lives on


def test_a_signal_goes_only_to_the_process_that_recorded_it(recording: Recording) -> None:
    """Process ids are used again, and an unhandled signal would end another program."""
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        here = machine()
        now = time.time()
        life = Life("rank0", "here", sleeper.pid, "1", here, "run", stacks.SIGNAL, now, now)
        (Path(recording.folder) / stacks.FOLDER / "rank0.signal").touch()
        found = stacks.collect(Path(recording.folder) / stacks.FOLDER, [life])
        assert found == {"rank0": "the process has ended"}
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_descendants_without_other_processes_of_the_run() -> None:
    # Popen returns once `sleep` has been executed, or a moment before.
    code = """
import pathlib, subprocess
p = subprocess.Popen(["sleep", "600"])
while not pathlib.Path(f"/proc/{p.pid}/cmdline").read_bytes().startswith(b"sleep"):
    pass
print(p.pid, flush=True)
p.wait()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    below = int(child.stdout.readline())
    try:
        found = {one.process: one for one in descendants(os.getpid())}
        assert found[below].name == "sleep 600" and child.pid in found
        without = descendants(os.getpid(), without=frozenset({child.pid}))
        assert not {below, child.pid} & {one.process for one in without}
    finally:
        os.kill(below, signal.SIGKILL)
        child.kill()
        child.wait()


# ------------------------------------------------------------------------------- status and timeline


def test_status_of_a_living_and_a_dead_process(
    opened: Path,
    other: Callable[[str, str], subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    body = 'with activity("model", kind="load"):\n    print("ready", flush=True)\n    time.sleep(600)\n'
    dead = other("engine0", body)
    dead.kill()
    dead.wait()
    ledger = opened.parent / "ledger.jsonl"
    ledger.write_text('{"n":5,"event":"trained","step":4,"version":4,"crc":"0"}\n{"n":6,"ev')
    step_begins(5, 4)
    with activity("rollouts of step 5", kind="wait", of="service", deadline_s=90):
        assert status([str(opened.parent), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert status([str(opened.parent)]) == 0
        shown = capsys.readouterr().out
    assert (found["step"], found["version"], found["trained"]) == (5, 4, 4)
    rank, engine = found["processes"]
    assert (rank["process"], rank["condition"], rank["alive"]) == ("rank0", "alive", True)
    (does,) = rank["does"]
    assert does["waits_on"] == ["service"] and does["deadline_s"] == 90
    assert (engine["condition"], engine["does"][0]["what"]) == ("gone", "model")
    assert "step 5, weights 4; 4 steps trained" in shown and "owner: none" in shown
    assert "of 1 min 30 s, waits on service" in shown and "engine0      gone" in shown


def test_status_of_a_resumed_run_forgets_what_counts_no_longer(
    opened: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed after step 7, and resumed from the checkpoint of step 5."""
    ledger = opened.parent / "ledger.jsonl"
    for step, cursor, trained in ((0, START, 7), (5, Cursor(5), 5)):
        recorder = Recorder(ledger)
        recorder.start(step=step, cursor=cursor, max_staleness=0, groups_per_step=1, max_draws=1)
        recorder.release(trained)
        asyncio.run(recorder.durable())
        assert status([str(opened.parent), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["version"], found["trained"]) == (trained, trained)
        assert status([str(opened.parent)]) == 0
        assert f"no step has begun; {trained} steps trained" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl"])
def test_status_tells_whether_a_run_is_finished(
    opened: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the steps of the recipe; a run without a ledger is one of fine-tuning."""
    run = opened.parent
    line = {"ledger.jsonl": '{"n":5,"event":"trained","step":%d}', "metrics.jsonl": '{"step": %d}'}
    (run / "recipe.yaml").write_text("steps: 4\n")
    for step, finished in ((3, False), (4, True)):
        (run / name).write_text(line[name] % step + "\n")
        assert status([str(run), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["trained"], found["steps"], found["finished"]) == (step, 4, finished)
        assert status([str(run)]) == 0
        said = capsys.readouterr().out.splitlines()[0]
        assert f"{step} of 4 steps trained" in said and said.endswith("finished") is finished


@pytest.mark.parametrize("command", [status, timeline])
@pytest.mark.parametrize("words", [[], ["a", "b"], ["--what", "a"], ["absent"]])
def test_a_wrong_command_line_is_one_error(
    command: Callable[[list[str]], int], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError):
        command([str(tmp_path / word) if word[0] != "-" else word for word in words])


def span(number: int, begin: float, end: float | None, parent: int = 0, kind: str = "train"):
    return SpanRecord(number, parent, kind, f"span {number}", (), 0.0, begin, end)


def life_of(*found: SpanRecord, last: float = 10.0, name: str = "rank0") -> Life:
    made = Life(name, "there", 1, "1", "", "run", 0, 0.0, last)
    made.spans = {one.number: one for one in found}
    return made


def test_lanes_hold_spans_that_nest_or_lie_apart() -> None:
    made = life_of(
        span(1, 0, 9), span(2, 1, 4, 1), span(3, 3, 6, 1), span(4, 4, 5, 2), span(5, 9, None)
    )
    lane = {one.number: number for one, number in lanes(made)}
    assert lane == {1: 0, 2: 0, 3: 1, 4: 0, 5: 0}
    for a in made.spans.values():
        for b in made.spans.values():
            if a.number < b.number and lane[a.number] == lane[b.number]:
                ends = made.ended_at(a), made.ended_at(b)
                assert b.begin >= ends[0] or ends[1] <= ends[0]


def test_the_timeline_is_a_trace_of_all_processes(
    opened: Path,
    other: Callable[[str, str], subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    other("engine0", 'activity("x", kind="load").__enter__(); print("ready", flush=True)\n')
    step_begins(1, 0)
    with activity("rollouts", kind="wait", of="service", deadline_s=9):
        time.sleep(0.01)
    assert timeline([str(opened.parent)]) == 0
    path = Path(capsys.readouterr().out.strip())
    events = json.loads(path.read_text())["traceEvents"]
    names = {one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert names == {"rank0", "engine0"}
    (drawn,) = [one for one in events if one["ph"] == "X" and one["cat"] == "wait"]
    assert drawn["name"] == "rollouts" and drawn["dur"] >= 1e4 and drawn["ts"] > 0
    assert drawn["args"]["waits on"] == "service"
    assert [one["name"] for one in events if one["ph"] == "i"] == ["step 1"]
    assert timeline([str(opened.parent), "--out", str(opened / "t.json")]) == 0
    assert json.loads((opened / "t.json").read_text())["traceEvents"]


def test_the_idle_share_names_its_cause() -> None:
    leader = life_of(span(1, 0, 6, kind="wait"), span(2, 6, 10))
    leader.spans[1].what = "rollouts of step 7"
    engine = life_of(span(1, 0, 6, kind="generate"), name="engine0")
    row, beside = (cells_of(one, 0.0, 10.0) for one in (leader, engine))
    assert idle(row, row, "rank0") == "60% idle, waiting for rollouts"
    assert idle(beside, row, "engine0") == "40% idle, while rank0 is at: span"


def test_the_innermost_span_is_drawn() -> None:
    outer, inner = span(1, 0, 10), span(2, 2, 4, 1, "wait")
    row = cells_of(life_of(outer, inner), 0.0, 10.0)
    held = [one.number for one in row if one is not None]
    assert len(held) == len(row) and held.count(2) == len(row) // 5
    assert held[: len(row) // 5] == [1] * (len(row) // 5)


def test_the_report_has_a_row_for_each_process(opened: Path) -> None:
    assert last_steps(opened.parent) == ""  # before the first step
    step_begins(1, 0)
    with activity("rollouts <of step 1>", kind="wait", of="service"):
        time.sleep(0.02)
    made = last_steps(opened.parent)
    assert ">rank0</div>" in made and "step 1</span>" in made
    assert f"var(--c{COLOURS['wait']})" in made and "rollouts &lt;of step 1&gt;" in made
    assert last_steps(opened / "absent") == ""


def test_every_kind_has_a_colour() -> None:
    page = Path(report.__file__).with_name("report.html.j2").read_text()
    assert set(COLOURS) == set(KINDS) and len(set(COLOURS.values())) == len(KINDS)
    assert all(page.count(f"--c{number}:") == 2 for number in COLOURS.values())


def test_a_new_run_forgets_the_record_of_the_one_before(tmp_path: Path) -> None:
    recording = Recording(str(tmp_path / "activity"), "a")
    recording.make(keep=False)
    (tmp_path / "activity" / "rank3.jsonl").write_text("")
    recording.make(keep=True)
    assert (tmp_path / "activity" / "rank3.jsonl").exists()
    recording.make(keep=False)
    assert not (tmp_path / "activity" / "rank3.jsonl").exists()
    assert recordings.FOLDER == "activity"
