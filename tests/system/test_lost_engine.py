"""Whole runs whose engines die or hang, in every phase: they go on with new engines, and no prompt is
lost.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.commands import finish, megarl, records, start, tiny_run, write_recipe
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


PHASES = """
import os, signal, sys
import psutil
from megarl.cluster.ray_cluster import RolloutClient
from megarl.console import say
from megarl.weight_sync.publication import Publication
from megarl.weight_sync.transports import shared_memory

def hit(kind, number):
    # Ray's processes are below this one. The engine's core has no title of its own; it is the
    # largest process below the actor.
    actor = next(
        process for process in psutil.Process().children(recursive=True)
        if process.cmdline() and process.cmdline()[0].startswith("ray::Engine")
    )
    core = max(actor.children(recursive=True), key=lambda process: process.memory_info().rss)
    (actor if kind == "actor" else core).send_signal(number)
    say(f"hit {kind} {number}")

def before(owner, name, *faults):
    plain, calls = getattr(owner, name), []
    def method(self, *arguments):
        calls.append(arguments)
        for count, kind, number in faults:
            if len(calls) == count:
                hit(kind, number)
        return plain(self, *arguments)
    setattr(owner, name, method)

# The first call of each is the start of the run. After `release`, the trainer waits for rollouts.
before(RolloutClient, "release", (1, "core", signal.SIGKILL), (3, "core", signal.SIGSTOP))
before(RolloutClient, "evaluate", (2, "actor", signal.SIGKILL), (3, "actor", signal.SIGSTOP))
before(Publication, "_check_probe", (3, "core", signal.SIGKILL))
before(shared_memory.Sender, "begin", (7, "core", signal.SIGKILL))
from megarl.cli import main
sys.exit(main())
"""


def test_one_engine_dies_and_hangs_in_every_phase(tmp_path: Path) -> None:
    """One engine alone, so that everything waits for its replacement: while the trainer waits for
    rollouts or an evaluation, in the probe, and before the first byte of a version.
    """
    model = write_model(tmp_path / "model")
    tree = tiny_run(tmp_path, model, steps=5)
    tree["rollout"] |= {"engine": {"stall_timeout_s": 8}}
    tree["evaluation"] |= {"every": 2}
    command = [sys.executable, "-c", PHASES, "train", write_recipe(tmp_path / "recipe.yaml", tree)]
    process, mark = start(command)
    done = finish(process, mark, 400)
    assert done.code == 0, done.err[-3000:]
    assert done.survivors == []
    assert done.err.count("hit ") == 6
    steps = [
        row for row in records(tmp_path / "run" / "metrics.jsonl") if "publish/replaced" in row
    ]
    assert len(steps) == 5
    assert steps[-1]["engines/replaced"] == 6
    assert "has lost one of vLLM's processes; it is replaced" in done.err
    assert re.search(r"has made no step for \d+ s, with \d+ requests open", done.err)
    assert re.search(r"has not said for \d+ s that it lives", done.err)
    assert [row["groups/drawn"] - row["groups/rejected"] for row in steps] == [4] * 5
    audit = megarl("ledger", str(tmp_path / "run"))
    assert audit.code == 0, audit.out + audit.err


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
