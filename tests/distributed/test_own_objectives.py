"""Objectives that are named by path train as those of the house do, on ranks that share samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import training_cases
from support.ranks import run_ranks
from support.training_cases import Case, assert_bitwise, write

from megarl.settings.objectives import CorrectionConfig

OWN = """
from megarl.objectives.advantages import dr_grpo
from megarl.objectives.corrections import decoupled
from megarl.objectives.losses import gspo
from megarl.objectives.token_advantages import reinforce_plus_plus_tokens

def turned(rewards_N, groups_N, tokens_N):
    return -dr_grpo(rewards_N, groups_N, tokens_N)

def reporting(logp_T, old_T, advantages_T, sequence_mean, config):
    terms = gspo(logp_T, old_T, advantages_T, sequence_mean, config)
    return terms, {"ratio": terms.ratio, "five": 0 * logp_T + config.own["five"]}

def telling(step, config):
    step.metrics["nine"] = config.own["five"] + 4
    return reinforce_plus_plus_tokens(step, config)
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
    told = {"advantage": f"{folder}/own.py:telling", "loss": f"{folder}/own.py:reporting"}
    found.append(found[-1] | {"algorithm": made | told | {"own": {"five": 5}}})
    return found


def test_the_same_function_by_path_gives_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    write(tmp_path / "m")
    for layout in ((1, 2, 1), (2, 1, 1)):
        ranks: list[list[Any]] = run_ranks(
            2, training_cases.__file__, "run_cases", cases(str(tmp_path), layout)
        )
        for house, other, tokens, own, turned, own_tokens, telling in ranks:
            assert_bitwise(house, own)
            assert_bitwise(tokens, own_tokens)
            assert turned[0][0]["loss"] != own[0][0]["loss"] != other[0][0]["loss"]
            first = telling[0][0]
            assert first["loss"] == tokens[0][0]["loss"]
            assert (first["own/five"], first["own/nine"]) == (5.0, 9.0)
            assert 0.5 < first["own/ratio"] < 2.0 and first == ranks[0][-1][0][0]
