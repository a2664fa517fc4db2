"""What the tools that compare precisions, and megarl with TRL, on a published model compute."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import study_precision as study

from megarl.config import RunConfig, SftConfig, read


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tools/bench/e2e_real.py."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "tools" / "bench")
    return importlib.import_module("e2e_real")


def test_the_settings_of_each_precision_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(study.SFT)
    words = ["f", "--kinds", "sft,grpo", "--engines", "same,float32", "--seeds", "3"]
    found = study.cases(study.arguments(words))
    assert [one.name for one in found] == [
        "sft-float32-seed3-9steps",
        "sft-bfloat16-seed3-9steps",
        "sft-float16-seed3-9steps",
        "sft-bfloat16x2-seed3-9steps",
        "grpo-float32-float32-seed3-9steps",
        "grpo-bfloat16-bfloat16-seed3-9steps",
        "grpo-bfloat16-float32-seed3-9steps",
        "grpo-float16-float16-seed3-9steps",
        "grpo-float16-float32-seed3-9steps",
        "grpo-bfloat16x2-float32-seed3-9steps",
    ]
    for case in found:
        options = study.settings_of(case, tmp_path, tmp_path)
        changes = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        kind, recipe = (SftConfig, tmp_path / "sft.yaml")
        if case.kind == "grpo":
            kind, recipe = (RunConfig, study.RECIPES / "smollm2_arithmetic.yaml")
        assert read(kind, recipe, changes).training.precision == case.precision


def test_precisions_are_compared_with_float32_of_the_same_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learnt = {("float32", 1): 2.0, ("float32", 2): 4.0, ("bfloat16", 1): 1.0, ("bfloat16", 2): 1.0}
    found = [
        study.Result(study.Case("sft", precision, "", seed, 9), loss, 0.0, 0.5, 1.0)
        for (precision, seed), loss in learnt.items()
    ]
    lines = "".join(json.dumps(asdict(one)) + "\n" for one in found)
    (tmp_path / "results.jsonl").write_text(lines)
    assert study.main([str(tmp_path), "--show"]) == 0
    _, plain, half = capsys.readouterr().out.splitlines()
    assert "1.000 +- 0.000" in plain
    assert "1.000 +- 0.000" in half and "0.375 +- 0.177" in half


def test_the_last_number_is_the_answer(bench: Any) -> None:
    texts: list[Any] = ["3 + 4 = 7", "7, no, 8", "", "17", [{"role": "assistant", "content": "7"}]]
    assert bench.right(texts, ["7"] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_systems_are_compared_at_equal_steps_and_at_equal_time(bench: Any) -> None:
    def steps(seconds: float) -> dict[str, Any]:
        rows = [
            {"step_s": seconds, "accuracy": number / 10, "tokens": 100.0} for number in range(8)
        ]
        return {"steps": rows, "others": 0.01}

    found = bench.table({bench.SYNCHRONOUS: [steps(1.0)], "trl": [steps(2.0)]})
    ours, theirs = found[bench.SYNCHRONOUS], found["trl"]
    assert ours["samples_per_s"]["median"] == 2 * theirs["samples_per_s"]["median"] == 64
    assert ours["tokens_per_s"]["median"] == 100
    assert ours["accuracy"] == theirs["accuracy"] == ours["accuracy_at_time"]
    assert ours["accuracy"]["median"] == pytest.approx(0.65)
    # Four steps were over after the 8 s that the quicker system took.
    assert theirs["accuracy_at_time"]["median"] == pytest.approx(0.3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_settings_of_each_system_are_accepted(
    staleness: int, precision: str, bench: Any, tmp_path: Path
) -> None:
    args = bench.arguments(["--precision", precision, "--systems", "megarl"])
    options = bench.settings_of(tmp_path, tmp_path, args, 1, staleness)
    changes = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    config = read(RunConfig, bench.RECIPE, changes)
    assert config.rollout.engine.dtype == config.training.precision == precision
    assert config.rollout.max_staleness == staleness
    assert args.systems == [bench.SYNCHRONOUS, bench.OVERLAPPED]
