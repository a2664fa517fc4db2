"""The place in the ledger that a checkpoint records: a resume goes on from a ledger that reaches it,
and from no other.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.policy import make_checkpoints, make_role, on_mesh
from support.ranks import run_ranks
from support.tiny import write_model

from megarl.checkpoints.progress import read_progress
from megarl.ledger.events import Dispatched, Published, Started
from megarl.ledger.journal import FILE, Reader, difference
from megarl.ledger.recorder import Recorder

STEPS = 3
GROUPS = 2
"""Groups of a step."""


def started(ledger: Recorder, step: int) -> None:
    """Tell the ledger that the run starts after `step` steps."""
    ledger.start(Started(step, step * GROUPS, 0, GROUPS, GROUPS))


def save_steps(model: str, folder: str) -> list[int]:
    """A checkpoint after each of `STEPS` steps; returns the number of lines of the ledger then."""
    run, lines = Path(folder), list[int]()
    ledger = Recorder(run / FILE)
    started(ledger, 0)
    ledger.put(Published(0, ["r0"]))
    with on_mesh(1) as (mesh, device):
        engine = make_role(model, mesh, device, steps=1).engine
        place = run / "checkpoints"
        checkpoints = make_checkpoints(place, engine, model, mesh, keep=STEPS, in_background=True)
        for step in range(STEPS):
            groups = range(step * GROUPS, (step + 1) * GROUPS)
            for ordinal in groups:
                ledger.put(Dispatched(ordinal, ordinal, step, ordinal))
            ledger.close(step, dict.fromkeys(groups, ""), set(groups))
            ledger.release(step + 1)
            ledger.put(Published(step + 1, [f"r{step + 1}"]))
            asyncio.run(ledger.durable())
            checkpoints.save(step=step + 1, next_ordinal=groups.stop)
            lines.append((run / FILE).read_bytes().count(b"\n"))
        checkpoints.finish()
    asyncio.run(ledger.end(None))
    return lines


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """The run's folder, and the lines of its ledger at each checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    model = str(write_model(folder / "model"))
    return folder, run_ranks(1, __file__, "save_steps", model, str(folder))[0]


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_checkpoint_knows_the_last_record_before_it(
    run: tuple[Path, list[int]], step: int, tmp_path: Path
) -> None:
    """A ledger that ends there is gone on from, with the step's last record; one that lacks this
    record is refused, and so is one that has another in its place.
    """
    folder, lines = run
    at, count = read_progress(folder / "checkpoints" / f"step_{step:06d}").ledger, lines[step - 1]
    whole = (folder / FILE).read_bytes().splitlines(keepends=True)
    here, before = tmp_path / FILE, b"".join(whole[:count])
    here.write_bytes(before)
    assert list(Reader(here))[-1] == {
        "event": "published",
        "version": step,
        "receipts": [f"r{step}"],
    }
    assert difference(here, at) == "" and at["bytes"] == len(before)
    recorder = Recorder(here)
    started(recorder, step)
    asyncio.run(recorder.end(None))
    assert here.read_bytes().startswith(before) and difference(here, at) == ""
    assert [one["event"] for one in Reader(here)][count - 1 :] == ["restored", "ended"]

    here.write_bytes(b"".join(whole[: count - 1]))
    assert f"and had {len(before)} when the checkpoint was written" in difference(here, at)
    recorder = Recorder(here)
    recorder.put(Published(step, ["of other weights"]))
    asyncio.run(recorder.end(None))
    assert "is another one than when it was written" in difference(here, at)
