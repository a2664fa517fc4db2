"""The pages of docs/concepts: each with its question first, and with examples that hold."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from megarl.ledger.events import Rejected, from_record
from megarl.objectives.advantages import ADVANTAGES
from megarl.objectives.corrections import CORRECTIONS
from megarl.objectives.losses import AGGREGATIONS
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.reshard.owned import training_owned
from megarl.parallel.sequence import zigzag_document
from megarl.parallel.tensor import Shard
from megarl.rollout.dispatch.contract import Limits
from megarl.rollout.dispatch.ordered import Ordered
from megarl.settings.objectives import AlgorithmConfig, CorrectionConfig
from megarl.types import START

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "concepts").glob("*.md"))
TEXTS = {page.stem: page.read_text() for page in PAGES}


def cells(page: str, name: str) -> list[str]:
    """The further cells of the table's row whose first cell begins with `name` in backticks."""
    row = re.search(rf"^\| `{name}`[^|]*\|(.+)\|$", TEXTS[page], re.M)
    assert row is not None, name
    return [cell.strip() for cell in row[1].split("|")]


@pytest.mark.parametrize("page", TEXTS)
def test_a_page_begins_with_its_question(page: str) -> None:
    assert re.match(r"# .+\n\n\*\*[^*]+\?\*\*\n", TEXTS[page])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_advantages(name: str) -> None:
    rewards = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    found = ADVANTAGES[name](rewards, torch.zeros(4).long(), torch.ones(4).long()).tolist()
    assert [float(cell) for cell in cells("credit", name)[:2]] == pytest.approx(found[:2], abs=5e-4)


@pytest.mark.parametrize("kind", ["tis", "decoupled", "icepop"])
def test_corrections(kind: str) -> None:
    w = torch.tensor([0.3, 3.0, 8.0])
    found = CORRECTIONS[kind](w.log(), torch.zeros(3), lambda x: x, CorrectionConfig(kind=kind))
    assert [float(cell) for cell in cells("credit", kind)] == pytest.approx(found.tolist())


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregations(name: str) -> None:
    config = AlgorithmConfig(aggregation=name, constant_tokens=8 if name == "constant" else 0)
    found = AGGREGATIONS[name](torch.tensor([2, 8]), config).tolist()
    assert [float(Fraction(cell)) for cell in cells("credit", name)] == pytest.approx(found)


@pytest.mark.parametrize("name", ["tensor", "sequence", "data", "gradient", "sample"])
def test_groups_of_ranks(name: str) -> None:
    groups = Layout(2, 2, 2).groups(*ProcessMesh.USES[name])
    table = TEXTS["layouts"].partition("## Meshes by use")[2]
    row = re.search(rf"^\| `{name}`[^|]*\| ([\d ,]+) \|", table, re.M)
    assert row and row[1] == ", ".join(" ".join(map(str, group)) for group in groups)


def test_a_cut_of_two_samples() -> None:
    for rank, positions in enumerate(zigzag_document([0, 4, 8], 2)):
        drawn = re.search(rf"^rank {rank} +((?:[AB]\d +)+)", TEXTS["layouts"], re.M)
        assert drawn is not None
        named = [f"{'AB'[place // 4]}{place % 4}" for place in positions.tolist()]
        assert drawn[1].split() == named


def test_groups_that_may_start() -> None:
    policy = Ordered.restore(Limits(4, 12, 1, 9, 99), START, 0)

    def started() -> int:
        while policy.may_start():
            last = policy.start()
        return last

    text = " ".join(TEXTS["weights"].split())
    assert f"v = 0 groups 0 to {started()} may start" in text
    policy.finish(2, accepted=False)
    assert f"If group 2 is rejected, group {started()} may start, too" in text
    for ordinal in (0, 1, 3, 4):
        policy.finish(ordinal, accepted=True)
    batch = policy.close()
    assert batch is not None and "groups {}, {}, {} and {}".format(*batch.accepted) in text
    policy.release(1)
    assert f"groups up to {started()} may start" in text


def test_boxes_of_four_ranks() -> None:
    grid = torch.full((6, 4), -1)
    shapes, shards = {"up": (6, 4)}, {"up": Shard.even(0, 6, 2)}
    for rank, owned in enumerate(training_owned(shapes, shards, Layout(2, 1, 2), 3)):
        for top, bottom, left, right in (piece.box for piece in owned.pieces):
            grid[top:bottom, left:right] = rank
    drawn = re.findall(r"^row \d   ([\d ]{7})", TEXTS["weights"], re.M)
    assert [[int(cell) for cell in row.split()] for row in drawn] == grid.tolist()


def test_lines_of_a_ledger() -> None:
    lines = re.findall(r'^\{"n".+\}$', TEXTS["ledger"], re.M)
    records = [json.loads(line) for line in lines]
    events = [
        from_record({key: one[key] for key in one if key not in ("n", "crc")}) for one in records
    ]
    assert len(events) == 3 and events[-1] == Rejected(1, 2, "equal rewards")
