"""Mixtures of experts: every layout with an expert axis trains exactly as one rank does."""

from __future__ import annotations

from typing import Any

import pytest
from support import training_cases
from support.mixtures import FAMILIES, write_mixture
from support.ranks import run_ranks
from support.training_cases import Case, assert_bitwise, assert_equal, layouts

CUT = {"qwen3_moe", "mixtral", "glm4_moe"}
"""Families whose attention tensor-parallel ranks can split."""


def expert_layouts(size: int) -> list[tuple[int, int, int, int]]:
    """Every (data, sequence, tensor, expert) of `size` ranks."""
    return [
        (*layout, expert)
        for layout in layouts(size)
        for expert in range(1, size + 1)
        if layout[0] * layout[1] % expert == 0
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {kind: write_mixture(folder / kind, kind) for kind in FAMILIES}


@pytest.fixture(scope="module")
def alone(models: dict[str, str]) -> dict[str, Any]:
    cases = [{"layout": (1, 1, 1), "stage": 0, "model": model} for model in models.values()]
    found = run_ranks(1, training_cases.__file__, "run_cases", cases)[0]
    return dict(zip(models, found, strict=True))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "shift", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 5))]
)
def test_the_matrix(models: dict[str, str], alone: dict[str, Any], size: int, shift: int) -> None:
    """Each family has another ZeRO stage under a layout than the next one, and another one with
    each `shift`: the nightly ones together have every layout, also undivided experts, and stage.
    """
    oracles, cases = [], list[Case]()
    for number, (kind, model) in enumerate(models.items()):
        for place, layout in enumerate(expert_layouts(size)):
            if (layout[3] > 1 or shift) and (layout[2] == 1 or kind in CUT):
                stage = (number + 3 * place + shift) % 4
                cases.append({"layout": layout, "stage": stage, "model": model})
                oracles.append(alone[kind])
    file, again = training_cases.__file__, cases[::4]
    found = run_ranks(size, file, "run_cases", cases + again, timeout_s=900)
    assert_equal(oracles, cases, [results[: len(cases)] for results in found])
    for results in found:
        for case, repeated in zip(again, results[len(cases) :], strict=True):
            assert_bitwise(results[cases.index(case)], repeated)
