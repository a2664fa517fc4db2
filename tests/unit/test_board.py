"""Counters in shared memory: only the memory that was meant is ever opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.weight_sync.transports.base import GIVEN_UP, Aborted
from megarl.weight_sync.transports.shared_counters import SharedCounters


def test_another_process_sees_what_is_written() -> None:
    mine = SharedCounters(2, 1, 100)
    child = os.fork()
    if child == 0:
        theirs = SharedCounters(2, 1, 100, mine.path)
        theirs.memory()[7] = 42
        theirs.write(1, 3)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert mine.memory()[7] == 42 and mine.written() == 0
    mine.write(0, 5)
    assert mine.written() == 3
    mine.close()


def test_other_memory_at_the_same_place_is_refused(tmp_path: Path) -> None:
    mine = SharedCounters(1, 1, 100)
    place, _, key = mine.path.partition("#")
    with pytest.raises(RuntimeError, match=r"not the trainer's memory.*'point_to_point'"):
        SharedCounters(1, 1, 100, f"{place}#{int(key) + 1}")
    with pytest.raises(RuntimeError, match="not the trainer's memory"):
        SharedCounters(1, 1, 100_000, mine.path)
    with pytest.raises(RuntimeError, match=r"cannot be opened.*'point_to_point'"):
        SharedCounters(1, 1, 100, f"/proc/{os.getpid()}/fd/99999#1")
    mine.close()


def test_a_wait_ends_when_another_gives_up_or_the_watch_raises() -> None:
    mine = SharedCounters(1, 1, 0)
    theirs = SharedCounters(1, 1, 0, mine.path)
    theirs.abort()
    with pytest.raises(Aborted, match=GIVEN_UP):
        mine.until(lambda: False, lambda: None)
    mine.clear()

    def late() -> None:
        raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        mine.until(lambda: False, late)
    for board in (mine, theirs):
        board.close()
