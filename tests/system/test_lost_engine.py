"""A whole run whose engine is killed in the middle of a publish: it goes on with a fresh one, and
no prompt is lost.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.commands import finish, records, start, tiny_run, write_recipe
from support.tiny import write_model

KILLER = """
import os, sys
import psutil
from megarl.weight_sync.transports import shared_memory
from megarl.weight_sync.config import WeightSyncConfig

plain, begin = shared_memory.Sender.commit, shared_memory.Sender.begin
WeightSyncConfig.bucket_bytes = 2**13
state = {"version": -1, "killed": False}

def called(title):
    # Ray's processes are below this one. Not by the mark in their environment: a long title is
    # written over it.
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()[:1]
            if words and words[0].startswith(title):
                yield process
        except psutil.Error:
            continue

def begins(self, version):
    state["version"] = version
    begin(self, version)

def commit(self, bucket, watch):
    if state["version"] == 2 and bucket.number == 3 and not state["killed"]:
        state["killed"] = True
        victim = min(called(os.environ["VICTIM"]), key=lambda process: process.pid)
        for process in [*victim.children(recursive=True), victim]:
            process.kill()
    plain(self, bucket, watch)

shared_memory.Sender.begin, shared_memory.Sender.commit = begins, commit
from megarl.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(("victim", "tensor"), [("ray::Engine", 1), ("VLLM::Worker_TP1", 2)])
def test_the_run_goes_on_with_a_fresh_engine(victim: str, tensor: int, tmp_path: Path) -> None:
    """Two engines, one of which loses its actor, or one rank of two; requests are under way."""
    model = write_model(tmp_path / "model")
    tree = tiny_run(tmp_path, model, steps=4)
    tree["rollout"] |= {"num_engines": 2, "max_staleness": 1, "engine": {"tensor": tensor}}
    tree["algorithm"] = {"correction": {"kind": "tis"}}
    command = [sys.executable, "-c", KILLER, "train", write_recipe(tmp_path / "recipe.yaml", tree)]
    process, mark = start(command, VICTIM=victim)
    done = finish(process, mark, 300)
    assert done.code == 0, done.err[-3000:]
    assert done.survivors == []
    assert re.search(
        r"engine \d was lost while it received version 2, in bucket \d+ of \d+, which begins with"
        r" model\.",
        done.err,
    )
    rows = records(tmp_path / "run" / "metrics.jsonl")
    steps = [row for row in rows if "publish/replaced" in row]
    assert [row["publish/replaced"] for row in steps] == [
        0,
        1,
        0,
        0,
    ], "version 2 is what step 1 leaves"
    assert all(row["probe/max_abs"] < 1e-4 for row in steps)
    # Groups are trained in order: a rollout that was lost with the engine would have stopped the
    # run.
    assert [row["groups/drawn"] - row["groups/rejected"] for row in steps] == [4, 4, 4, 4]
