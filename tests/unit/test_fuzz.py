"""A seeded fuzz of everything a user hands over: each case ends in one clear line or a right pass.

`tools/fuzz.py` runs more cases, and shows one: `python tools/fuzz.py --seed 1 --only 17`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import fuzz
from support.tiny import write_model

CASES, PARTS = 500, 10
SEED = 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("fuzz") / "model")


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(one, marks=pytest.mark.nightly) for one in range(1, PARTS))]
)
def test_one_clear_line_or_a_right_pass(part: int, model: Path, tmp_path: Path) -> None:
    faults, refused = [], 0
    for number in range(part, CASES, PARTS):
        kind, case = fuzz.make(SEED, number, model)
        folder = tmp_path / str(number)
        folder.mkdir()
        found = fuzz.run(case, folder, model)
        refused += found.kind == "refused"
        if found.is_fault:
            faults.append(f"{number}: {found.kind}: {kind}: {case.what}\n{found.said[-1500:]}")
    assert not faults, "\n\n".join(faults)
    assert 0.4 * CASES / PARTS < refused < 0.95 * CASES / PARTS, "cases no longer test anything"


def test_a_case_is_a_function_of_its_numbers(model: Path) -> None:
    def words(number: int) -> tuple[object, ...]:
        kind, case = fuzz.make(3, number, model)
        return kind, case.what, case.expect, repr(case.settings), case.text

    assert [words(number) for number in range(200)] == [words(number) for number in range(200)]
