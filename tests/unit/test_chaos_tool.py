"""tools/chaos.py: where a fault fell, and what it does to files. The tool itself runs whole runs
for minutes.
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


def life(run: Path, process: str, events: list[dict[str, Any]]) -> None:
    """A file of a process that began at 1000 s; `ts` of the events are seconds from then on."""
    about = {"name": process, "host": "h", "started": "1", "machine": "elsewhere", "run": "r"} | {
        "pid": 7
    }
    head = {"name": "process_name", "ph": "M", "ts": 0.0, "args": about}
    (run / "activity").mkdir(exist_ok=True)
    text = "".join(
        json.dumps({"args": {}, **one, "pid": 7, "ts": 1e9 + 1e6 * one["ts"]}) + ",\n"
        for one in [head, *events]
    )
    (run / "activity" / f"{process}.json").write_text("[\n" + text)


def test_the_phase_of_a_moment(tmp_path: Path) -> None:
    from chaos_run import Run

    def begins(number: int, kind: str, what: str, begin: float) -> dict[str, Any]:
        return {"ph": "B", "id": number, "cat": kind, "name": what, "ts": begin}

    def span(number: int, kind: str, what: str, begin: float, end: float) -> list[dict[str, Any]]:
        return [begins(number, kind, what, begin), {"ph": "E", "id": number, "ts": end}]

    rank = [
        *span(1, "load", "start of Ray", 0.5, 1.0),
        {"name": "step 1", "ph": "i", "args": {"step": 1, "version": 0}, "ts": 2.0},
        *span(2, "wait", "rollouts of step 1", 2.0, 5.0),
        *span(3, "train", "training of step 1", 5.0, 6.0),
        begins(4, "publish", "publication of weights 1", 6.0),
        *span(5, "publish", "probe of weights 1", 6.5, 7.0),
        {"ph": "E", "id": 4, "ts": 7.0},
        *span(6, "checkpoint", "checkpoint of step 1", 8.0, 9.0),
        begins(7, "evaluate", "evaluation 'eval' after step 1", 9.0),
    ]
    life(tmp_path, "rank0", rank)
    life(tmp_path, "engine0", span(1, "generate", "responses", 2.0, 3.0))
    life(tmp_path, "service", span(1, "score", "verdicts", 2.5, 4.0))
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
