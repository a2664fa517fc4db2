"""Every file and sink gives back what it was given; of transcripts in parts nothing is lost at a
boundary or a resume, and old parts go.
"""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import UserError
from megarl.observe import rotated
from megarl.observe.observer import Observer
from megarl.observe.rotated import RotatedFile, parts_of, spread
from megarl.observe.sinks import MetricsFile, read_records
from megarl.settings.observe import ObserveConfig
from megarl.types import StepReport

WEIRD = 'a</pre> "quoted" & \x00\x1b[31m \u202e \ud83d 你好 🎉\r\n\u2028end'


def test_metrics_file_round_trip(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "deep" / "metrics.jsonl")
    given = {"a": 0.1 + 0.2, "nan": math.nan, "inf": -math.inf, "text": WEIRD}
    file.write(0, given | {"numpy": np.float32(0.5), "list": [math.nan]})
    # Flushed, and strict JSON, before it is closed.
    line = (tmp_path / "deep" / "metrics.jsonl").read_text(encoding="utf-8")
    record = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    file.close()
    wanted = {"step": 0, "a": 0.1 + 0.2, "nan": None, "inf": None, "text": WEIRD}
    assert record == wanted | {"numpy": 0.5, "list": [None]}


def test_resume_drops_later_lines_and_a_torn_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(6):
        file.write(step, {"x": step / 3, "text": WEIRD})
    file.close()
    with path.open("a") as torn:
        torn.write('{"step": 6, "x"')
    before = path.read_bytes().splitlines(keepends=True)
    resumed = MetricsFile(path, keep_until_step=3)
    resumed.write(4, {"x": -1.0})
    resumed.close()
    kept = path.read_bytes().splitlines(keepends=True)[:4]
    assert kept == before[:4], "what stays is the same to the byte"
    assert [record["step"] for record in read_records(path)] == [0, 1, 2, 3, 4]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert f"megarl: {path}: cutting off a torn line of 15 bytes" in capsys.readouterr().err


def test_tensorboard_reads_back_without_doubles(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = ObserveConfig(progress=False)
    with Observer(config, tmp_path, total_steps=6) as observer:
        observer.evaluation(3, {"eval/accuracy": 0.25}, [])
        for step in range(5):
            observer.step(StepReport(step, {"loss": float(step), "nan": math.nan}))
    with Observer(config, tmp_path, total_steps=6, first_step=3) as observer:
        for step in range(3, 6):
            observer.step(StepReport(step, {"loss": 10.0 * step}))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {name: [(one.step, one.value) for one in events.Scalars(name)]
             for name in ("loss", "eval/accuracy")}  # fmt: skip
    assert found["loss"] == [(1, 0), (2, 1), (3, 2), (4, 30), (5, 40), (6, 50)]
    assert found["eval/accuracy"] == [(3, 0.25)]
    assert "nan" not in events.Tags()["scalars"]


def test_wandb_is_given_finite_numbers_and_a_resumed_run_its_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Any] = []
    log = lambda metrics, step: calls.append((step, metrics))  # noqa: E731
    run = types.SimpleNamespace(id="4k2p", log=log, finish=lambda: calls.append("finish"))
    fake: Any = types.SimpleNamespace(init=lambda **how: calls.append(how) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = ObserveConfig(wandb_project="mine", tensorboard=False)
    folder, recipe = tmp_path / "run-5", {"seed": 5}
    with Observer(config, folder, total_steps=9, resolved=recipe) as observer:
        observer.step(StepReport(1, {"loss": 1.0, "grad_norm": math.nan}))
    about = {"project": "mine", "config": {"seed": 5}, "name": "run-5"}
    assert calls == [about, (2, {"loss": 1.0}), "finish"]
    calls.clear()
    for first_step in (0, 0, 4):
        Observer(config, tmp_path, total_steps=9, first_step=first_step).close()
    ids = [how.get("id") for how in calls if isinstance(how, dict)]
    assert ids == [None, None, "4k2p"] and calls[4]["resume"] == "allow"


def test_mlflow_reads_back_a_resumed_run_and_may_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    client, folder = mlflow.MlflowClient(), tmp_path / "run-5"
    config = ObserveConfig(mlflow_experiment="mine", tensorboard=False)
    recipe = {"seed": 5, "critics": {"one (1)": {"path": "x" * 9000}}}
    with Observer(config, folder, total_steps=9, resolved=recipe) as observer:
        observer.step(StepReport(1, {"loss": 1.0, "grad_norm": math.nan, "environment/(a)": 2.0}))
    with Observer(config, folder, total_steps=9, first_step=2, resolved=recipe) as observer:
        observer.evaluation(2, {"eval/accuracy": 0.5}, [])
        observer.step(StepReport(2, {"loss": 3.0}))
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run-5", "FINISHED")
    assert run.data.params == {"seed": "5", "critics.one _1_.path": "x" * 6000}
    assert run.data.metrics == {"loss": 3.0, "environment/_a_": 2.0, "eval/accuracy": 0.5}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(2, 1.0), (3, 3.0)]
    capsys.readouterr()
    with Observer(config, folder, total_steps=9, first_step=3) as observer:
        client.delete_run(run.info.run_id)
        for step in (3, 4):
            observer.step(StepReport(step, {"loss": 4.0}))
    assert capsys.readouterr().err.count("no longer go to MLflow, which fails: ") == 1
    assert len(list(read_records(folder / "metrics.jsonl"))) == 4, "the run goes on"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match=r"'mine', but MLflow fails .*MLFLOW_TRACKING_URI"):
        Observer(config, tmp_path / "other", total_steps=9)


def test_trackio_reads_back_and_a_resumed_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read at import
    trackio = pytest.importorskip("trackio", reason="trackio is not installed: pip install trackio")
    config = ObserveConfig(trackio_project="mine", tensorboard=False)
    folder, recipe = tmp_path / "run-5", {"seed": 5, "critics": {"one": {"path": "x"}}}
    for first_step in (0, 2, 0):
        with Observer(
            config, folder, total_steps=9, first_step=first_step, resolved=recipe
        ) as observer:
            observer.evaluation(first_step, {"eval/accuracy": 0.5}, [])
            observer.step(StepReport(first_step, {"loss": 1.0, "grad_norm": math.nan}))
    runs = list(trackio.Api().runs("mine"))
    assert [run.name for run in runs] == ["run-5", "run-5"] and runs[0].id != runs[1].id
    assert runs[0].config["critics"] == {"one": {"path": "x"}}
    logs = [
        trackio.sqlite_storage.SQLiteStorage.get_logs("mine", "run-5", run_id=run.id)
        for run in runs
    ]
    both = {"eval/accuracy", "loss", "grad_norm"}
    found = sorted([(one["step"], *(both & set(one))) for one in log] for log in logs)
    once = [(0, "eval/accuracy"), (1, "loss")]
    assert found == [once, [*once, (2, "eval/accuracy"), (3, "loss")]]


FILE = "transcripts.jsonl"


def everything(path: Path) -> list[dict[str, Any]]:
    """The records of all parts in order."""
    places = [*(part.path for part in parts_of(path)), path]
    return [record for place in places for record in read_records(place)]


@settings(max_examples=60, deadline=None)
@given(
    part_bytes=st.integers(1, 400),
    starts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=5),
    per_step=st.integers(1, 3),
)
def test_a_run_of_several_starts(
    part_bytes: int, starts: list[tuple[int, int]], per_step: int, tmp_path_factory: Any
) -> None:
    """Each start goes on from a step at or before the newest, and writes some steps."""
    path, wanted, done = tmp_path_factory.mktemp("run") / FILE, list[dict[str, Any]](), 0
    for number, (back, steps) in enumerate(starts):
        done = max(0, done - back)
        wanted = [record for record in wanted if record["step"] <= done]
        file = RotatedFile(path, keep_until_step=done, most_bytes=10**9, part_bytes=part_bytes)
        assert everything(path) == wanted
        for step in range(done + 1, done + steps + 1):
            for index in range(per_step):
                record = {"start": number, "index": index, "text": "x" * 20}
                file.write(step, record)
                wanted.append({"step": step} | record)
        file.close()
        done += steps
    assert everything(path) == wanted
    for part in parts_of(path):
        steps_of = [record["step"] for record in read_records(part.path)]
        assert (min(steps_of), max(steps_of)) == (part.first, part.last)
    assert spread(path) == wanted
    # Of files that are too large to read: whole records, in order, of steps from the first to the
    # last one.
    found = spread(path, most_bytes=len(wanted) * 20)
    assert all(record in wanted for record in found)
    steps_of = [record["step"] for record in found]
    assert steps_of == sorted(steps_of)
    assert steps_of[:1] + steps_of[-1:] == [one["step"] for one in wanted[:1] + wanted[-1:]]


def test_of_large_files_little_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RotatedFile(tmp_path / FILE, keep_until_step=0, most_bytes=10**9, part_bytes=10**6)
    for step in range(1, 2001):
        for index in range(2):
            file.write(step, {"index": index, "text": "x" * 1000})
    file.close()
    parsed, parse = [], rotated.parse_json
    monkeypatch.setattr(rotated, "parse_json", lambda line: parsed.append(len(line)) or parse(line))
    found = spread(tmp_path / FILE, most_bytes=320_000)
    assert sum(parsed) < 500_000 < sum(one.stat().st_size for one in tmp_path.iterdir()) / 8
    steps = sorted({record["step"] for record in found})
    assert steps[0] == 1 and steps[-1] == 2000 and len(steps) == rotated.PLACES
    assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) < 2 * 2000 / rotated.PLACES
    assert all([one["step"] for one in found].count(step) == 2 for step in steps), "whole steps"


def test_of_too_many_parts_the_first_and_the_newest_stay(tmp_path: Path) -> None:
    path = tmp_path / FILE
    file = RotatedFile(path, keep_until_step=0, most_bytes=500, part_bytes=100)
    for step in range(1, 41):
        file.write(step, {"text": "x" * 80})
    file.close()
    parts = parts_of(path)
    assert parts[0].first == 1 and parts[-1].last == 39
    assert sum(part.path.stat().st_size for part in parts) <= 600
    steps = [record["step"] for record in spread(path, most_bytes=32)]
    assert (steps[0], steps[-1]) == (1, 40)
    # A run that goes on from a removed part keeps what is left before it.
    RotatedFile(path, keep_until_step=5, most_bytes=500, part_bytes=100).close()
    assert [record["step"] for record in everything(path)] == [1]
