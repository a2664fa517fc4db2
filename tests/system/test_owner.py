"""A run folder has one owner, and ranks end with their launcher: real fine-tuning on two ranks, a
second start beside it, the launcher killed by force, and a restart.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil
from support.commands import (
    command,
    finish,
    marked,
    megarl,
    records,
    start,
    until,
    write_recipe,
    write_rows,
)
from support.fork_server import UNFORKED
from support.tiny import write_model

from megarl.checkpoints.lease import ENDED, read_owner
from megarl.checkpoints.listing import newest_first
from megarl.checkpoints.manifest import damage


def test_one_owner_and_no_orphans(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = write_model(tmp_path / "model")
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(9) for b in range(9)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    tree = {
        "folder": str(run),
        "steps": 100_000,
        "samples_per_step": 8,
        "resume": "auto",
        "model": {"path": str(model)},
        "demonstrations": {"source": source},
        "training": {"checkpoint": {"every": 3}},
    }
    recipe = write_recipe(tmp_path / "sft.yaml", tree)
    agent, mark = start(command("run", recipe, ranks=2), **UNFORKED)
    try:
        until(lambda: len(newest_first(run / "checkpoints")) > 0, 300)
        ranks = psutil.Process(agent.pid).children()
        assert len(ranks) == 2

        began = time.monotonic()
        refused = megarl("run", recipe)
        assert refused.code == 2 and refused.out == ""
        lines = [line for line in refused.err.splitlines() if "megarl: error:" in line]
        assert len(lines) == 1 and f"process {ranks[0].pid} on" in lines[0], refused.err
        assert "end that run first, or set folder" in lines[0]
        print(f"refused within {time.monotonic() - began:.1f} s")
        assert all(rank.is_running() for rank in ranks)
        checked = megarl("run", recipe, "--check")
        assert checked.code == 2 and "still going" in checked.err

        began = time.monotonic()
        agent.kill()
        agent.wait()
        until(lambda: not marked(mark), 10)
        print(f"ranks gone after {time.monotonic() - began:.2f} s")
    finally:
        agent.kill()
        finish(agent, mark, 60)

    (run / "checkpoints" / ".writing_999999.dead").mkdir()
    last = int(newest_first(run / "checkpoints")[0].name.removeprefix("step_"))
    done = megarl("run", recipe, "--steps", str(last + 3), "--ranks", "2")
    assert done.code == 0, done.err[-3000:]
    assert f"is taken over from process {ranks[0].pid} on" in done.err
    names = [path.name for path in sorted((run / "checkpoints").iterdir())]
    assert names[-1] == f"step_{last + 3:06d}" and not [one for one in names if one[0] == "."]
    assert all(damage(path) == "" for path in newest_first(run / "checkpoints"))
    steps = [row["step"] for row in records(run / "metrics.jsonl")]
    assert steps == list(range(1, last + 4))
    record = read_owner(run)
    assert record is not None and record.state == ENDED
