"""Programs that run megarl and harm one of its processes on the way; `python -c` starts them."""

from __future__ import annotations

KILLER = """
import os, sys, time
import psutil
from support.fork_server import below
from megarl.weights.transports import shared_memory
from megarl.settings.weight_sync import WeightSyncConfig

plain, begin = shared_memory.Sender.commit, shared_memory.Sender.begin
WeightSyncConfig.bucket_bytes = 2**13
state = {"version": -1, "killed": False}

def victims(kind):
    # Ray's processes are below this one. Not by the mark in their environment: a long title is
    # written over it. vLLM's own processes may have no title: setproctitle cannot write one where
    # the first variable of the environment has been set anew. A tensor rank is the largest
    # process below the core, which is a child of the engine's actor.
    for process in below(psutil.Process()):
        try:
            if not process.cmdline() or not process.cmdline()[0].startswith("ray::Engine"):
                continue
            if kind == "engine":
                yield process
                continue
            ranks = [one for core in process.children() for one in core.children()]
            sizes = {one.memory_info().rss: one for one in ranks}
            if sizes:
                yield sizes[max(sizes)]
        except psutil.Error:
            continue

def begins(self, attempt, **more):
    state["version"] = attempt - 1  # as none before it has failed
    begin(self, attempt, **more)

def commit(self, bucket, watch):
    if state["version"] == 2 and bucket.number == 3 and not state["killed"]:
        state["killed"] = True
        # On a busy machine a process may not tell its title at the first look.
        looks = (list(victims(os.environ["VICTIM"])) or time.sleep(0.1) for _ in range(100))
        found = next(filter(None, looks), None)
        assert found, [one.cmdline() for one in below(psutil.Process())]
        victim = min(found, key=lambda process: process.pid)
        for process in [*victim.children(recursive=True), victim]:
            process.kill()
    plain(self, bucket, watch)

shared_memory.Sender.begin, shared_memory.Sender.commit = begins, commit
from megarl.cli import main
sys.exit(main())
"""
"""Kills an engine's actor (VICTIM=engine) or one of its tensor ranks (VICTIM=rank) while version 2
is on its way, after three buckets."""
