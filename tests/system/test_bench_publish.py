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
    COLOCATED,
    ("data 2 tensor 1 zero 3", 1, 1),
    ("data 1 tensor 2 zero 0", 1, 2),
    ("data 1 tensor 1 zero 0", 2, 1),
]


@pytest.mark.parametrize(("layout", "engines", "tensor"), CASES)
def test_bytes_are_the_planned_ones(layout: str, engines: int, tensor: int) -> None:
    degrees = [
        "--layout",
        layout,
        "--engines",
        str(engines),
        "--engine-tensor",
        str(tensor),
    ]
    done = start(
        "--json",
        "--shape",
        "tiny",
        "--rounds",
        str(ROUNDS),
        "--bucket-mib",
        "1",
        *degrees,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert (
        found["machine"]["cores"] > 0 and found["others"] >= 0 and found["task"]["rounds"] == ROUNDS
    )
    (case,) = found["cases"]
    shared, whole = numel()
    assert case["parameters"] == shared + whole and case["engine_bytes"] == 2 * (
        shared + tensor * whole
    )
    rows: dict[str, list[Any]] = {}
    for row in case["rows"]:
        rows.setdefault(row["way"], []).append(row)
        assert (
            len(row["seconds"]["all"]) == ROUNDS
            and row["seconds"]["min"] > 0
            and row["gb_per_s"] > 0
        )
        assert row["of_memcpy"] > 0 and row["of_memcpy_ranks"] > 0
    trainers = len(rows["publish"][0]["trainer_allocated_bytes"])
    assert [row["processes"] for row in rows["memcpy"]] == [*range(1, trainers + 1)]
    assert len(rows["publish"]) == len(rows["publish + copy"]) == 1
    assert [row["through"] for row in rows["per parameter"]] == ["gloo", "shared memory"]
    readers, largest = engines * tensor, 2 * WORDS * HIDDEN
    for row in (*rows["publish"], *rows["publish + copy"]):
        # An engine rank takes in its share and what is whole on every rank; engines read one image.
        assert row["received_bytes"] == [2 * (shared // tensor + whole)] * readers
        assert row["written_bytes"] == row["planned_bytes"] == 2 * (shared + tensor * whole)
        assert row["buckets"] > 1 and min(row["wait_s"], row["digest_s"], row["install_s"]) >= 0
    for row in rows["per parameter"]:
        assert row["received_bytes"] == [2 * (shared + whole)] * readers and row["times_ours"] > 0
        # Whole parameters are gathered, wherever a rank has less.
        assert trainers == 1 or min(row["trainer_allocated_bytes"][1:]) >= largest
    # No rank holds a whole one to publish.
    assert all(max(row["trainer_allocated_bytes"]) < largest / 2 for row in rows["publish + copy"])


def test_what_it_cannot_do() -> None:
    for arguments, said in (
        (["--layout", "data 2 pipeline 2"], "--layout is 'data 2 pipeline 2'; set one such as"),
        (["--engines", "2"], "need --layout"),
        (["--rounds", "0"], "1 or more"),
    ):
        done = start(*arguments)
        assert (
            done.returncode != 0
            and said in done.stderr
            and "Traceback" not in done.stderr
            and not done.stdout
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cuda", "--engines", "2"], "one trainer rank and one reader"),
        (["--device", "cuda", "--layout", "data 2"], "one trainer rank and one reader"),
    ],
)
def test_what_one_gpu_cannot_do_is_refused(arguments: list[str], said: str) -> None:
    done = start("--shape", "tiny", *arguments)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


def test_the_shape_of_7b() -> None:
    """That which the GPU's step publishes: 7.6 billion parameters, 15.2 GB in bfloat16."""
    code = (
        "import math, sys; sys.path[:0] = sys.argv[1:]; from publish import SHAPES;"
        "from megarl.weight_sync.families import parameter_table;"
        "print(sum(math.prod(row.shape) for row in parameter_table(SHAPES['7b'])))"
    )
    command = [sys.executable, "-c", code, str(TOOL.parent), str(TOOL.parents[2])]
    assert int(subprocess.check_output(command, text=True)) == 7_615_616_512
