"""Objectives that are named by path train as those of the house do, on ranks that share samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import training_cases
from support.ranks import run_ranks
from support.training_cases import Case, assert_bitwise, write

from megarl.objectives.config import CorrectionConfig

OWN = """
from megarl.objectives.advantages import dr_grpo
from megarl.objectives.corrections import decoupled
from megarl.objectives.losses import gspo
from megarl.objectives.token_advantages import reinforce_plus_plus_tokens

def turned(rewards_N, groups_N, tokens_N):
    return -dr_grpo(rewards_N, groups_N, tokens_N)
"""


def cases(folder: str, layout: tuple[int, int, int]) -> list[Case]:
    """A case by the names of the house, the same by path, and one with another advantage; then the
    same with an advantage of each token.
    """
    found = []
    for beside in ("", f"{folder}/own.py:"):
        correction = CorrectionConfig(kind=f"{beside}decoupled", high=5.0)
        algorithm = {"loss": f"{beside}gspo", "correction": correction}
        for advantage in ("dr_grpo", "turned" if beside else "rloo", "reinforce_plus_plus_tokens"):
            made = algorithm | {"advantage": f"{beside}{advantage}"}
            found.append({"layout": layout, "stage": 0, "model": f"{folder}/m", "algorithm": made})
    return found


def test_the_same_function_by_path_gives_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    write(tmp_path / "m")
    for layout in ((1, 2, 1), (2, 1, 1)):
        ranks: list[list[Any]] = run_ranks(
            2, training_cases.__file__, "run_cases", cases(str(tmp_path), layout)
        )
        for house, other, tokens, own, turned, own_tokens in ranks:
            assert_bitwise(house, own)
            assert_bitwise(tokens, own_tokens)
            assert turned[0][0]["loss"] != own[0][0]["loss"] != other[0][0]["loss"]
