"""The ledger: damage to the file shows, and the audit finds what cannot be true."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.commands import until
from support.rollouts import OneStep, Prompts, rollout_service, segment

from megarl.apps.runs.audit import audit
from megarl.apps.runs.ledger_command import main
from megarl.checkpoints.progress import Progress, write_progress
from megarl.errors import UserError
from megarl.ledger import journal as journals
from megarl.ledger.events import (
    KINDS,
    STALE,
    Accepted,
    Carried,
    Dispatched,
    Ended,
    Event,
    Finished,
    Published,
    Rejected,
    Restored,
    RolloutRecord,
    Started,
    Trained,
    from_record,
    to_record,
)
from megarl.ledger.journal import (
    FILE,
    Journal,
    Reader,
    difference,
    position,
)
from megarl.ledger.recorder import Recorder
from megarl.rollout.dispatch.policy_table import POLICIES
from megarl.rollout.service import RolloutService
from megarl.settings.rollout import DynamicSamplingConfig, RolloutConfig
from megarl.types import START, Cursor, Prompt, Segment, Verdict

# ------------------------------------------------------------------------------------- the journal


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder for each example of a hypothesis test."""
    made = Path(tempfile.mkdtemp())
    try:
        yield made
    finally:
        shutil.rmtree(made)


def written(path: Path, records: list[dict[str, Any]]) -> bytes:
    """Append `records` to a journal; returns the file's content."""
    journal = Journal(path)
    for record in records:
        journal.append(lambda record=record: record)
    journal.close()
    return path.read_bytes()


def numbered(count: int) -> list[dict[str, Any]]:
    """Records with text of any characters."""
    return [{"event": "x", "value": number, "text": '"},\n\u2028é'} for number in range(count)]


@functools.cache
def example(count: int) -> bytes:
    """Content of a journal of `count` records."""
    with folder() as place:
        return written(place / FILE, numbered(count))


def test_a_journal_gives_back_what_was_appended_over_several_openings(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ledger.jsonl"
    written(path, numbered(3))
    written(path, [])
    written(path, numbered(2))
    reader = Reader(path)
    assert list(reader) == numbered(3) + numbered(2)
    assert reader.num_lines == 6 and reader.torn_bytes == 0 and len(reader.run) == 32


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 6), st.floats(0, 1))
def test_a_truncated_journal_loses_its_last_lines_only(count: int, share: float) -> None:
    with folder() as place:
        path = place / FILE
        whole = example(count)
        size = round(share * len(whole))
        path.write_bytes(whole[:size])
        kept = whole[:size].count(b"\n")
        torn = size - (whole[:size].rfind(b"\n") + 1)
        if kept:
            reader = Reader(path)
            assert list(reader) == numbered(count)[: kept - 1]
            assert reader.torn_bytes == torn
        else:
            assert Reader(path).is_torn_at_start
        journal = Journal(path)
        assert journal.cut_bytes == torn and journal.is_new == (kept <= 1)
        journal.append(lambda: {"event": "next"})
        journal.close()
        assert list(Reader(path)) == [*numbered(count)[: max(0, kept - 1)], {"event": "next"}]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10**6), st.integers(0, 7))
def test_every_flipped_bit_shows(count: int, place: int, bit: int) -> None:
    """In the last line it is a torn tail or damage, before that always damage, with the line's
    number.
    """
    with folder() as made:
        path = made / FILE
        whole = bytearray(example(count))
        place %= len(whole)
        line = bytes(whole[:place]).count(b"\n")
        whole[place] ^= 1 << bit
        path.write_bytes(bytes(whole))
        # The end of the line before the last belongs to the last line, which it makes longer.
        last = line == count or (line == count - 1 and bytes(whole).count(b"\n") == count)
        try:
            reader = Reader(path)
            found = list(reader)
        except ValueError as error:
            at = 1 if "newer one" in str(error) else int(str(error).split("line ")[1].split()[0])
            assert at == line + 1
        else:
            assert last, "damage in the middle was not refused"
            assert found == numbered(count)[: max(0, line - 1)] and reader.torn_bytes > 0


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.data())
def test_a_line_that_is_missing_or_out_of_place_is_refused(count: int, data: st.DataObject) -> None:
    with folder() as place:
        path = place / FILE
        lines = example(count).splitlines(keepends=True)
        one = data.draw(st.integers(1, count - 1))
        if data.draw(st.booleans()):
            del lines[one]
        else:
            other = data.draw(st.integers(1, count))
            assume(one != other)
            lines[one], lines[other] = lines[other], lines[one]
            one = min(one, other)
        path.write_bytes(b"".join(lines))
        with pytest.raises(ValueError, match=rf"line {one + 1} is damaged"):
            list(Reader(path))
        with pytest.raises(ValueError, match=rf"line {one + 1} is damaged"):
            Journal(path)


def test_other_files_and_newer_formats_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / FILE
    line, _ = journals.sealed(0, {"event": "ledger", "format": 2, "run": "x"}, 0)
    path.write_bytes(line)
    with pytest.raises(ValueError, match=r"is of format 2, .* reads formats up to 1; use"):
        Journal(path)
    for content in (b'{"step": 1}\n', b"\xff\xfe\n", b"[]\n"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="line 1 is not the first line of a ledger"):
            Journal(path)
        assert path.read_bytes() == content


def test_records_are_on_the_disk_after_sync_and_soon_without(tmp_path: Path) -> None:
    path = tmp_path / FILE
    journal = Journal(path)
    for record in numbered(50):
        journal.append(lambda record=record: record)
    journal.sync()
    assert len(list(Reader(path))) == 50
    journal.append(lambda: {"event": "late"})
    until(lambda: len(list(Reader(path))) == 51)
    journal.close()


def test_a_journal_that_another_process_opened_gets_no_more_lines(tmp_path: Path) -> None:
    """A run that was suspended goes on to write after another run has taken its folder."""
    path = tmp_path / FILE
    old = Journal(path)
    old.append(lambda: {"event": "first"})
    old.sync()
    new = Journal(path)
    new.append(lambda: {"event": "second"})
    new.sync()
    for number in range(3):
        old.append(lambda: {"event": "late"})
        old.sync()
        new.append(lambda number=number: {"event": f"next {number}"})
        new.sync()
    old.close()
    new.close()
    named = [record["event"] for record in Reader(path)]
    assert named == ["first", "second", "next 0", "next 1", "next 2"]
    assert os.listdir(tmp_path) == [FILE]


def test_a_run_that_lost_its_folder_writes_no_line(tmp_path: Path) -> None:
    """Nor one that loses it while it opens the file."""
    reasons = [""]
    recorder = Recorder(tmp_path / FILE, lambda: reasons[0])
    recorder.start(Started(0, 0, 0, 1, 1))
    asyncio.run(recorder.durable())
    before = (tmp_path / FILE).read_bytes()
    reasons[0] = "the run folder was taken over by another run"
    recorder.release(1)
    with pytest.raises(UserError, match=r"^the run folder was taken over by another run$"):
        asyncio.run(recorder.durable())
    asyncio.run(recorder.end(None))
    answers = iter(["", "taken over"])
    for lost in (lambda: reasons[0], lambda: next(answers)):
        with pytest.raises(UserError, match="taken over"):
            Journal(tmp_path / FILE, lost)
    assert (tmp_path / FILE).read_bytes() == before and os.listdir(tmp_path) == [FILE]


@pytest.mark.parametrize("size", [1, 200_000])
def test_the_ledger_of_a_checkpoint_is_known_again(tmp_path: Path, size: int) -> None:
    path = tmp_path / FILE
    assert position(path) == {} and difference(path, {}) == ""
    whole = written(path, [{"event": "x", "text": "t" * size}, {"event": "y"}])
    at = position(path)
    assert at["bytes"] == len(whole) and difference(path, at) == ""
    path.write_bytes(whole + b"t" * size)  # a torn tail
    assert position(path) == at and difference(path, at) == ""
    written(path, numbered(2))  # goes on
    assert difference(path, at) == "" and position(path) != at
    path.write_bytes(whole[:-1])
    assert f"it has {len(whole) - 1} bytes, and had {len(whole)} when" in difference(path, at)
    path.write_bytes(example(40) + whole)
    assert "is another one than when it was written" in difference(path, at)
    path.unlink()
    assert "it has 0 bytes" in difference(path, at)
    path.write_bytes(b"")
    assert position(path) == {}


def test_a_disk_that_fails_fails_the_next_call(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / FILE)
    journal = recorder._journal
    assert journal is not None
    recorder.start(Started(0, 0, 0, 1, 1))
    journal.sync()
    journal._file.close()
    journal._file = io.FileIO("/dev/full", "wb")  # whose errors are the system's
    recorder.release(1)
    with pytest.raises(UserError, match=r"ledger cannot be written .*free space"):
        asyncio.run(recorder.durable())
    with pytest.raises(UserError, match="ledger cannot be written"):
        recorder.release(2)
    asyncio.run(recorder.end(None))


# --------------------------------------------------------------------------- service and audit


class Answers:
    """An engine that answers in an order drawn by a seed, with the weights of the service it works
    for.
    """

    def __init__(self, seed: int) -> None:
        self.draw, self.service = random.Random(seed), None

    async def generate(self, *args: Any, seed: int, max_tokens: int, **rest: Any) -> Segment:
        first = self.service.window.version
        for _ in range(self.draw.randrange(12) * (1 if self.draw.random() < 0.95 else 40)):
            await asyncio.sleep(0)
        draw = random.Random(seed)
        count = draw.randint(1, max_tokens)
        tokens = [draw.randrange(1, 9) for _ in range(count)]
        cut = draw.randint(0, count)
        spans = [(first, cut), (self.service.window.version, count - cut)]
        return segment(tokens, versions=[one for one in spans if one[1]])


class Verifier(OneStep):
    """Equal rewards for some prompts, so that dynamic sampling rejects their groups."""

    async def step(self, key: str, prompt: Prompt, segment: Segment, *, num_tokens: int) -> Verdict:
        failure = "timeout" if num_tokens == 3 else ""
        equal = prompt.index % 3 == 0
        return Verdict(0.0 if equal else float(num_tokens % 2), False, failure=failure)


def service(
    ledger: Path, seed: int, staleness: int, dispatch: Any, step: int, cursor: Cursor
) -> RolloutService:
    config = RolloutConfig(
        groups_per_step=3,
        group_size=4,
        max_new_tokens=5,
        max_staleness=staleness,
        dispatch=dispatch,
        max_open_groups=4 * staleness + 5 if dispatch == "windowed" else None,
        dynamic_sampling=DynamicSamplingConfig(max_draws=3.0),
        request_timeout_s=30.0,
    )
    engines = [Answers(seed), Answers(seed + 1)]
    prompts = Prompts(lambda ordinal: Prompt(ordinal % 17, f"p{ordinal}", [1, 2], ""))
    made = rollout_service(
        engines,
        config,
        prompts,
        environment=Verifier(),
        last_step=LAST,
        ledger=Recorder(ledger),
        first_step=step,
        cursor=cursor,
    )
    for engine in engines:
        engine.service = made
    return made


LAST = 5


async def life(
    path: Path,
    draw: random.Random,
    staleness: int,
    dispatch: str,
    step: int,
    cursor: Cursor,
    killed_in: int,
) -> tuple[int, Cursor]:
    """One life of a run from `step`: it saves checkpoints and is killed in step `killed_in`, or
    ends. Returns step and cursor of its newest checkpoint.
    """
    seed = draw.randrange(10**6)
    made = service(path, seed, staleness, dispatch, step, cursor)
    await made.start()
    saved, on_disk = (step, cursor), path.stat().st_size
    for now in range(step, LAST + 1):
        if now == killed_in:
            break
        await made.take(now, 0)
        await made.release(now + 1)
        await made.release(now + 1)  # each rank releases
        if draw.random() < 0.5:
            saved = now + 1, await made.cursor(now + 1)
            on_disk = path.stat().st_size
            assert audit(events(path)).done == now + 1, "the checkpoint is ahead of the ledger"
    for _ in range(draw.randrange(60)):
        await asyncio.sleep(0)
    if killed_in > LAST:
        await made.stop()
        return LAST + 1, START
    for task in made._tasks.values():
        task.cancel()
    journal = made.ledger._journal
    assert journal is not None
    journal.close()
    # What a killed process leaves: all that was synced, and any part of the rest.
    whole = path.read_bytes()
    path.write_bytes(whole[: draw.randint(on_disk, len(whole))])
    return saved


def events(path: Path) -> list[Event]:
    return [from_record(record) for record in Reader(path)]


def lived(
    path: Path, seed: int, staleness: int, kills: int, dispatch: str = "ordered"
) -> list[Event]:
    """The ledger of a run that is killed and resumed `kills` times; after each its audit holds."""
    draw = random.Random(seed)
    step, cursor = 0, START
    for left in reversed(range(kills + 1)):
        killed_in = draw.randint(step, LAST) if left else LAST + 1
        step, cursor = asyncio.run(life(path, draw, staleness, dispatch, step, cursor, killed_in))
        assert audit(events(path)).contradictions == []
    return events(path)


@pytest.mark.parametrize("dispatch", POLICIES)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2), st.integers(0, 3))
def test_the_audit_holds_for_any_order_kill_and_resume(
    dispatch: str, seed: int, staleness: int, kills: int
) -> None:
    with folder() as place:
        path = place / FILE
        told = lived(path, seed, staleness, kills, dispatch)
        found = audit(told)
    assert found.contradictions == [] and found.done == LAST + 1 and found.ended is not None
    assert found.restores <= kills and found.in_flight == [] and max(found.ages) <= staleness
    assert found.dispatched == found.trained + found.rejected.total() + found.void
    assert found.cursor == Cursor(found.trained + found.rejected.total())
    assert found.rejected["equal rewards"] > 0 and found.trained <= 3 * (LAST + 1)
    # A run may be killed anywhere, so every beginning of a ledger holds.
    for end in range(0, len(told), 7):
        assert audit(told[:end]).contradictions == []


def counted(told: list[Event]) -> list[int]:
    """Places of the events of groups and steps that no resuming has made void. Of the others any
    may be missing: they are what another moment of the kill would have left.
    """
    places, starts, step = list[int](), list[Restored](), 10**9

    def counts(ordinal: int) -> bool:
        return all(ordinal < one.cursor or ordinal in one.used for one in starts)

    for place in reversed(range(len(told))):
        match told[place]:
            case Restored() as one:
                starts.append(one)
                step = min(step, one.step)
            case Trained() as one if one.step <= step:
                places.append(place)
            case Carried() | Dispatched() | Finished() | Accepted() | Rejected() as one:
                places += [place] if counts(one.ordinal) else []
    return places


def drop(kind: type[Event]) -> Callable[[list[Event], random.Random], list[Event]]:
    """A mutation: leave out one event of a kind, of a group or step that counts."""

    def changed(told: list[Event], draw: random.Random) -> list[Event]:
        place = draw.choice([n for n in counted(told) if type(told[n]) is kind])
        return told[:place] + told[place + 1 :]

    return changed


def repeat(kind: type[Event]) -> Callable[[list[Event], random.Random], list[Event]]:
    """A mutation: tell one event of a kind a second time, somewhat later."""

    def changed(told: list[Event], draw: random.Random) -> list[Event]:
        place = draw.choice([n for n, one in enumerate(told) if type(one) is kind])
        later = draw.randint(place + 1, min(place + 8, len(told)))
        return [*told[:later], told[place], *told[later:]]

    return changed


def a_restart(told: list[Event], draw: random.Random) -> tuple[int, Restored]:
    """(its place, the event) of a time at which the run went on from a checkpoint."""
    return draw.choice([(n, one) for n, one in enumerate(told) if isinstance(one, Restored)])


def strict_bound(told: list[Event], draw: random.Random) -> list[Event]:
    """The bound is one less than the ages there are."""
    ages = audit(told).ages
    assume(max(ages) > 0)
    return [
        replace(one, max_staleness=max(ages) - 1) if isinstance(one, Started) else one
        for one in told
    ]


def skip(told: list[Event], draw: random.Random) -> list[Event]:
    """A group that is used leaves no trace."""
    accepted = [told[place] for place in counted(told) if isinstance(told[place], Accepted)]
    chosen = draw.choice(accepted).ordinal  # type: ignore[union-attr]
    return [one for one in told if getattr(one, "ordinal", None) != chosen]


def wrong_cursor(told: list[Event], draw: random.Random) -> list[Event]:
    """The run goes on one group too late; the ledger ends there."""
    place, one = a_restart(told, draw)
    return [*told[:place], replace(one, cursor=one.cursor + 1, used=[])]


def ahead(told: list[Event], draw: random.Random) -> list[Event]:
    """The run goes on from a step that was not trained; the ledger ends there."""
    place, one = a_restart(told, draw)
    before = audit(told[:place])
    cursor = {"cursor": before.cursor.first, "used": list(before.cursor.beyond)}
    return [*told[:place], replace(one, step=before.done + 1, **cursor)]


def wrong_version(told: list[Event], draw: random.Random) -> list[Event]:
    """A group is dispatched at an older version than there is."""
    dispatched = [
        (place, one)
        for place, one in ((place, told[place]) for place in counted(told))
        if isinstance(one, Dispatched) and one.version > 0
    ]
    place, one = draw.choice(dispatched)
    return [*told[:place], replace(one, version=one.version - 1), *told[place + 1 :]]


def swept(told: list[Event]) -> list[int]:
    """Places of the events by which a group is rejected as stale, and no resuming made that void."""
    return [n for n in counted(told) if getattr(told[n], "why", "") == STALE]


def not_swept(told: list[Event], draw: random.Random) -> list[Event]:
    """A group that is too old for every step to come stays in flight."""
    place = draw.choice(swept(told))
    return told[:place] + told[place + 1 :]


def swept_early(told: list[Event], draw: random.Random) -> list[Event]:
    """A group is rejected as stale as soon as it is dispatched."""
    place = draw.choice(swept(told))
    one = told[place]
    assert isinstance(one, Rejected)
    start = max(
        n
        for n in range(place)
        if isinstance(told[n], Dispatched) and told[n].ordinal == one.ordinal  # type: ignore[union-attr]
    )
    early = replace(one, step=told[start].version)  # type: ignore[union-attr]
    return [*told[: start + 1], early, *told[start + 1 : place], *told[place + 1 :]]


def swept_finished(told: list[Event], draw: random.Random) -> list[Event]:
    """A group that has finished is rejected as stale."""
    decided = {n for n in counted(told) if isinstance(told[n], Accepted | Rejected)}
    place = draw.choice(sorted(decided - {*swept(told)}))
    one = told[place]
    assert isinstance(one, Accepted | Rejected)
    return [*told[:place], Rejected(one.ordinal, one.step, STALE), *told[place + 1 :]]


def wrong_used(told: list[Event], draw: random.Random) -> list[Event]:
    """The run goes on without the groups that were used beyond the cursor, or with one more."""
    place, one = a_restart(told, draw)
    used = [] if one.used else [one.cursor + 1]
    return [*told[:place], replace(one, used=used)]


KINDS_OF_GROUPS = (Dispatched, Finished, Accepted, Rejected, Trained)
MUTATIONS = {
    **{f"drop {kind.__name__}": drop(kind) for kind in KINDS_OF_GROUPS},
    **{f"repeat {kind.__name__}": repeat(kind) for kind in KINDS_OF_GROUPS},
    "strict bound": strict_bound,
    "skip": skip,
    "wrong cursor": wrong_cursor,
    "ahead": ahead,
    "wrong version": wrong_version,
}
OF_WINDOWED = MUTATIONS | {
    "not swept": not_swept,
    "swept early": swept_early,
    "swept finished": swept_finished,
    "wrong used": wrong_used,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Event]]]:
    """By dispatch policy, ledgers of some runs that were resumed twice."""
    place = tmp_path_factory.mktemp("runs")
    found: dict[str, list[list[Event]]] = {name: [] for name in POLICIES}
    for name, made in found.items():
        for seed in range(100):
            told = lived(place / f"{name}-{seed}.jsonl", seed, 1, 2, name)
            # Of the windowed runs, those with a group rejected as stale that counts.
            if name == "ordered" or swept(told):
                made.append(told)
            if len(made) == 6:
                break
    return found


@pytest.mark.parametrize(
    ("dispatch", "name"),
    [("ordered", name) for name in MUTATIONS] + [("windowed", name) for name in OF_WINDOWED],
)
def test_the_audit_finds_every_mutation(
    dispatch: str, name: str, runs: dict[str, list[list[Event]]]
) -> None:
    assert len(runs[dispatch]) == 6
    for seed in range(60):
        told = runs[dispatch][seed % 6]
        changed = OF_WINDOWED[name](told, random.Random(seed))
        assert audit(changed).num_contradictions > 0, (seed, name)


def test_the_audit_knows_how_many_groups_may_be_open_and_who_may_sweep() -> None:
    def told(dispatch: str, *more: Event) -> str:
        started = Started(0, 0, 0, 2, 2, dispatch=dispatch, max_open=2)
        return "\n".join(audit([started, *more]).contradictions)

    dispatched = [Dispatched(ordinal, 0, 0, 0) for ordinal in range(4)]
    assert told("windowed", *dispatched[:3]) == ""
    assert "4 groups are neither trained nor rejected, but 3 may be" in told(
        "windowed", *dispatched
    )
    finished = [Finished(o, [RolloutRecord(0, 1, [(0, 1)], "")]) for o in (0, 1)]
    batch = [*dispatched[:3], *finished, Accepted(0, 1), Accepted(1, 1)]
    sweep = Rejected(2, 1, STALE)
    assert told("windowed", *batch, sweep, Trained(1, 1)) == ""
    assert "groups are used in order" in told("ordered", *batch, sweep)
    # A third group that finished before the batch was complete is overtaken by the others.
    third = Finished(2, [RolloutRecord(0, 1, [(0, 1)], "")])
    overtaken = [*batch[:5], third, *batch[5:], Trained(1, 1)]
    assert "group 2 was finished before step 1's batch" in told("windowed", *overtaken)
    # One trained and one rejected as stale are not two draws.
    few = [*dispatched[:2], finished[0], Accepted(0, 1), Rejected(1, 1, STALE), Trained(1, 1)]
    assert "trained on 1 groups of 1 drawn" in told("windowed", *few)
    late = [*batch, Trained(1, 1), third, Accepted(2, 2)]
    assert "trained at an age of 1 versions" in told("windowed", *late, Trained(2, 2))


def test_a_group_has_the_same_prompt_and_seed_after_a_resume() -> None:
    bounds: Any = {"max_staleness": 1, "groups_per_step": 1, "max_draws": 1}
    first = Dispatched(0, 7, 0, 40)
    finished = [Finished(o, [RolloutRecord(0, 1, [(o, 1)], "")]) for o in (0, 1)]
    begun = [Started(0, 0, **bounds), first, finished[0], Accepted(0, 1), Trained(1, 1)]
    told = [*begun, Dispatched(1, 5, 1, 41), Restored(1, 1, **bounds)]
    assert audit([*told, Dispatched(1, 5, 1, 41)]).contradictions == []
    for kind in (Dispatched, Carried):
        for again in (kind(1, 6, 1, 41), kind(1, 5, 1, 42)):
            assert audit([*told, again]).contradictions == [
                "event 8: group 1 has another prompt or seed than before a resume"
            ]
    # Without a checkpoint the run begins anew, perhaps on other data.
    assert (
        audit([*told[:-1], Restored(0, 0, **bounds), Dispatched(0, 8, 0, 4)]).contradictions == []
    )


def test_events_are_read_as_they_were_written() -> None:
    told: list[Event] = [
        Started(0, 0, 1, 2, 4),
        Started(0, 3, 1, 2, 4, dispatch="windowed", used=[5, 7], max_open=6),
        Restored(2, 9, 1, 2, 4, 17),
        Carried(3, 1, 0, 2**60),
        Dispatched(4, 2, 0, 2**61),
        Finished(4, [RolloutRecord(-1, 3, [(0, 1), (1, 2)], "nan")]),
        Accepted(4, 0),
        Rejected(5, 0, "why"),
        Trained(0, 1),
        Published(1, ["9f"]),
        Ended(1, "x"),
    ]
    assert {type(one) for one in told} == set(KINDS.values())
    for one in told:
        again = from_record(json.loads(json.dumps(to_record(one))))
        assert again == one
    for wrong in ({}, {"event": "lost"}, {"event": "accepted"}, {"event": "finished"}):
        with pytest.raises(ValueError, match="is not an event of a ledger"):
            from_record(wrong)


# ----------------------------------------------------------------------------------- the command


def test_the_command_prints_sums_and_refuses_what_cannot_be_true(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / FILE
    told = lived(path, 1, 1, 1)
    assert main([str(tmp_path)]) == 0
    sums = yaml.safe_load(capfd.readouterr().out)
    found = audit(told)
    assert (sums["steps"], sums["ended"], sums["restores"]) == (LAST + 1, True, 1)
    assert (sums["trained"], sums["void"]) == (found.trained, found.void)
    assert sums["rejected"] == dict(found.rejected) and sums["num_contradictions"] == 0
    path.write_bytes(path.read_bytes() + b'{"n":')
    assert main([str(tmp_path), "--json"]) == 0
    told_json, said = capfd.readouterr()
    assert json.loads(told_json)["torn_bytes"] >= 5 and "torn tail of 5 bytes" in said
    path.unlink()
    written(path, [to_record(one) for one in told if one != Trained(2, 2)])
    assert main([str(tmp_path)]) == 1
    said = capfd.readouterr().err
    assert "is dispatched at version 2, but 1 steps are trained" in said
    assert "more contradictions" in said


@pytest.mark.parametrize("tail", [b"", b'{"n":'])
@pytest.mark.parametrize("known_by", ["checkpoint", "metrics"])
def test_the_command_says_what_a_shortened_ledger_lacks(
    known_by: str, tail: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Cut at the end of a line nothing in it is wrong, nor where a process was killed."""
    path = tmp_path / FILE
    lived(path, 1, 1, 1)
    if known_by == "metrics":
        steps = [f'{{"step": {step}}}\n' for step in range(1, LAST + 2)]
        (tmp_path / "metrics.jsonl").write_text("".join(steps))
    else:
        checkpoint = tmp_path / "checkpoints" / f"step_{LAST:06}"
        checkpoint.mkdir(parents=True)
        about = Progress(LAST, 0, 0, "", "", "", ledger=position(path))
        write_progress(checkpoint, about)
    assert main([str(tmp_path)]) == 0
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 3]) + tail)
    capfd.readouterr()
    assert main([str(tmp_path), "--json"]) == 1
    out, err = capfd.readouterr()
    [lacks] = json.loads(out)["missing"]
    assert "missing" in lacks and lacks in err


def test_the_commands_mistakes_are_one_line(tmp_path: Path) -> None:
    for arguments in ([], ["a", "b"], [str(tmp_path), "--text"]):
        with pytest.raises(UserError, match="needs one run folder"):
            main(arguments)
    with pytest.raises(UserError, match=r"ledger.jsonl does not exist"):
        main([str(tmp_path)])
    (tmp_path / FILE).write_text("")
    with pytest.raises(UserError, match="holds no whole line"):
        main([str(tmp_path)])
    (tmp_path / FILE).unlink()
    newer = to_record(Started(0, 0, 0, 1, 1)) | {"colour": "red"}
    for name, record in (("lost", {"event": "lost"}), ("started", newer)):
        written(tmp_path / FILE, [record])
        said = rf"line 2: '{name}' is not an event .*another version .*use that one, or a newer one"
        with pytest.raises(UserError, match=said):
            main([str(tmp_path)])
        (tmp_path / FILE).unlink()


CARRIED = [
    Started(0, 0, 1, 1, 1),
    *(Dispatched(ordinal, ordinal, 0, 7) for ordinal in (0, 1)),
    *(Finished(ordinal, [RolloutRecord(0, 3, [(0, 3)], "")]) for ordinal in (1, 0)),
    Accepted(0, 1),
    Trained(1, 1),
    Restored(1, 1, 1, 1, 1),
    Carried(1, 1, 0, 7),
    Finished(1, [RolloutRecord(0, 3, [(0, 3)], "")]),
    Accepted(1, 2),
    Dispatched(2, 2, 1, 7),
    Trained(2, 2),
]
"""A run that is resumed after step 1 with a finished group of its checkpoint."""


def test_groups_of_a_checkpoint_are_audited() -> None:
    found = audit(CARRIED)
    assert found.contradictions == []
    assert (found.trained, found.void, found.dispatched, found.ages) == (2, 1, 4, {0: 1, 1: 1})
    place, dispatched = CARRIED.index(Carried(1, 1, 0, 7)), Dispatched(2, 2, 1, 7)
    for wrong, message in (
        ([*CARRIED[:place], *CARRIED[place + 1 :]], "group 1 is finished, but is not in flight"),
        ([*CARRIED[:place], dispatched, *CARRIED[place:]], "not at the start of a resumed run"),
        ([*CARRIED[: place - 1], *CARRIED[place:]], "not at the start of a resumed run"),
        ([*CARRIED[: place + 1], *CARRIED[place:]], "is used already, or taken twice"),
        ([*CARRIED[:place], Carried(0, 0, 0, 7)], "is used already, or taken twice"),
        ([*CARRIED[:place], Carried(1, 1, 2, 7)], "is of version 2, and 1 steps are trained"),
        ([*CARRIED[:-2], replace(dispatched, ordinal=1), CARRIED[-1]], "group 1 is dispatched"),
        (
            [
                replace(CARRIED[0], max_staleness=0),
                *CARRIED[1:7],
                replace(CARRIED[7], max_staleness=0),
                *CARRIED[8:],
            ],
            "at an age of 1 versions",
        ),
    ):
        assert any(message in one for one in audit(wrong).contradictions), message
