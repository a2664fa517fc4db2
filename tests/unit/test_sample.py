"""Which of a prompt's responses become rows of a data set."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megarl.apps.tune.sample import KEEP, write


def record(response: str, reward: float, finish: str = "stop") -> dict[str, Any]:
    return {
        "prompt": "1+1=", "answer": "2", "response": response, "reward": reward, "finish": finish,
    }  # fmt: skip


GROUP = [
    record("3", 0.0), record("", 5.0), record("2", 1.0), record("222", 4.0, "length"),
    record("2!", 1.0), record("000", -1.0, "length"),
]  # fmt: skip


def texts(keep: str, group: list[dict[str, Any]], least: float = -math.inf) -> list[Any]:
    rows = list(KEEP[keep](group, least))
    return [
        (row["chosen"], row["rejected"]) if keep == "pairs" else row["response"] for row in rows
    ]


def test_only_whole_responses_are_imitated() -> None:
    assert texts("best", GROUP) == ["2"], "the first of the best; neither empty nor cut off"
    assert texts("all", GROUP) == ["2", "2!", "3"]
    assert texts("pairs", GROUP) == [("2", "000")], "a response that was cut off may be the worst"


def test_the_least_reward() -> None:
    assert texts("best", GROUP, 2.0) == []
    assert texts("all", GROUP, 0.5) == ["2", "2!"]
    assert texts("pairs", GROUP, 2.0) == []


@pytest.mark.parametrize("keep", KEEP)
def test_nothing_to_keep(keep: str) -> None:
    assert texts(keep, [record("", 1.0), record("12", 1.0, "length")]) == []


def test_pairs_need_a_difference() -> None:
    assert texts("pairs", [record("2", 1.0), record("2", 0.0), record("3", 1.0)]) == []
    assert texts("pairs", [record("2", 1.0), record("2", 0.0), record("3", 0.5)]) == [("2", "3")]
    (row,) = KEEP["pairs"]([record("2", 1.0), record("3", -0.5)], -math.inf)
    assert row["margin"] == 1.5


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", json.dumps({"a": "é"}) + "\n")
    assert [one.name for one in tmp_path.iterdir()] == ["data.jsonl"]
