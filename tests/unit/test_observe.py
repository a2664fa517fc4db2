"""What a run writes down comes back as it was, is not doubled on resume, and makes a page whatever
the model wrote.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.documented import undocumented
from support.report_page import Page

import megarl
from megarl.apps.runs import report
from megarl.apps.runs.report import main as report_command
from megarl.apps.runs.report import write_report
from megarl.checkpoints.run_files import check_run_files
from megarl.errors import UserError
from megarl.observe.live_report import LiveReport
from megarl.observe.observer import Observer, shown_metrics
from megarl.observe.provenance import checkout, made_by, without_values
from megarl.observe.sinks import read_records
from megarl.observe.summary import read_run, read_starts, summary
from megarl.settings.observe import (
    DISTILLATION_METRICS,
    EVALUATION_METRICS,
    STEP_METRICS,
    ObserveConfig,
)
from megarl.types import StepReport

QUIET = ObserveConfig(tensorboard=False, progress=False)
WEIRD = (
    'a</pre><script>alert(1)</script><img src=x onerror=alert(2)> "quoted" & \x00\x1b[31m \u202e'
    " \ud83d 你好 🎉 ﷽\r\n\u2028end"
)


def numbers(step: int, total: int) -> dict[str, float]:
    done = step / max(total - 1, 1)
    return {
        "reward/mean": 2 * done - 1, "accuracy": done, "length/mean": 18 + 13 * done,
        "length/truncated_share": 0.01, "time/step_s": 1.0, "time/rollout_s": 0.8,
        "time/wait_s": 0.5, "time/train_s": 0.4, "time/publish_s": 0.02,
        "tokens/generated_per_s": 20000.0 + step, "tokens/trained_per_s": 25000.0,
        "loss": math.sin(step), "grad_norm": 0.5, "mismatch/mean_abs": 1e-6,
        "mismatch/max_abs": 3e-5 * (1 + step % 3), "probe/max_abs": 0.0, "staleness/max": 1.0,
        "critics.b/loss": 0.25,
    }  # fmt: skip


def answer(correct: bool, prompt: str = "347+589=", response: str = "#936") -> dict[str, Any]:
    told = {"prompt": prompt, "answer": "936", "response": response}
    return told | {"correct": correct, "reward": 1.0, "tokens": 5}


def write_run(folder: Path, steps: int, *, evaluated: bool = True) -> None:
    with Observer(QUIET, folder, total_steps=steps) as observer:
        if evaluated:
            before = {"eval/accuracy": 0.174, "eval/length/mean": 18.0}
            observer.evaluation(0, before, [answer(False)])
            sampled = [answer(True, response="sampled")]
            observer.evaluation(0, {"eval_sampled/accuracy": 0.2}, sampled)
        for step in range(steps):
            observer.step(StepReport(step, numbers(step, steps)))
        if evaluated:
            after = {"eval/accuracy": 0.994, "eval/length/mean": 31.5}
            observer.evaluation(steps, after, [answer(True, response="7+9+0=16#936")])


def observe(folder: Path, steps: Iterable[dict[str, Any]]) -> None:
    """A run whose steps have these metrics."""
    steps = list(steps)
    with Observer(QUIET, folder, total_steps=len(steps)) as observer:
        for number, metrics in enumerate(steps):
            observer.step(StepReport(number, metrics))


def page_of(folder: Path, title: str = "A run") -> Page:
    return Page(write_report(folder, title=title).read_text(encoding="utf-8"))


# The observer


def test_resume_of_all_files(tmp_path: Path) -> None:
    group = {"ordinal": 0, "prompt": "p", "answer": "a", "rollouts": []}

    def go(first: int, last: int) -> None:
        with Observer(QUIET, tmp_path, total_steps=6, first_step=first) as observer:
            if first == 0:
                observer.evaluation(0, {"eval/accuracy": 0.0}, [])
            for step in range(first, last):
                observer.step(StepReport(step, {"loss": 1.0}))
                observer.transcripts(step, [group] * 5)
                observer.evaluation(step + 1, {"eval/accuracy": step / 10}, [])

    def steps(name: str) -> list[int]:
        return [record["step"] for record in read_records(tmp_path / name)]

    go(0, 5)
    go(3, 6)  # the checkpoint was after 3 steps; its evaluation stays
    assert steps("metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    assert steps("evaluations.jsonl") == [0, 1, 2, 3, 4, 5, 6]
    assert steps("transcripts.jsonl") == sorted([1, 2, 3, 4, 5, 6] * 2)
    assert steps("provenance.jsonl") == [0, 3]
    with Observer(QUIET, tmp_path, total_steps=6, first_step=4) as observer:
        assert observer.evaluated(4, "eval") == {"eval/accuracy": 0.3}
        assert observer.evaluated(4, "eval_sampled") is None
        assert observer.evaluated(5, "eval") is None, "of a step that is trained again"
    go(0, 1)  # died before its first checkpoint: all anew
    assert (steps("metrics.jsonl"), steps("evaluations.jsonl")) == ([1], [0, 1])
    assert steps("provenance.jsonl") == [0]


def test_a_run_tells_who_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/usr/bin/python", "-m", "megarl", "run", "r.yaml", "--hub_token", "hunter2"]
    monkeypatch.setattr(sys, "orig_argv", words)
    made_by.cache_clear()
    write_run(tmp_path, 2)
    made_by.cache_clear()
    (start,) = read_starts(tmp_path)
    assert start["command"] == "python -m megarl run r.yaml --hub_token ..."
    assert start["megarl"] == megarl.__version__ and start["torch"] and start["host"]
    assert start.get("commit", "") == checkout()
    assert datetime.fromisoformat(start["started"]).utcoffset() is not None
    page = page_of(tmp_path)
    assert "Made by" in page.text and start["command"] in page.text and "hunter2" not in page.text
    (tmp_path / "provenance.jsonl").write_text("no JSON\n")
    check_run_files(tmp_path, None)
    assert "provenance.jsonl, line 1 is not JSON" in page_of(tmp_path).text
    with Observer(QUIET, tmp_path, total_steps=3, first_step=2):
        lines = (tmp_path / "provenance.jsonl").read_text().splitlines()
    assert lines[0] == "no JSON" and json.loads(lines[1])["step"] == 2, "a resumed run adds its own"
    write_run(tmp_path, 2)
    assert [one["step"] for one in read_starts(tmp_path)] == ["0"], "a new run begins anew"


def test_no_value_of_the_command_line_is_written_down() -> None:
    words = ["python", "-u", "-m", "megarl", "run", "my/r.yaml", "x1", "--a.key[0]={k: x1}"]
    words += ["--b", "{k: x1}", "--c", "x1", "x1", "--d", "-x1", "--e=https://u:p@h", "B: x1"]
    told = " ".join(without_values(words))
    assert told.partition(" ... ") == (
        "python -u -m megarl run my/r.yaml",
        " ... ",
        "--a.key[0]=... --b ... --c ... ... --d ... --e=... ...",
    )
    code = without_values(["python", "-c", "import x1", "--steps=3"])
    assert code == ["python", "-c", "...", "--steps=..."]


def test_a_page_says_what_each_metric_means() -> None:
    """A whole run's names are looked for in tests/system/test_layout_runs.py."""
    assert not undocumented(STEP_METRICS + DISTILLATION_METRICS)
    assert not undocumented(f"eval/{name}" for name in EVALUATION_METRICS)
    assert undocumented(["reward/median"]) == {"reward/median"}


def test_evaluation_names_are_checked(tmp_path: Path) -> None:
    raises = pytest.raises(ValueError, match="accuracy")
    with Observer(QUIET, tmp_path, total_steps=1) as observer, raises:
        observer.evaluation(0, {"accuracy": 1.0}, [])


def test_progress_without_a_terminal_is_a_few_plain_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Observer(ObserveConfig(tensorboard=False), tmp_path, total_steps=50) as observer:
        metrics = {"loss": 1.5, "tokens/trained_per_s": 25000.0, "learning_rate": 1e-4}
        for step in range(50):
            observer.step(StepReport(step, metrics))
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert len(lines) == 2
    assert lines[0].startswith("step 1/50  loss 1.5000  25,000 tokens/s")
    assert "\r" not in captured.err


def test_progress_on_a_terminal_is_a_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    config = ObserveConfig(tensorboard=False)
    with Observer(config, tmp_path, total_steps=3, first_step=1) as observer:
        for step in (1, 2):
            observer.step(StepReport(step, numbers(step, 3)))
        observer.evaluation(3, {"eval/accuracy": 0.5}, [])
    err = capsys.readouterr().err
    assert "3/3" in err
    assert "accuracy 100.0%" in err
    assert "evaluation after 3 steps" in err


def test_shown_tolerates_missing_and_null() -> None:
    assert shown_metrics({}) == ""
    assert shown_metrics({"reward/mean": 0.25, "accuracy": None, "loss": 3.0}) == "reward +0.250"
    assert shown_metrics({"length/truncated_share": 0.005}) == ""
    assert shown_metrics({"length/truncated_share": 0.88}) == "cut off 88%"


# Summary


def test_summary_of_evaluations(tmp_path: Path) -> None:
    write_run(tmp_path, 4)
    assert summary(tmp_path) == {
        "accuracy_before": 0.174, "accuracy_after": 0.994, "length_before": 18.0,
        "length_after": 31.5, "measured_on": "evaluation", "steps": 4, "seconds": 4.0,
        "generated_tokens_per_s": 20001.5, "trained_tokens_per_s": 25000.0,
        "step_over_longer_part": None,  # the first five steps warm up
    }  # fmt: skip


def test_overlap_is_time_over_that_of_the_longer_part(tmp_path: Path) -> None:
    write_run(tmp_path, 11, evaluated=False)
    told = summary(tmp_path)
    assert told["step_over_longer_part"] == pytest.approx(1.0 / 0.8)
    assert (told["measured_on"], told["accuracy_before"], told["accuracy_after"]) == (
        "rollouts", pytest.approx(0.2), pytest.approx(0.8)
    )  # fmt: skip


def test_summary_does_not_invent_a_change(tmp_path: Path) -> None:
    with Observer(QUIET, tmp_path, total_steps=1) as observer:
        observer.step(StepReport(0, {"loss": 1.0}))
        observer.evaluation(1, {"eval/accuracy": 0.5}, [])
    told = summary(tmp_path)
    assert (told["accuracy_before"], told["accuracy_after"], told["seconds"]) == (None, 0.5, None)


def test_rates_are_tokens_over_time(tmp_path: Path) -> None:
    pairs = ((100.0, 3.0), (200.0, 1.0))
    observe(tmp_path, ({"tokens/generated_per_s": n, "time/rollout_s": s} for n, s in pairs))
    assert summary(tmp_path)["generated_tokens_per_s"] == 125.0


def test_read_run_keeps_greedy_transcripts_of_both_ends_only(tmp_path: Path) -> None:
    with Observer(QUIET, tmp_path, total_steps=3) as observer:
        for step in range(4):
            for name, said in (("eval", f"greedy {step}"), ("eval_sampled", "sampled")):
                observer.evaluation(step, {f"{name}/accuracy": 0.5}, [answer(True, response=said)])
    evaluations = read_run(tmp_path).evaluations
    owned = [[one["response"] for one in found.transcripts] for found in evaluations]
    assert owned == [["greedy 0"], [], [], ["greedy 3"]]


# Charts and report


def test_charts_hold_the_numbers_of_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    accuracy = page_of(tmp_path).charts["Accuracy"]
    assert (accuracy["span"], accuracy["percent"], accuracy["wide"]) == ([0, 1], True, True)
    found = {one["label"]: (one["steps"], *one["rows"]) for one in accuracy["series"]}
    assert found == {
        "rollouts": ([1, 2, 3], [0.0, 0.5, 1.0]),
        "held out, sampled": ([0], [0.2]),
        "held out, greedy": ([0, 3], [0.174, 0.994]),
    }
    critic = page_of(tmp_path).charts["Critic's loss (critics.b)"]
    assert critic["series"][0]["rows"] == [[0.25] * 3]
    series = page_of(tmp_path).charts["Time of a step"]["series"]
    assert [one["rows"][0][0] for one in series] == [0.5, 0.4, 0.02, 0.8, 1.0]


def test_charts_of_long_runs_are_small_and_keep_spikes(tmp_path: Path) -> None:
    norms, gaps = {500: 9.0, 700: math.nan}, {300: 0.5}
    observe(tmp_path, (
        {"grad_norm": norms.get(step, 1.0), "mismatch/max_abs": gaps.get(step, 1e-5),
         "entropy": float(step % 2)} for step in range(1007)
    ))  # fmt: skip
    charts = page_of(tmp_path).charts
    (norm,) = charts["Gradient norm"]["series"]
    assert len(norm["spikes"]) == len(norm["rows"][0]) == len(norm["steps"]) <= report.DRAWN
    assert max(norm["spikes"]) == 9.0 and None not in norm["spikes"]
    assert max(charts["Do trainer and engine agree?"]["series"][0]["rows"][0]) == 0.5
    assert charts["Entropy"]["series"][0]["rows"][0][50] == pytest.approx(0.5, abs=0.2)
    assert (norm["steps"][:2], norm["each"]) == ([2, 5], 3) and norm["steps"][-1] <= 1007


def test_own_metrics_come_first(tmp_path: Path) -> None:
    names = ["own/a", "environment/b", *(f"own/m{number:02d}" for number in range(60))]
    observe(tmp_path, [dict.fromkeys([*names, "accuracy", "source/x/accuracy"], 0.5)] * 2)
    titles = list(page_of(tmp_path).charts)
    assert titles[:2] == ["a", "m00"] and titles[report.MOST_OWN :] == [
        "Accuracy", "Accuracy by source"
    ]  # fmt: skip


def test_report_has_everything(tmp_path: Path) -> None:
    write_run(tmp_path, 60)
    (tmp_path / "recipe.yaml").write_text("seed: 5\n")
    page = page_of(tmp_path, "Sums <with> carries")
    shown = ("17.4% → 99.4%", "18.0 → 31.5", "1 min 00 s", "25,000 tokens/s", "seed: 5")
    for text in (*shown, "Sums <with> carries", "before training", "right"):
        assert text in page.text, text
    assert page.count("figure", "chart") >= 8
    assert page.count("details", "problem") == 1
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


def test_report_loads_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    page = page_of(tmp_path)
    loading = {"src", "href", "srcset", "onerror", "onload"}
    assert not [attrs for _, attrs in page.seen if loading & set(attrs)]
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.seen}
    metas = [attrs for tag, attrs in page.seen if tag == "meta"]
    policies = [attrs["content"] for attrs in metas if "http-equiv" in attrs]
    assert len(policies) == 1
    assert "default-src 'none'" in (policies[0] or "")


def test_text_of_the_model_is_only_text(tmp_path: Path) -> None:
    with Observer(QUIET, tmp_path, total_steps=1) as observer:
        observer.step(StepReport(0, {f"environment/{WEIRD}": 1.0, "accuracy": 0.5}))
        weird = [answer(True, WEIRD, WEIRD) | {"answer": WEIRD}]
        for step in (0, 1):
            observer.evaluation(step, {"eval/accuracy": 0.5}, weird)
    (tmp_path / "recipe.yaml").write_bytes(b"name: </pre><script>alert(3)</script>\xff")
    page = page_of(tmp_path, WEIRD)
    assert page.charts[WEIRD]["series"][0]["rows"] == [[1.0]]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not [one for one in ("<script>alert", "<img", "\x00", "\x1b") if one in text]
    assert "你好 🎉 ﷽" in page.text
    assert text.count("<script>") == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
@pytest.mark.parametrize("evaluated", [False, True])
def test_report_of_short_runs(tmp_path: Path, steps: int, evaluated: bool) -> None:
    write_run(tmp_path, steps, evaluated=evaluated)
    page = page_of(tmp_path)
    assert (page.count("figure", "chart") > 0) == (evaluated or steps > 0)


def test_report_of_supervised_training(tmp_path: Path) -> None:
    with Observer(QUIET, tmp_path, total_steps=30) as observer:
        for step in range(30):
            values = {"loss": 3 / (1 + step), "tokens/trained_per_s": 25e3}
            values |= {"learning_rate": math.nan if step == 1 else 3e-3, "grad_norm": math.nan}
            observer.step(StepReport(step, values))
        observer.evaluation(30, {"eval/loss": 0.25}, [])
    page = page_of(tmp_path)
    assert page.charts["Learning rate"]["series"][0]["rows"][0][:3] == [3e-3, None, 3e-3]
    assert page.charts["Training loss"]["series"][-1]["rows"] == [[0.25]]
    assert page.count("figure", "wide") == 1
    # Loss, throughput, learning rate; the norm was never finite.
    assert page.count("figure", "chart") == 3
    assert "Accuracy" not in page.text


def test_report_shows_rollouts_of_training(tmp_path: Path) -> None:
    always = {"tokens": 5, "finish": "stop", "versions": [[0, 5]]}
    rollouts = [
        {"response": f"#93{i}", "reward": float(i), "correct": i > 0, **always} for i in range(2)
    ]
    with Observer(QUIET, tmp_path, total_steps=3) as observer:
        for step in range(3):
            observer.step(StepReport(step, {"accuracy": 0.5}))
            group = {"ordinal": step, "prompt": f"p{step}", "answer": "931", "rollouts": rollouts}
            observer.transcripts(step, [group])
    page = page_of(tmp_path)
    assert page.count("details", "problem") == 6
    assert all(name in page.text for name in ("p0", "p1", "p2"))


def test_the_page_stays_small_however_much_a_run_writes(tmp_path: Path) -> None:
    """Most characters of a hostile text take five in HTML; there are many turns, steps and metrics."""
    hostile = "<'\"&" * 1500
    turns = [{"by": "model", "text": hostile, "tokens": 1}] * 50
    one = answer(True, hostile, hostile) | {"turns": turns, "answer": hostile, "detail": hostile}
    names = [f"own/{number}" for number in range(50)]
    with Observer(QUIET, tmp_path, total_steps=600) as observer:
        for step in range(600):
            observer.step(StepReport(step, numbers(step, 600) | dict.fromkeys(names, step / 7)))
            if step % 200 == 0:
                group = {"prompt": hostile, "answer": "", "environment": hostile}
                observer.transcripts(step, [group | {"rollouts": [one] * 4}])
        for step in (0, 600):
            short = [answer(step > 0, f"{number}", "x" * 900) for number in range(1000)]
            observer.evaluation(step, {"eval/accuracy": 0.5}, [one, *short])
    page = page_of(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 4 * 2**20
    assert page.count("details", "problem") > 300 and "of 1,001" in page.text


def test_zeros_on_the_logarithmic_chart_are_said(tmp_path: Path) -> None:
    observe(tmp_path, [{"mismatch/max_abs": 0.0}] * 2)
    assert "every one of these is exactly 0" in page_of(tmp_path).text


def test_the_report_is_written_as_the_run_goes(tmp_path: Path) -> None:
    with Observer(QUIET, tmp_path, total_steps=2) as observer:
        live = LiveReport(tmp_path, every_s=0.0)
        observer.step(StepReport(0, numbers(0, 2)))
        live.refresh()
        first = (tmp_path / "report.html").read_text()
        live.refresh()  # too early: it would take more than a fiftieth of the time
        assert (tmp_path / "report.html").read_text() == first


def test_the_report_command_writes_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, 2)
    assert report_command([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 0
    with pytest.raises(UserError):
        report_command([str(tmp_path / "none")])


QUICKSTART = {
    "groups/drawn": 36.45, "groups/rejected": 20.8, "accuracy": 0.96, "clip_share": 0.0016,
    "length/truncated_share": 0.0125, "mismatch/mean_abs": 0.0152, "skipped_steps": 0.0,
    "mismatch/outside_share": 0.0107, "correction/clipped_share": 0.001, "verifier/errors": 0,
}  # fmt: skip
"""Means of the quick start's last 20 steps (groups and accuracy), and its largest values."""
UNUSUAL = {
    "groups/rejected": (20.0, "20 steps 400 of 729 groups were rejected: "),
    "length/truncated_share": (0.5, "50% of the responses were cut off: raise the limit"),
    "verifier/nans": (1.0, "20 rollouts could not be judged"),
    "skipped_steps": (1.0, "20 optimizer steps were skipped"),
    "clip_share": (0.21, "21% of the tokens were clipped"),
    "mismatch/mean_abs": (0.06, "differ by 0.06 in the mean"),
    "mismatch/outside_share": (0.06, "engines gave 6% of the tokens another probability"),
    "staleness/max": (2.0, "the oldest rollouts were 2 versions old"),
    "correction/dropped_share": (0.06, "dropped or clipped 6% of the weights"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_in_the_last_steps_is_said_at_the_top(name: str, tmp_path: Path) -> None:
    value, sentence = UNUSUAL[name]
    unsolved = {"accuracy": 0.5, "groups/rejected": 18.0}
    usual = QUICKSTART | (unsolved if name == "groups/rejected" else {})
    changed = usual | {name: value}
    observe(tmp_path, [*[changed] * 5, *[usual] * 20])
    recipe = {"rollout": {"max_staleness": 1, "engine": {"dtype": "bfloat16"}}}
    recipe |= {"training": {"precision": "float32"}}
    (tmp_path / "recipe.yaml").write_text(str(recipe))
    assert report.warnings(read_run(tmp_path), recipe) == [], "long ago"
    observe(tmp_path, [*[usual] * 20, *[changed] * 20])
    (told,) = report.warnings(read_run(tmp_path), recipe)
    assert sentence in told and told in page_of(tmp_path).text
    assert len(UNUSUAL) == report.WARNINGS.read_text().count("- sum:")


def test_verifier_failures_are_shown_as_what_they_are(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    assert "Verifier " not in page_of(tmp_path).text
    failed = answer(False) | {"failure": "error", "detail": "TypeError: takes <1> argument"}
    with Observer(QUIET, tmp_path, total_steps=2) as observer:
        observer.evaluation(0, {"eval/accuracy": 0.0}, [failed])
        for step in range(2):
            observer.step(StepReport(step, numbers(step, 2) | {"verifier/errors": 16.0}))
    text = page_of(tmp_path).text
    assert "Verifier failures" in text and "Verifier errors\n32 rollouts" in text
    assert "not judged" in text and "verifier error: TypeError: takes <1> argument" in text
    assert "\N{BALLOT X} wrong" not in text
