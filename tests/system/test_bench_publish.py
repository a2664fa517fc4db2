"""The publishing benchmark runs, at a tiny size, and the bytes it counts are those of the
arithmetic. Nothing is timed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "publish.py"
WORDS, HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS = 8192, 128, 256, 2, 16, 8
"""Of --shape tiny, which is tied."""
ROUNDS = 2


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=240
    )


def numel() -> tuple[int, int]:
    """Elements that tensor ranks share, and that each has whole."""
    keys = HIDDEN * KEY_HEADS // HEADS
    cut = 2 * HIDDEN * HIDDEN + HIDDEN + 2 * (HIDDEN * keys + keys) + 3 * HIDDEN * INNER
    return WORDS * HIDDEN + LAYERS * cut, LAYERS * 2 * HIDDEN + HIDDEN


COLOCATED = ("data 1 tensor 1 zero 0", 1, 1)
"""What --device cuda measures on one GPU."""
CASES = [
    pytest.param(*COLOCATED, marks=pytest.mark.nightly),
    ("data 2 tensor 1 zero 3", 1, 1),
    pytest.param("data 1 tensor 2 zero 0", 1, 2, marks=pytest.mark.nightly),
    pytest.param("data 1 tensor 1 zero 0", 2, 1, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("layout", "engines", "tensor"), CASES)
def test_bytes_are_the_planned_ones(layout: str, engines: int, tensor: int) -> None:
    sizes = f"--shape tiny --rounds {ROUNDS} --bucket-mib 1".split()
    degrees = ["--layout", layout, "--engines", str(engines), "--engine-tensor", str(tensor)]
    done = start("--json", *sizes, *degrees)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    (case,) = found["cases"]
    shared, whole = numel()
    held = 2 * (shared + tensor * whole)
    assert case["parameters"] == shared + whole and case["engine_bytes"] == held
    rows: dict[str, list[Any]] = {}
    for row in case["rows"]:
        rows.setdefault(row["way"], []).append(row)
        assert len(row["seconds"]["all"]) == ROUNDS and row["seconds"]["min"] > 0
    trainers = len(rows["publish"][0]["trainer_allocated_bytes"])
    assert [row["processes"] for row in rows["memcpy"]] == [*range(1, trainers + 1)]
    assert len(rows["publish"]) == len(rows["publish + copy"]) == 1
    assert [row["through"] for row in rows["per parameter"]] == ["gloo", "shared memory"]
    readers, largest = engines * tensor, 2 * WORDS * HIDDEN
    for row in (*rows["publish"], *rows["publish + copy"]):
        # An engine rank takes in its share and what is whole on every rank; engines read one image.
        assert row["received_bytes"] == [2 * (shared // tensor + whole)] * readers
        assert row["written_bytes"] == row["planned_bytes"] == held
        assert row["buckets"] > 1 and min(row["wait_s"], row["digest_s"], row["install_s"]) >= 0
    for row in rows["per parameter"]:
        assert row["received_bytes"] == [2 * (shared + whole)] * readers and row["times_ours"] > 0
        # Whole parameters are gathered, wherever a rank has less.
        assert trainers == 1 or min(row["trainer_allocated_bytes"][1:]) >= largest
    # No rank holds a whole one to publish.
    assert all(max(row["trainer_allocated_bytes"]) < largest / 2 for row in rows["publish + copy"])


@pytest.mark.parametrize(("arguments", "said"), [
    ("--layout data,2,pipeline,2", "the layout is 'data 2 pipeline 2'; set one such as"),
    ("--engines 2", "need --layout"),
    ("--rounds 0", "1 or more"),
    ("--device cuda --engines 2", "one trainer rank and one reader or engine"),
    ("--device cuda --layout data,2", "one trainer rank and one reader or engine"),
])  # fmt: skip
def test_what_it_cannot_do(arguments: str, said: str) -> None:
    done = start("--shape", "tiny", *(word.replace(",", " ") for word in arguments.split()))
    assert done.returncode != 0 and said in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


def test_the_shape_of_7b() -> None:
    """That which the GPU's step publishes: 7.6 billion parameters, 15.2 GB in bfloat16."""
    code = (
        "import sys, torch, transformers; sys.path[:0] = sys.argv[1:]; from publish import SHAPES;"
        "torch.set_default_device('meta'); config = transformers.AutoConfig.for_model(**SHAPES['7b']);"
        "print(transformers.AutoModelForCausalLM.from_config(config).num_parameters())"
    )
    command = [sys.executable, "-c", code, str(TOOL.parent), str(TOOL.parents[2])]
    assert int(subprocess.check_output(command, text=True)) == 7_615_616_512
