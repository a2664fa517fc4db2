"""What `tools/study_staleness.py` computes from its runs."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import study_staleness as study

from megarl.settings.config import RunConfig, read


def arguments(*words: str) -> argparse.Namespace:
    common = importlib.import_module("common")  # on the path since `study` is imported
    return common.command_line("", study.OPTIONS).parse_args(["f", *words])


def result(bound: int, seed: int, step_s: float, accuracy: list[float]) -> dict[str, Any]:
    steps = len(accuracy)
    return {
        "bound": bound, "correction": "tis" if bound else "none",
        "seed": seed, "step_s": [step_s] * steps, "tokens": [100.0] * steps, "accuracy": accuracy,
        "age": float(bound), "greedy": 0.5,
    }  # fmt: skip


def test_the_settings_of_each_case_are_accepted() -> None:
    for case in study.cases(arguments("--bounds", "0,1,4")):
        changes = [part for n, v in study.settings_of(case).items() for part in (f"--{n}", str(v))]
        config = read(RunConfig, study.RECIPES / "quickstart.yaml", changes)
        assert config.rollout.max_staleness == case["bound"]
        assert config.algorithm.correction.kind == case["correction"]


def test_the_cases_of_a_seed_follow_each_other_and_bound_0_has_no_correction() -> None:
    args = arguments("--bounds", "0,2", "--corrections", "tis,icepop", "--seeds", "3,4")
    assert [(one["seed"], one["bound"], one["correction"]) for one in study.cases(args)] == [
        (seed, bound, correction)
        for seed in (3, 4)
        for bound, correction in ((0, "none"), (2, "tis"), (2, "icepop"))
    ]


def test_accuracy_at_equal_steps_and_at_equal_time() -> None:
    slow = result(0, 1, 2.0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert study.last_quarter(slow["accuracy"]) == pytest.approx(0.75)
    # Of the first 8 s, the steps that ended after 6 s.
    assert study.at_equal_time(slow, 8.0) == pytest.approx(0.4)
    assert study.at_equal_time(slow, 16.0) == pytest.approx(0.75)
    assert study.at_equal_time(slow, 1.0) == pytest.approx(0.1)
    assert study.tokens_per_s(slow) == pytest.approx(50.0)


def test_the_table_compares_with_bound_0_of_the_same_seed(tmp_path: Path) -> None:
    found = [
        result(0, 1, 2.0, [0.0, 0.0, 0.5, 0.5]),
        result(0, 2, 4.0, [0.0, 0.0, 0.5, 0.7]),
        result(1, 1, 1.0, [0.0, 0.0, 0.4, 0.4]),
        result(1, 2, 2.0, [0.0, 0.0, 0.4, 0.6]),
    ]
    lines = "".join(json.dumps(one) + "\n" for one in found)
    (tmp_path / "results.jsonl").write_text(lines)
    args = arguments("--show")
    args.folder = tmp_path
    _, _, sync, stale = study.show(study.measure(args))
    assert sync.replace("|", " ").split() == [
        *("0", "none", "2", "1.000", "+-", "0.000", "0.000", "+-", "0.000"),
        *("0.500", "+-", "0.000", "0.600", "+-", "0.141", "0.000", "+-", "0.000"),
    ]
    stale = stale.replace("|", " ")
    assert stale.split()[3:6] == ["2.000", "+-", "0.000"]
    assert stale.split()[-6:] == ["0.500", "+-", "0.141", "0.500", "+-", "0.141"]


def test_a_mistake_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments("--corrections", "tiss")
    assert "'tiss' is not known; choose of none, tis" in capsys.readouterr().err
    with pytest.raises(ValueError, match="set it to 4 or more"):
        study.measure(arguments("--steps", "3"))
