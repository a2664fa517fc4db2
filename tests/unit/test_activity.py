"""What processes record, who waits on whom, stacks, reports of overdue waits, status and timeline."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from support.commands import started, until

import megarl.activity.report as reporting
from megarl.activity import recording as recordings
from megarl.activity.busy import Busy
from megarl.activity.files import Life, chain, read_lives
from megarl.activity.process import below, condition, machine, start_of
from megarl.activity.recording import Recording
from megarl.activity.spans import KINDS, POLL_S, Event, activity, step_begins
from megarl.apps.runs import report
from megarl.apps.runs.lanes import COLOURS, idle, last_steps
from megarl.apps.runs.lanes import cells as cells_of
from megarl.apps.runs.status import main as status
from megarl.apps.runs.timeline import main as timeline
from megarl.errors import UserError

BEGIN = """
import ctypes, os, signal, sys, time
from megarl.activity.recording import Recording
from megarl.activity.spans import activity, step_begins
close = Recording(sys.argv[1], "run").open(sys.argv[2])
"""
"""Beginning of the program of another process of a run."""
Start = Callable[[str, str], subprocess.Popen[str]]


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
def other(recording: Recording) -> Iterator[Start]:
    """Starts another process of the run, which prints a line once it does what it does."""
    with ExitStack() as stack:

        def start(name: str, body: str) -> subprocess.Popen[str]:
            program = started(BEGIN + body, recording.folder, name, stderr=subprocess.DEVNULL)
            process, said = stack.enter_context(program)
            assert said == "ready"
            return process

        yield start


def during(call: str, then: str = "time.sleep(600)") -> str:
    """Program of a process that is in an activity."""
    return f'with activity({call}):\n    print("ready", flush=True)\n    {then}\n'


def step() -> None:
    with activity("step", kind="train"):
        pass


def mine(folder: Path) -> Life:
    """The newest life of rank0."""
    return next(life for life in read_lives(folder, only_last=True) if life.process == "rank0")


def stop(process: int) -> None:
    """Stop a process by a signal, and wait until it is."""
    os.kill(process, signal.SIGSTOP)
    until(lambda: condition(process, start_of(process)) == "stopped by a signal")


def names(spans: Iterable[Event]) -> list[str]:
    return [one["name"] for one in spans]


# -------------------------------------------------------------------------------- what is recorded


def test_spans_nest_and_end(opened: Path) -> None:
    step_begins(7, 6)
    with activity("step 7", kind="train"):
        with activity("rollouts", kind="wait", of=["service", 0, 1], deadline_s=600):
            now = mine(opened).open
            assert names(now) == ["rollouts"]
            assert now[0]["args"] == {"waits on": ["service", "rank1"], "deadline_s": 600}
            assert names(mine(opened).around(now[0])) == ["step 7"]
        assert names(mine(opened).open) == ["step 7"]
    life = mine(opened)
    assert life.open == [] and life.is_alive
    with pytest.raises(KeyError), activity("fails", kind="train"):
        raise KeyError
    with (opened / "rank0.json").open("a") as file:  # events of others are passed over
        file.write(f'{{}},\n[1],\n{{"ph":"B","pid":{os.getpid()}}},\n{{"ph":"M","args":3}},\n"x"\n')
    with activity("next", kind="train"):
        assert names(mine(opened).open) == ["next"] and mine(opened).open[0]["in"] == 0
    assert [one["args"] for one in life.steps] == [{"step": 7, "version": 6}]
    inner, outer = life.spans[2], life.spans[1]
    assert outer["ts"] <= inner["ts"] <= inner["end"] <= outer["end"]
    assert abs(outer["end"] / 1e6 - time.time()) < 60  # the clock is the world's


def test_a_process_that_cannot_write_goes_on(
    tmp_path: Path, opened: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a full disk, or an engine of another host, where the run folder is not."""
    assert Recording.of(tmp_path, "run", enabled=False) is None
    with Path("/dev/full").open("ab", buffering=0) as full:
        recordings.RECORDERS[0]._file = full
        for _ in range(3):
            step()
    assert capsys.readouterr().err.count("is recorded no more") == 1
    recording = Recording(str(tmp_path / "absent" / "activity"), "run")
    close = recording.open("engine0")
    for _ in range(3):
        step()
    close()
    assert capsys.readouterr().err.count("what engine0 does is not recorded") == 1
    assert not (tmp_path / "absent").exists()


def test_a_killed_process_leaves_a_torn_line_and_the_next_goes_on(recording: Recording) -> None:
    path = Path(recording.folder) / "rank0.json"
    recording.open("rank0")()
    path.write_bytes(path.read_bytes() + b'{"name":"step","ph":"B","cat":"tra')
    close = recording.open("rank0")
    step()
    close()
    (life,) = read_lives(path.parent)  # the same process: one life
    assert life.closed and names(life.spans.values()) == ["step"]
    events = json.loads(path.read_text().rstrip(",\n") + "]")  # what a viewer reads
    assert [one["ph"] for one in events] == ["M", "i", "M", "B", "E", "i"]


def test_a_process_killed_at_any_time_leaves_whole_lines(
    recording: Recording, other: Start
) -> None:
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
    lines = path.read_bytes().split(b"\n")
    assert lines[0] == b"[" and len(lines) > 100
    assert all(json.loads(line.removesuffix(b",")) for line in lines[1:-1])
    (life,) = read_lives(Path(recording.folder))
    assert life.condition == "gone" and len(life.spans) > 50


def test_a_new_process_of_the_name_has_a_life_of_its_own(opened: Path) -> None:
    """A line of a process that was taken for dead is not its successor's."""
    own = mine(opened)
    args = {"name": "rank0", "host": own.host, "started": "9", "machine": "", "run": "b"}
    begin = {"name": "model", "cat": "load", "ph": "B", "span": 1, "in": 0, "tid": 0, "args": {}}
    with (opened / "rank0.json").open("a") as file:
        named = {"name": "process_name", "ph": "M", "args": args | {"signal": 0}}
        for event in (
            {**named, "ts": 100e6, "pid": 1},
            {**begin, "ts": 105e6, "pid": 1},
            {**begin, "ts": 106e6, "span": 2, "name": "late", "pid": own.pid},
        ):
            file.write(json.dumps(event, separators=(",", ":")) + ",\n")
    newest = mine(opened)
    assert newest.run == "b" and names(newest.open) == ["model"]
    assert newest.open[0]["ts"] == 105e6 and newest.is_alive is None
    assert [life.run for life in read_lives(opened)] == ["run", "b"]


def test_the_file_is_bounded_and_keeps_what_is_open(
    opened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "MAX_BYTES", 5000)
    step_begins(3, 2)
    with activity("whole", kind="train"):
        for number in range(300):
            with activity(f"part {number}", kind="score"):
                pass
        assert names(mine(opened).open) == ["whole"]
        assert mine(opened).steps[-1]["args"] == {"step": 3, "version": 2}
    sizes = {path.name: path.stat().st_size for path in opened.glob("*.json")}
    assert set(sizes) == {"rank0.json", "rank0.1.json"}
    assert all(size <= 5000 + 1000 for size in sizes.values())
    (life,) = read_lives(opened)
    whole = next(one for one in life.spans.values() if one["name"] == "whole")
    assert "end" in whole and whole["span"] == 1


def test_a_quiet_span_is_written_only_if_it_lasts(
    opened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "QUIET_S", 0.05)
    for _ in range(5):
        with activity("short", kind="wait", quiet=True):
            pass
    with activity("long", kind="wait", of=[1], quiet=True):
        until(lambda: mine(opened).open)
    assert names(mine(opened).spans.values()) == ["long"]
    assert mine(opened).open == []


async def test_many_requests_are_one_span_with_counts(
    opened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.activity.busy.PROGRESS_S", 0.05)
    busy = Busy("responses", kind="generate", of="environment", deadline_s=0.2)

    async def one() -> None:
        with busy.request():
            await asyncio.sleep(0.01)

    await asyncio.gather(*(one() for _ in range(500)))
    until(lambda: any("end" in span for span in mine(opened).spans.values()))
    (span,) = mine(opened).spans.values()
    counts = {name: span["args"][name] for name in ("done", "most")}
    assert counts == {"done": 500, "most": 500} and span["name"] == "responses"
    with busy.request():
        with busy.request():
            pass
        await asyncio.to_thread(until, lambda: "done" in mine(opened).open[0]["args"])
        life = mine(opened)
        assert "(1 open, 1 answered)" in life.doing(life.open[0], time.time())
        await asyncio.to_thread(until, lambda: reports(opened))
    assert "for responses (deadline" in reports(opened)[0].read_text()


async def test_tasks_of_an_event_loop_have_spans_of_their_own(opened: Path) -> None:
    async def one(name: str) -> None:
        with activity(name, kind="score"):
            await asyncio.sleep(0.01)
            with activity(f"in {name}", kind="wait"):
                await asyncio.sleep(0.01)

    with activity("outer", kind="train"):
        await asyncio.gather(one("a"), one("b"))
    found = {span["name"]: span for span in mine(opened).spans.values()}
    assert found["in a"]["in"] == found["a"]["span"] and found["in b"]["in"] == found["b"]["span"]
    assert found["a"]["in"] == found["b"]["in"] == found["outer"]["span"]
    # Spans of one lane lie in each other.
    lane = {name: span["tid"] for name, span in found.items()}
    assert lane == {"outer": 0, "a": 0, "in a": 0, "b": 1, "in b": 1}


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
    other: Start,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = other("engine0", during('"responses of step 3", kind="generate"'))
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


def test_no_report_before_the_deadline_and_none_without(opened: Path) -> None:
    """At the deadline an error, by which the process may end, is held back for the report."""
    with pytest.raises(RuntimeError, match="late"):
        fail_in(activity("a", kind="wait", of="service", deadline_s=60), 0.0)
    with pytest.raises(RuntimeError, match="late"):
        fail_in(activity("b", kind="wait", of="service"), 2 * POLL_S)
    assert reports(opened) == []
    with pytest.raises(RuntimeError, match="late"):
        fail_in(activity("rollouts", kind="wait", of="service", deadline_s=0.01), 0.02)
    assert "for rollouts (deadline" in reports(opened)[0].read_text()


def test_a_request_that_nobody_judges_is_named_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the event loop hangs that is to ask how long an engine was paused. (judged at, of
    which seconds paused) and when it is late, with which deadline.
    """
    cases = {(0.0, 0.0): (113.0, 10.0), (111.0, 5.0): (124.0, 10.0), (116.0, 6.0): (116.0, 16.0)}
    for (judged_at, paused_s), (late_at, deadline_s) in cases.items():
        at = [100.0]
        monkeypatch.setattr("megarl.activity.busy.now", lambda at=at: at[0])
        busy = Busy("responses", kind="wait", of="engine0", deadline_s=10.0, judge_s=3.0)
        with busy.request():
            if judged_at:
                at[0] = judged_at
                busy.judged(judged_at - 100.0, paused_s)
            else:
                assert busy.look(late_at - 0.1) is None
            found = busy.look(late_at)
            assert found is not None
            assert (found.moved_at, found.deadline_s) == (100.0, deadline_s)


def test_several_processes_write_one_report(opened: Path, other: Start) -> None:
    """Three ranks and this one wait for the same service, and pass their deadline together."""
    told = opened.parent / "deadline"
    wait = f"""
print("ready", flush=True)
while not os.path.exists({str(told)!r}): time.sleep(0.01)
rest_s = float(open({str(told)!r}).read()) - time.monotonic()
with activity("rollouts", kind="wait", of="service", deadline_s=rest_s): time.sleep(600)
"""
    for rank in (1, 2, 3):
        other(f"rank{rank}", wait)
    at = time.monotonic() + 2.0
    (opened.parent / "new").write_text(str(at))
    (opened.parent / "new").rename(told)
    with activity("rollouts", kind="wait", of="service", deadline_s=at - time.monotonic()):
        until(lambda: reports(opened))
        time.sleep(2 * POLL_S)  # every watcher looks once more
        with (opened / ".lock").open() as lock:  # and none is writing
            fcntl.flock(lock, fcntl.LOCK_EX)
    (path,) = reports(opened)
    assert all(f"  rank{rank} " in path.read_text() for rank in range(4))


def test_a_wait_that_lasts_is_named_after_another_that_has_ended(
    opened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both began before the first report, which a report of the same waits would only repeat."""
    monkeypatch.setattr(reporting, "PATIENCE_S", 0.2)
    with activity("verdicts", kind="wait", of="service", deadline_s=2.0):
        with activity("arrays", kind="wait", of="service", deadline_s=0.1):
            until(lambda: reports(opened))
        until(lambda: len(reports(opened)) == 2)
    assert "for arrays" in reports(opened)[0].read_text().splitlines()[0]
    assert "for verdicts" in reports(opened)[1].read_text().splitlines()[0]


def chain_of_rank0(folder: Path) -> list[str]:
    lives = {life.process: life for life in read_lives(folder, only_last=True)}
    return chain("rank0", lives["rank0"].open[0], lives, time.time())


def test_a_chain_of_waits_ends_at_who_is_stopped_or_in_a_circle(opened: Path, other: Start) -> None:
    other("service", during('"responses of engine1", kind="wait", of="engine1"'))
    other("engine0", during('"responses", kind="generate"'))
    stopped = other("engine1", during('"responses", kind="generate"'))
    stop(stopped.pid)
    other("rank1", during('"orders", kind="wait", of=[0]'))
    core = other("engine0-core", 'print("ready", flush=True)\ntime.sleep(600)\n')
    stop(core.pid)
    expected = {
        "service": ["service: responses of engine1, for", "engine1 is stopped by a signal: resp"],
        "engine0": ["engine0: responses, for", "engine0-core is stopped by a signal"],
        "rank1": ["rank1: orders, for", "rank0 again: a circle"],
    }
    for of, starts in expected.items():
        with activity("rollouts", kind="wait", of=of):
            found = chain_of_rank0(opened)
        assert len(found) == 2
        assert all(said.startswith(start) for said, start in zip(found, starts, strict=True))


# ------------------------------------------------------------------------------------------- stacks


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("time.sleep(600)", "in here_it_waits"),
        # PyDLL keeps Python's lock while C code sleeps: no Python thread runs.
        ("while True: ctypes.PyDLL(None).sleep(600)", "answered only a signal"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "stopped by a signal"),
    ],
)
def test_stacks_of_a_process_that_waits_is_stuck_or_stopped(
    body: str,
    expected: str,
    recording: Recording,
    other: Start,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits = during('"step", kind="train"', "here_it_waits()")
    process = other("rank0", f"def here_it_waits():\n    {body}\n{waits}")
    if "SIGSTOP" in body:
        stop(process.pid)
    assert status([str(Path(recording.folder).parent), "--stacks"]) == 0
    shown = capsys.readouterr().out
    assert expected in shown
    assert ("in here_it_waits" in shown) == ("SIGSTOP" not in body)
    assert process.poll() is None  # it lives on


def test_a_signal_goes_only_to_the_process_that_recorded_it(recording: Recording) -> None:
    """Process ids are used again, and an unhandled signal would end another program."""
    with started("import time; print(flush=True); time.sleep(600)") as (sleeper, _):
        now = time.time()
        place = (machine(), "run", reporting.SIGNAL, now, now)
        life = Life("rank0", "here", sleeper.pid, "1", *place)
        found = reporting.stacks_of(Path(recording.folder), [life])
        assert found == {"rank0": "none: the process is gone"}
        assert sleeper.poll() is None


def test_descendants_without_other_processes_of_the_run() -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    with started(code) as (child, said):
        inner, own = int(said), os.getpid()
        found = [{one.pid for one in below(own, frozenset(others))} for others in ([], [child.pid])]
        os.kill(inner, signal.SIGKILL)
    assert {inner, child.pid} <= found[0] and not {inner, child.pid} & found[1]


# ------------------------------------------------------------------------------- status and timeline


def test_status_of_a_living_and_a_dead_process(
    opened: Path,
    other: Start,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dead = other("engine0", during('"model", kind="load"'))
    dead.kill()
    dead.wait()
    run = opened.parent
    (run / "metrics.jsonl").write_text('{"step": 4, "loss": 1}\n{"step": 5, "lo')
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
    for steps in (4, 5):  # of the recipe
        (run / "recipe.yaml").write_text(f"steps: {steps}\n")
        assert status([str(run), "--json"]) == status([str(run)]) == 0
        told, first, *_ = capsys.readouterr().out.splitlines()
        found = json.loads(told)
        assert (found["steps"], found["finished"]) == (steps, steps == 4)
        assert f"4 of {steps} steps trained" in first and first.endswith("finished") is (steps == 4)


@pytest.mark.parametrize("command", [status, timeline])
@pytest.mark.parametrize("words", [[], ["a", "b"], ["--what", "a"], ["absent"]])
def test_a_wrong_command_line_is_one_error(
    command: Callable[[list[str]], int], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError):
        command([str(tmp_path / word) if word[0] != "-" else word for word in words])


def span(
    number: int, begin: float, end: float | None, *, kind: str = "train", of: str = ""
) -> Event:
    args = {"waits on": [of]} if of else {}
    made = {"name": f"span {number}", "cat": kind, "ts": round(1e6 * begin), "span": number}
    made |= {"in": 0, "tid": 0, "args": args}
    return made | ({} if end is None else {"end": round(1e6 * end)})


def life_of(*found: Event, last: float = 10.0, name: str = "rank0") -> Life:
    made = Life(name, "there", 1, "1", "", "run", 0, 0.0, last)
    made.spans = {one["span"]: one for one in found}
    return made


def test_the_timeline_is_a_trace_of_all_processes(
    opened: Path,
    other: Start,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other("engine0", 'activity("x", kind="load").__enter__(); print("ready", flush=True)\n')
    step_begins(1, 0)
    with activity("rollouts", kind="wait", of="service", deadline_s=9):
        time.sleep(0.01)
    assert timeline([str(opened.parent)]) == 0
    path = Path(capsys.readouterr().out.strip())
    events = json.loads(path.read_text())["traceEvents"]
    heads = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert heads == ["rank0", "engine0"]
    (left,) = [one for one in events if one["name"] == "x"]
    assert left["args"]["has no end"] and left["dur"] >= 0 and left["pid"] == 1
    (drawn,) = [one for one in events if one["ph"] == "X" and one["cat"] == "wait"]
    assert drawn["name"] == "rollouts" and drawn["dur"] >= 1e4 and drawn["ts"] > 0
    assert drawn["args"]["waits on"] == ["service"]
    assert abs(drawn["ts"] - left["ts"]) < 60e6  # one clock
    assert [one["name"] for one in events if one["ph"] == "i"] == ["step 1"]
    assert timeline([str(opened.parent), "--out", str(opened / "t.json")]) == 0
    assert json.loads((opened / "t.json").read_text())["traceEvents"]


def test_the_idle_share_names_its_cause() -> None:
    leader = life_of(span(1, 0, 6, kind="wait"), span(2, 6, 10))
    leader.spans[1]["name"] = "rollouts of step 7"
    engine = life_of(span(1, 0, 6, kind="generate"), name="engine0")
    row, beside = (cells_of(one, 0, 10_000_000) for one in (leader, engine))
    assert idle(row, row) == "60% idle, waiting for rollouts"
    assert idle(beside, row) == "40% idle, while rank0 is at: span"


def test_the_innermost_span_is_drawn() -> None:
    inner = span(2, 2, 4, kind="wait") | {"in": 1}
    row = cells_of(life_of(span(1, 0, 10), inner), 0, 10_000_000)
    held = [one["span"] for one in row if one is not None]
    assert len(held) == len(row) and held.count(2) == len(row) // 5
    assert held[: len(row) // 5] == [1] * (len(row) // 5)


def test_the_report_has_a_row_for_each_process(opened: Path) -> None:
    assert last_steps(opened.parent) is None  # before the first step
    step_begins(1, 0)
    with activity("rollouts <of step 1>", kind="wait", of="service"):
        time.sleep(0.02)
    assert last_steps(opened / "absent") is None
    (opened.parent / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    page = report.write_report(opened.parent, title="a run").read_text()
    assert ">rank0</div>" in page and "step 1</span>" in page
    assert f"var(--c{COLOURS['wait']})" in page and "rollouts &lt;of step 1&gt;" in page


def test_every_kind_has_a_colour() -> None:
    page = Path(report.__file__).with_name("report.html.j2").read_text()
    assert set(COLOURS) == set(KINDS) and len(set(COLOURS.values())) == len(KINDS)
    assert all(page.count(f"--c{number}:") == 2 for number in COLOURS.values())
