"""What `tools/study_staleness.py` computes from its runs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import study_staleness as study

from megarl.config import RunConfig, read


def result(bound: int, seed: int, step_s: float, accuracy: list[float]) -> study.Result:
    case = study.Case(bound, "tis" if bound else "none", "ordered", seed)
    steps = len(accuracy)
    return study.Result(case, [step_s] * steps, [100.0] * steps, accuracy, float(bound), 0.5)


@pytest.mark.parametrize("dispatch", ["ordered", "windowed"])
def test_the_settings_of_each_case_are_accepted(dispatch: str) -> None:
    bounds = "0,1,4" if dispatch == "ordered" else "1,4"
    words = ["f", "--bounds", bounds, "--dispatch", dispatch]
    words += ["--corrections", "none,tis,decoupled"]
    for case in study.cases(study.arguments(words)):
        changes = [part for n, v in study.settings_of(case).items() for part in (f"--{n}", str(v))]
        config = read(RunConfig, study.RECIPES / "quickstart.yaml", changes)
        assert config.rollout.max_staleness == case.bound
        assert config.algorithm.correction.kind == case.correction


def test_the_cases_of_a_seed_follow_each_other_and_bound_0_has_no_correction() -> None:
    args = study.arguments(
        ["f", "--bounds", "0,2", "--corrections", "tis,icepop", "--seeds", "3,4"]
    )
    assert [one.name for one in study.cases(args)] == [
        f"ordered-{bound}-{correction}-seed{seed}"
        for seed in (3, 4)
        for bound, correction in ((0, "none"), (2, "tis"), (2, "icepop"))
    ]


def test_accuracy_at_equal_steps_and_at_equal_time() -> None:
    slow = result(0, 1, 2.0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert slow.at_equal_steps == pytest.approx(0.75)
    # Of the first 8 s, the steps that ended after 6 s.
    assert slow.at_equal_time(8.0) == pytest.approx(0.4)
    assert slow.at_equal_time(16.0) == pytest.approx(0.75)
    assert slow.at_equal_time(1.0) == pytest.approx(0.1)
    assert slow.tokens_per_s == pytest.approx(50.0)


def test_the_table_compares_with_bound_0_of_the_same_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        result(0, 1, 2.0, [0.0, 0.0, 0.5, 0.5]),
        result(0, 2, 4.0, [0.0, 0.0, 0.5, 0.7]),
        result(1, 1, 1.0, [0.0, 0.0, 0.4, 0.4]),
        result(1, 2, 2.0, [0.0, 0.0, 0.4, 0.6]),
    ]
    lines = "".join(json.dumps(asdict(one)) + "\n" for one in found)
    (tmp_path / "results.jsonl").write_text(lines)
    assert study.main([str(tmp_path), "--show"]) == 0
    _, sync, stale = capsys.readouterr().out.splitlines()
    assert sync.split() == [
        *("ordered", "0", "none", "2", "1.000", "+-", "0.000", "0.000", "+-", "0.000"),
        *("0.500", "+-", "0.000", "0.600", "+-", "0.141", "0.000", "+-", "0.000"),
    ]
    assert stale.split()[4:7] == ["2.000", "+-", "0.000"]
    assert stale.split()[-6:] == ["0.500", "+-", "0.141", "0.500", "+-", "0.141"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--corrections", "tiss"], "--corrections has tiss"),
        (["--bounds", "one"], "numbers such as 0,1,2"),
        (["--steps", "3"], "set it to 4 or more"),
    ],
)
def test_a_mistake_on_the_command_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        study.arguments(["f", *words])
    assert said in capsys.readouterr().err
