"""tools/chaos.py: where a fault fell, what it does to files, and what it compares. The tool itself
runs whole runs for minutes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megarl.ledger.journal import FILE, Journal, Reader

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def life(run: Path, process: str, lines: list[dict[str, Any]]) -> None:
    """A file of a process that began at 1000 s, whose clock was 0 then."""
    head = {"process": process, "host": "h", "pid": 7, "started": "1", "machine": "elsewhere"}
    head |= {"run": "r", "signal": 0, "wall": 1000.0, "t": 0.0}
    (run / "activity").mkdir(exist_ok=True)
    text = "".join(json.dumps(one | {"p": 7}) + "\n" for one in lines)
    (run / "activity" / f"{process}.jsonl").write_text(json.dumps(head) + "\n" + text)


def test_the_phase_of_a_moment(tmp_path: Path) -> None:
    from chaos_run import Run

    def span(number: int, kind: str, what: str, begin: float, end: float) -> list[dict[str, Any]]:
        begins = {"begin": number, "kind": kind, "what": what, "t": begin}
        return [begins, {"end": number, "t": end}]

    rank = [
        *span(1, "load", "start of Ray", 0.5, 1.0),
        {"step": 1, "version": 0, "t": 2.0},
        *span(2, "wait", "rollouts of step 1", 2.0, 5.0),
        *span(3, "train", "training of step 1", 5.0, 6.0),
        {"begin": 4, "kind": "publish", "what": "publication of weights 1", "t": 6.0},
        *span(5, "publish", "probe of weights 1", 6.5, 7.0),
        {"end": 4, "t": 7.0},
        *span(6, "checkpoint", "checkpoint of step 1", 8.0, 9.0),
        {"begin": 7, "kind": "evaluate", "what": "evaluation 'eval' after step 1", "t": 9.0},
    ]
    life(tmp_path, "rank0", rank)
    life(tmp_path, "engine0", span(1, "generate", "responses", 2.0, 3.0))
    life(tmp_path, "environment", span(1, "score", "verdicts", 2.5, 4.0))
    run = Run([], tmp_path, tmp_path / "log")
    moments = {0.7: "start", 2.7: "generate", 3.5: "score", 4.5: "take", 5.5: "train"}
    moments |= {6.2: "publish", 6.7: "probe", 7.5: "between", 8.5: "checkpoint", 9.5: "evaluate"}
    assert {at: run.phase_at(1000.0 + at) for at in moments} == moments


def test_files_are_torn_and_altered(tmp_path: Path) -> None:
    from chaos_faults import flip_bit, newest, tear, tear_checkpoint
    from chaos_run import Run

    run, draw = Run([], tmp_path, tmp_path / "log"), random.Random(1)
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step_{step:06d}" / "file").write_bytes(bytes(100))
    last = newest(run)
    assert last is not None and last.name == "step_000002"
    assert flip_bit(run, draw) and sum((last / "file").read_bytes()).bit_count() == 1
    assert tear_checkpoint(run, draw) and (last / "file").stat().st_size < 100
    assert (last.with_name("step_000001") / "file").read_bytes() == bytes(100)

    path = tmp_path / FILE
    journal = Journal(path)
    journal.append(lambda: {"event": "trained", "step": 1, "version": 1})
    journal.close()
    whole = path.read_bytes()
    for _ in range(4):  # half a line, and zeros
        assert tear(FILE)(run, draw) and path.read_bytes().startswith(whole)
        assert Reader(path).verify() > 0
        path.write_bytes(whole)


def test_void_groups_are_not_compared(tmp_path: Path) -> None:
    from chaos_reference import ledger

    def write(name: str, events: list[tuple[str, dict[str, Any]]]) -> Path:
        journal = Journal(tmp_path / name / FILE)
        for event, values in events:
            journal.append(lambda event=event, values=values: {"event": event} | values)
        journal.close()
        return tmp_path / name

    first = [("dispatched", {"ordinal": 0, "seed": 3}), ("accepted", {"ordinal": 0, "step": 1})]
    second = [("dispatched", {"ordinal": 1, "seed": 4}), ("accepted", {"ordinal": 1, "step": 2})]
    other = [("dispatched", {"ordinal": 1, "seed": 5}), ("accepted", {"ordinal": 1, "step": 2})]
    again = [("restored", {"step": 1, "cursor": 1})]
    plain = ledger(write("plain", first + second))
    assert len(plain) == 2
    assert ledger(write("resumed", first + other + again + second)) == plain
    assert ledger(write("differs", first + second + again + other)) != plain
