"""What the tools that compare precisions, and megarl with TRL, on a published model compute."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import study_precision as study

from megarl.settings.config import RunConfig, SftConfig, read


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tools/bench/e2e_real.py."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "tools" / "bench")
    return importlib.import_module("e2e_real")


def arguments(tool: Any, *words: str) -> Any:
    return importlib.import_module("common").command_line("", tool.OPTIONS).parse_args(words)


def test_the_settings_of_each_precision_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(study.RECIPE)
    args = arguments(study, "f", "--seeds", "3")
    for case in study.cases(args):
        options = study.settings_of(case, tmp_path, tmp_path) | {"folder": tmp_path}
        changes = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        config = read(SftConfig, tmp_path / "sft.yaml", changes)
        assert config.training.precision == case["precision"]


def test_precisions_are_compared_with_float32_of_the_same_seed() -> None:
    learnt = {("float32", 1): 2.0, ("float32", 2): 4.0, ("bfloat16", 1): 1.0, ("bfloat16", 2): 1.0}
    found = [
        {"precision": p, "seed": seed, "learnt": loss, "steps": 9, "changed": 0.5, "step_s": 1.0}
        for (p, seed), loss in learnt.items()
    ]
    _, _, plain, half = study.show({"results": found})
    assert "1.000 +- 0.000" in plain and "0.375 +- 0.177" in half


def test_the_last_number_is_the_answer(bench: Any) -> None:
    texts: list[Any] = ["3 + 4 = 7", "7, no, 8", "", "17", [{"role": "assistant", "content": "7"}]]
    assert importlib.import_module("e2e_task").right(texts, ["7"] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_systems_are_compared_at_equal_steps(bench: Any) -> None:
    def steps(seconds: float) -> dict[str, Any]:
        rows = [
            {"step_s": seconds, "accuracy": number / 10, "tokens": 100.0, "samples": 64}
            for number in range(8)
        ]
        return {"steps": rows, "others": 0.01}

    found = bench.rows_of({bench.SYNCHRONOUS: [steps(1.0)], "TRL": [steps(2.0)]})
    ours, theirs = found[bench.SYNCHRONOUS], found["TRL"]
    assert ours["samples_per_s"]["median"] == 2 * theirs["samples_per_s"]["median"] == 64
    assert ours["tokens_per_s"]["median"] == 100
    assert ours["accuracy"] == theirs["accuracy"]
    assert ours["accuracy"]["median"] == pytest.approx(0.65)


@pytest.mark.parametrize("system", ["megarl", "megarl-staleness-1"])
def test_the_settings_of_each_system_are_accepted(system: str, bench: Any, tmp_path: Path) -> None:
    args = arguments(bench)
    options = bench.settings_of(tmp_path, args, 1, system) | {"folder": tmp_path}
    changes = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    config = read(RunConfig, bench.RECIPE, changes)
    assert config.rollout.engine.dtype == config.training.precision == "float32"
    assert config.rollout.max_staleness == int(system == bench.OVERLAPPED)
