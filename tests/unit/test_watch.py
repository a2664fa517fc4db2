"""`megarl watch`: what it shows of a run folder, once and as the run goes on."""

from __future__ import annotations

import io
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.commands import ROOT

from megarl import cli
from megarl.activity import files, recording
from megarl.activity.recording import Recording
from megarl.activity.spans import activity, step_begins
from megarl.apps.runs import watch
from megarl.apps.runs.watch import RunView, Tail, follow
from megarl.apps.runs.watch import main as watch_command
from megarl.checkpoints import lease
from megarl.errors import UserError
from megarl.observe.config import ObserveConfig
from megarl.observe.observer import Observer
from megarl.signals import EndedBySignal
from megarl.types import StepReport

RECIPE = """steps: 30
rollout: {max_staleness: 0, engine: {dtype: float32}}
training: {precision: float32}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of 30 steps that has not begun the first one."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def observed(run: Path, first: int = 0) -> Observer:
    quiet = ObserveConfig(tensorboard=False, progress=False)
    return Observer(quiet, run, total_steps=30, first_step=first)


def numbers(step: int) -> dict[str, float]:
    """Metrics of the step with this number, from 0."""
    return {
        "reward/mean": step / 10 - 1, "accuracy": step / 30, "length/mean": 20.0 + step,
        "time/step_s": 6.0, "time/rollout_s": 4.0, "time/train_s": 1.5,
        "tokens/generated_per_s": 20000.0, "tokens/trained_per_s": 25000.0,
        "staleness/max": 0.0, "mismatch/mean_abs": 1e-6, "groups/drawn": 32.0,
    }  # fmt: skip


def train(observer: Observer, first: int, last: int, **more: float) -> None:
    for step in range(first, last):
        named = {name.replace("__", "/"): value for name, value in more.items()}
        observer.step(StepReport(step, numbers(step) | named))


def group(*responses: str, prompt: str = "347+589=") -> dict[str, Any]:
    told = [
        {"response": one, "correct": "936" in one, "reward": 1, "tokens": 9} for one in responses
    ]
    return {"ordinal": 0, "prompt": prompt, "answer": "936", "rollouts": told}


def once(run: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that `megarl watch RUN --once` prints; none is longer than 80 columns."""
    assert watch_command([str(run), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    return lines


def test_a_run_in_the_middle(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = Recording.of(run, "run", enabled=True)
    assert recording is not None
    recording.make(keep=False)
    close = recording.open("rank0")
    owner = lease.take(run, patience_s=1)
    with observed(run) as observer:
        observer.evaluation(0, {"eval/accuracy": 0.1}, [])
        train(observer, 0, 24)
        observer.transcripts(22, [group("old")])
        observer.transcripts(23, [group("first"), group("second", "third: 930", "9+7=16#936")])
        observer.evaluation(20, {"eval_sampled/accuracy": 0.5}, [])
        observer.evaluation(
            20, {"eval/accuracy": 0.625, "eval/length/mean": 31.0}, [{"response": ""}]
        )
        step_begins(25, 24)
        with activity("rollouts of step 25", kind="wait", of="service", deadline_s=90):
            lines = once(run, capsys)
    owner.release()
    close()
    wanted = r"""mine  alive
step 24 of 30  ━+╸?  +80%  36.0 s left
6.0 s a step; longer part: rollout 4.0 s
 +last +in 20 steps  last 20 steps
reward +1.300 +\+2.000 +▁.*█
accuracy +76.7% +\+66.7% +▁.*█
response tokens +43.0 +\+20.0 +▁.*█
generated tokens/s +20,000 +\+0 +▁+
trained tokens/s +25,000 +\+0 +▁+
staleness, max +0 +\+0 +▁+
mismatch, mean +1e-06 +\+0 +▁+
evaluation after 20 steps: accuracy 0.625, length/mean 31, eval_sampled.*…
processes: 1 alive
rank0  alive  0.\d s  rollouts of step 25 +waits on service
step 24: 347\+589=
wrong  \+1  third: 930
right  \+1  9\+7=16#936""".splitlines()
    assert len(lines) == len(wanted)
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.fullmatch(pattern, line), line


def test_a_finished_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with observed(run) as observer:
        train(observer, 0, 30)
    lines = once(run, capsys)
    assert lines[0] == "mine  finished"
    assert re.fullmatch("step 30 of 30  ━{24}  100%", lines[1])
    owner = lease.take(run, patience_s=1)  # the last evaluation goes on
    assert once(run, capsys)[0] == "mine  alive"
    owner.release()
    (run / "recipe.yaml").write_text("steps: 31")
    lines = once(run, capsys)
    assert lines[0] == "mine  ended" and "left" not in lines[1]
    follow(RunView(run), Console(file=io.StringIO()), lambda _: pytest.fail("it goes on"))


def test_a_run_without_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = once(run, capsys)
    assert re.fullmatch("step 0 of 30 +0%", lines[1])
    assert lines[2:] == [
        "no line in metrics.jsonl yet: waiting",
        "processes: none has recorded what it does",
    ]


def test_a_run_without_rewards_shows_its_loss(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "recipe.yaml").unlink()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": null}\n')
    lines = once(run, capsys)
    assert lines[1] == "step 2" and " s a step" not in "".join(lines), "times are not known"
    assert [line.split() for line in lines if "loss" in line] == [["loss", "nan", "▁"]]


def test_text_of_the_model_cannot_steer_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "[red]b[/]\x1b[31m\x1b]0;t\x07 \ud83d\u202e\r\n:smile: 你好 936"
    with observed(run) as observer:
        train(observer, 0, 1)
        observer.transcripts(
            0, [group(text, "begin " + "x" * 999 + " end", prompt="y" * 99 + "\x1b[2Jp [b]")]
        )
    lines = once(run, capsys)
    assert re.fullmatch(r"step 1: y{40,49}\\x1b\[2Jp \[b\]", lines[-3])
    escaped = r"[red]b[/]\x1b[31m\x1b]0;t\x07 \ud83d\u202e\r\n:smile: 你好 936"
    assert lines[-2] == f"right  +1  {escaped}"
    assert re.fullmatch(r"wrong  \+1  begin x+ … x+ end", lines[-1])
    assert all(one.isprintable() for one in "".join(lines))


def test_what_is_not_usual_has_a_mark(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with observed(run) as observer:
        train(observer, 0, 1, groups__rejected=16.0)
        assert not [line for line in once(run, capsys) if "!" in line]
        named = {"staleness__max": 1.0, "mismatch__mean_abs": 0.002, "verifier__nans": 2.0}
        train(observer, 1, 2, **named, groups__rejected=17.0)
        lines = once(run, capsys)
        (run / "recipe.yaml").write_text("rollout: {max_staleness: 1}\n")
        loose = once(run, capsys)
    marks = [line.partition("!") for line in lines if "!" in line]
    assert [(left.split(",")[0], right) for left, _, right in marks] == [
        ("staleness", " usual: 0"),
        ("mismatch", " usual: 0.001"),
        ("", " verifier/nans 2 (usual: 0), groups/rejected 17 (usual: 16)"),
    ]
    assert [line for line in loose if "!" in line] == [lines[-2]]


def test_a_damaged_folder_is_still_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "recipe.yaml").write_text("steps: many\nrollout: [1]\n")
    (run / "metrics.jsonl").write_text(
        'no JSON\n[1]\n{"loss": 1}\n{"step": true}\n{"step": 1' + "0" * 400 + "}\n"
        '{"step": 1, "loss": "x", "reward/mean": 1e999, "accuracy": [1]}\n'
        '{"step": 2, "accuracy": 0.5}\n{"step": 3, "accu'
    )
    (run / "transcripts.jsonl").write_text('{"step": 2, "rollouts": {"a": 1}}\n')
    (run / "evaluations.jsonl").write_text('{"step": 0, "eval/accuracy": "x"}\n')
    lines = once(run, capsys)
    assert lines[1] == "step 2" and any(line.startswith("accuracy ") for line in lines)
    assert "loss" not in "".join(lines) and lines[-1] == "step 2: "[:-1]


def test_of_many_processes_those_in_trouble_come_first(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = Recording.of(run, "run", enabled=True)
    assert recording is not None
    recording.make(keep=False)
    recording.open("rank0")()
    text = (run / "activity" / "rank0.json").read_text()
    for number in range(40):
        other = text.replace('"rank0"', f'"rank{number}"').partition('{"name":"closed"')[0]
        other = other.replace(f'"pid":{os.getpid()}', '"pid":4194305') if number == 30 else other
        (run / "activity" / f"rank{number}.json").write_text(other)
    lines = once(run, capsys)
    assert "processes: 39 alive, 1 gone" in lines
    shown = [line.split()[:3] for line in lines if line.startswith("rank")]
    assert shown[:2] == [["rank30", "gone", "idle"], ["rank0", "alive", "idle"]]
    assert lines[-1].startswith(f"and {40 - len(shown)} more: megarl status ")


def test_the_page_shows_the_rows_of_the_view() -> None:
    shown = (ROOT / "docs" / "howto" / "watch.md").read_text().split("```\n")[2].splitlines()
    named = [
        label for label, _ in watch.ROWS.values() if label != "loss"
    ]  # of runs without rewards
    assert [label for label in named if not any(one.startswith(label) for one in shown)] == []
    assert max(map(len, shown)) <= 80 and len(shown) <= 24


# ------------------------------------------------------------------------------------ as a run goes


def test_the_view_goes_on_with_the_run_and_writes_nothing(run: Path) -> None:
    """Each time that `follow` waits, the run goes a step on; at the end the terminal is as before."""
    shown, waits = io.StringIO(), []
    screen = Console(file=shown, force_terminal=True, width=80, height=24, color_system=None)
    observer = observed(run)

    def go_on(wait_s: float) -> None:
        waits.append(wait_s)
        train(observer, *{1: (0, 1), 2: (1, 2), 3: (2, 30)}[len(waits)])
        files.update((path, path.stat().st_mtime_ns) for path in run.rglob("*"))

    files = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    follow(RunView(run), screen, go_on)
    text = shown.getvalue()
    places = [text.index(f"step {done} of 30") for done in (0, 1, 2, 30)]
    assert places == sorted(places) and "waiting" in text[: places[1]]
    assert len(waits) == 3 and min(waits) >= 1
    assert text.startswith("\x1b[?1049h") and "\x1b[?1049l" in text[places[-1] :]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == files
    observer.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_live_view_in_order(
    number: int, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(*_: object) -> None:
        raise EndedBySignal(number)

    monkeypatch.setattr(watch, "follow", ended)
    assert watch_command([str(run)]) == 0 and capsys.readouterr().out  # no terminal: printed once
    monkeypatch.setattr(watch, "in_terminal", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert watch_command([str(run), "--once"]) == 0 and capsys.readouterr().out
    if number == signal.SIGINT:
        assert watch_command([str(run)]) == 0
    else:
        with pytest.raises(EndedBySignal):
            watch_command([str(run)])
    assert not capsys.readouterr().out


def test_only_new_lines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    tail, parsed = Tail(path), []

    def steps() -> list[int]:
        return [record["step"] for record in tail.read()]

    read = watch.parse_json
    monkeypatch.setattr(watch, "parse_json", lambda text: parsed.append(text) or read(text))
    assert steps() == []
    with path.open("w") as file:
        for step in range(1, 101):
            file.write(f'{{"step": {step}, "transcripts": []}}\n')
        file.write('{"step": 10')  # half a line
    assert steps() == list(range(101 - watch.KEPT, 101)) and len(parsed) == watch.KEPT
    assert all(record == {"step": record["step"]} for record in tail.read())
    with path.open("a") as file:
        file.write('1}\n{"step": 102}\n')
    assert steps()[-3:] == [100, 101, 102] and len(parsed) == watch.KEPT + 2
    again = tmp_path / "aside"  # as at a resume; longer than what it replaces
    again.write_text('{"step": 1}\n' + '{"step": 2}\n' * 999)
    again.replace(path)
    assert steps() == [2] * watch.KEPT
    path.write_text('{"step": 7}\n')
    assert steps() == [7]
    monkeypatch.setattr(watch, "PART_BYTES", 30)
    path.write_text('{"step": 1}\n' * 4)
    assert [record["step"] for record in Tail(path).read()] == [1, 1]


def test_only_new_activity_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of each process is what a reader of the whole file knows, also after the file
    was put away as too large, and after a new start.
    """
    records, folder, parsed = Recording.of(run, "run", enabled=True), run / "activity", []
    assert records is not None
    records.make(keep=False)
    close, latest, parse = records.open("rank0"), files.LatestLives(folder), files.parse_json
    monkeypatch.setattr(files, "parse_json", lambda text: parsed.append(text) or parse(text))

    def told(lines: int) -> list[str]:
        parsed.clear()
        (life,) = latest.read()
        assert len(list(filter(None, parsed))) == lines
        (whole,) = files.read_lives(folder, only_last=True)
        assert (life.closed, life.last, life.steps) == (whole.closed, whole.last, whole.steps)
        assert life.open == whole.open and set(life.spans) >= {one["span"] for one in life.open}
        return [one["name"] for one in life.open]

    assert told(1) == []
    step_begins(1, 0)
    with activity("rollouts", kind="wait", of="service", deadline_s=90):
        assert told(2) == ["rollouts"] and told(0) == ["rollouts"]
        with activity("inner", kind="train"):
            assert told(1) == ["inner"]
        monkeypatch.setattr(recording, "MAX_BYTES", 100)
        with activity("put away", kind="train"):
            assert (folder / "rank0.1.json").exists()
            monkeypatch.setattr(recording, "MAX_BYTES", 2**20)
            assert told(4) == ["put away"]
        assert told(1) == ["rollouts"]
    assert told(1) == [] and not latest.read()[0].spans, "what has ended is forgotten"
    close()
    records.open("rank0")
    assert told(1) == [] and not latest.read()[0].closed, "of the new start alone"
    recording.close_recording()
    assert told(1) == [] and latest.read()[0].closed
    (folder / "rank0.json").unlink()
    assert latest.read() == []


# ------------------------------------------------------------------------------------------- errors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds no run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "run holds no metrics.jsonl, recipe.yaml or activity; name the folder of a run"),
        (["run/notes.txt"], "notes.txt is a file; name the run folder"),
        (["absent"], "absent does not exist; name the run folder"),
        ([], "it needs one run folder: megarl watch RUN"),
        (["run", "--onec"], "unknown option '--onec'; did you mean --once"),
    ],
)
def test_a_wrong_folder_is_one_error(words: list[str], said: str, folder: Path) -> None:
    places = [word if word[0] == "-" else str(folder.parent / word) for word in words]
    with pytest.raises(UserError) as error:
        cli.plan(["watch", *places]).run()
    assert said in str(error.value)


def test_a_file_that_cannot_be_read_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read: Permission denied"):
        watch_command([str(run), "--once"])
