"""Transcripts in parts: nothing is lost at a boundary or a resume, and old parts go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.observe.rotated import RotatedFile, ends, parts_of
from megarl.observe.sinks import read_records

FILE = "transcripts.jsonl"


def everything(path: Path) -> list[dict[str, Any]]:
    """The records of all parts in order."""
    places = [*(part.path for part in parts_of(path)), path]
    return [record for place in places for record in read_records(place)]


@settings(max_examples=60, deadline=None)
@given(
    part_bytes=st.integers(1, 400),
    starts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=5),
    per_step=st.integers(1, 3),
)
def test_a_run_of_several_starts(
    part_bytes: int,
    starts: list[tuple[int, int]],
    per_step: int,
    tmp_path_factory: Any,
) -> None:
    """Each start goes on from a step at or before the newest, and writes some steps."""
    path, wanted, done = tmp_path_factory.mktemp("run") / FILE, list[dict[str, Any]](), 0
    for number, (back, steps) in enumerate(starts):
        done = max(0, done - back)
        wanted = [record for record in wanted if record["step"] <= done]
        file = RotatedFile(path, keep_until_step=done, most_bytes=10**9, part_bytes=part_bytes)
        assert everything(path) == wanted
        for step in range(done + 1, done + steps + 1):
            for index in range(per_step):
                record = {"start": number, "index": index, "text": "x" * 20}
                file.write(step, record)
                wanted.append({"step": step} | record)
        file.close()
        done += steps
    assert everything(path) == wanted
    for part in parts_of(path):
        steps_of = [record["step"] for record in read_records(part.path)]
        assert (min(steps_of), max(steps_of)) == (part.first, part.last)
    edges = {wanted[0]["step"], wanted[-1]["step"]} if wanted else set()
    assert ends(path) == [record for record in wanted if record["step"] in edges]


def test_of_too_many_parts_the_first_and_the_newest_stay(tmp_path: Path) -> None:
    path = tmp_path / FILE
    file = RotatedFile(path, keep_until_step=0, most_bytes=500, part_bytes=100)
    for step in range(1, 41):
        file.write(step, {"text": "x" * 80})
    file.close()
    parts = parts_of(path)
    assert parts[0].first == 1 and parts[-1].last == 39
    assert sum(part.path.stat().st_size for part in parts) <= 600
    assert [record["step"] for record in ends(path)] == [1, 40]
    # A run that goes on from a removed part keeps what is left before it.
    RotatedFile(path, keep_until_step=5, most_bytes=500, part_bytes=100).close()
    assert [record["step"] for record in everything(path)] == [1]
