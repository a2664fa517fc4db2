"""A run folder has one owner: taking, refusing, taking over, losing and releasing its lease."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import python, until

from megarl.checkpoints import lease as leases
from megarl.checkpoints.lease import ENDED, Record, machine, newest, path_of, take

CHILD = """import sys, time
from pathlib import Path
from megarl.checkpoints.lease import take
folder = Path(sys.argv[1])
while not (folder / "go").exists():
    pass
try:
    lease = take(folder, patience_s=15)
except ValueError as error:
    print("refused", error)
else:
    print("won", lease.run_id, flush=True)
    time.sleep(60)
"""


def owner(folder: Path) -> Record:
    """What the newest lease file says."""
    _, record = newest(folder)
    assert record is not None
    return record


def write(folder: Path, record: Record, number: int = 1) -> None:
    """A lease file that another run has left."""
    folder.mkdir(exist_ok=True)
    path_of(folder, number).write_bytes(record.encode())


def left_by(process: int, started: str, **changes: object) -> Record:
    record = Record("0123456789abcdef", "there", process, started, machine(), "2026-01-02 03:04:05")
    return replace(record, **changes)  # pyright: ignore[reportArgumentType]


@contextmanager
def held(folder: Path, *, patience_s: float) -> Iterator[leases.Lease]:
    lease = take(folder, patience_s=patience_s)
    yield lease
    lease.release()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "POLL_S", 0.02)
    monkeypatch.setattr(leases, "ENDING_S", 0.1)


def test_taken_renewed_and_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.02)
    (tmp_path / "metrics.jsonl").touch()
    with held(tmp_path, patience_s=1) as lease:
        first = owner(tmp_path)
        assert first.process == os.getpid() and first.run == lease.run_id
        assert lease.problem() == ""
        until(lambda: owner(tmp_path).renewals >= 3)
    assert owner(tmp_path).state == ENDED
    with held(tmp_path, patience_s=1) as again:
        assert again.run_id != first.run
        assert [path.name for path in tmp_path.glob(".owner*")] == [".owner.000002.json"]
    with held(tmp_path / "run", patience_s=1):
        assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "run").exists(), "a folder without a run"


def test_a_living_owner_is_refused(tmp_path: Path) -> None:
    with held(tmp_path, patience_s=1):
        with pytest.raises(ValueError, match="end that run first, or set folder") as error:
            take(tmp_path, patience_s=1)
        assert f"process {os.getpid()} on {os.uname().nodename}, since 2" in str(error.value)
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match="a run that is still going"):
            leases.refuse_living(tmp_path)
    leases.refuse_living(tmp_path)
    leases.refuse_living(tmp_path / "none")


def test_a_dead_owner_is_replaced_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while nobody has waited for the process, so that its entry is still there."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = leases.start_of(process.pid)
    write(tmp_path, left_by(process.pid, started))
    with pytest.raises(ValueError, match=f"process {process.pid} on there"):
        take(tmp_path, patience_s=1)
    process.kill()
    stat = Path(f"/proc/{process.pid}/stat")
    until(lambda: stat.read_text().rsplit(")")[1].split()[0] == "Z")
    leases.refuse_living(tmp_path)
    with held(tmp_path, patience_s=100) as lease:
        assert owner(tmp_path).run == lease.run_id
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "taken over from process" in said and "there" in said
    process.wait()


def test_a_process_id_that_is_used_again_is_no_owner(tmp_path: Path) -> None:
    mine = leases.start_of(os.getpid())
    write(tmp_path, left_by(os.getpid(), str(int(mine) - 1)))
    take(tmp_path, patience_s=100).release()
    write(tmp_path, left_by(os.getpid(), mine), 7)
    with pytest.raises(ValueError, match="still going"):
        take(tmp_path, patience_s=1)


def test_an_owner_on_another_host_is_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The process id is that of a living process here, which says nothing about the other host.
    away = left_by(os.getpid(), leases.start_of(os.getpid()), machine="another")
    write(tmp_path, away)
    began = time.monotonic()
    take(tmp_path, patience_s=0.5).release()
    assert time.monotonic() - began >= 0.5
    said = capsys.readouterr().err
    assert "waiting up to 0.5 s" in said and "owner_timeout_s" in said and "taken over" in said

    write(tmp_path, away, 8)
    timer = threading.Timer(0.3, write, (tmp_path, replace(away, renewals=1), 8))
    timer.start()
    with pytest.raises(ValueError, match="on there, since 2026"):
        take(tmp_path, patience_s=100)
    timer.join()
    write(tmp_path, replace(away, state=ENDED), 8)
    take(tmp_path, patience_s=100).release()


def test_a_file_that_was_never_filled_is_watched(tmp_path: Path) -> None:
    path_of(tmp_path, 3).touch()
    began = time.monotonic()
    take(tmp_path, patience_s=0.4).release()
    assert time.monotonic() - began >= 0.4
    assert newest(tmp_path)[0] in (0, 4)


@pytest.mark.parametrize("dead", [False, True])
def test_of_several_that_start_at_once_one_wins(tmp_path: Path, dead: bool) -> None:
    if dead:
        write(tmp_path, left_by(os.getpid(), "1"))
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    several = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    time.sleep(2)
    (tmp_path / "go").touch()
    said = []
    for child in several:
        assert child.stdout is not None
        said.append(child.stdout.readline())
    for child in several:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    assert sorted(line.split()[0] for line in said) == ["refused"] * 5 + ["won"], said
    won = next(line.split()[1] for line in said if line.startswith("won"))
    assert owner(tmp_path).run == won


def test_a_start_on_a_full_disk_leaves_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, content: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(leases.os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            take(tmp_path, patience_s=1)
    assert newest(tmp_path) == (0, None)
    take(tmp_path, patience_s=100).release()


@pytest.mark.parametrize("anew", [False, True])
def test_a_start_that_was_suspended_takes_no_folder_of_a_later_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    """While it slept, after it had seen an owner that has ended, one run took the folder and ended
    and another lives there. With `anew`, the first has removed the folder, so that the second
    counts from 1 again.
    """
    folder, living = tmp_path / "run", list[leases.Lease]()
    write(folder, left_by(1, "1", state=ENDED), 5)
    awake = leases.has_ended

    def sleeps(path: Path, patience_s: float) -> bool:
        found = awake(path, patience_s)
        if not living:
            monkeypatch.setattr(leases, "has_ended", awake)
            take(folder, patience_s=1).release()
            if not anew:
                write(folder, left_by(1, "1", state=ENDED), 6)
            living.append(take(folder, patience_s=1))
        return found

    monkeypatch.setattr(leases, "has_ended", sleeps)
    with pytest.raises(ValueError, match=f"still going .process {os.getpid()} on"):
        take(folder, patience_s=1)
    (lease,) = living
    assert lease.problem() == "" and list(leases.numbered(folder)) == [lease.claim.number]
    assert lease.claim.number == (1 if anew else 7)
    lease.release()


def test_a_run_notices_that_it_lost_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.02)
    lost = take(tmp_path, patience_s=1)
    write(tmp_path, left_by(77, "1", machine="another"), 2)
    assert "was taken over by process 77 on there" in lost.problem()
    path_of(tmp_path, 1).unlink()
    assert "was taken over" in lost.problem()
    before = path_of(tmp_path, 2).read_bytes()
    time.sleep(0.2)
    lost.release()
    assert path_of(tmp_path, 2).read_bytes() == before  # neither renewed nor released by the loser
    assert json.loads(before)["process"] == 77

    path_of(tmp_path, 2).unlink()
    gone = take(tmp_path, patience_s=1)
    path_of(tmp_path, 1).unlink()
    assert "is gone" in gone.problem()
    gone.release()


def test_a_second_start_is_refused_without_heavy_imports() -> None:
    heavy = "[m for m in ('torch', 'ray', 'transformers', 'deepspeed') if m in sys.modules]"
    code = f"import sys, megarl.cli, megarl.checks.folder_checks; print({heavy})"
    done = python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", ["loop/run", "file", "file/run", "n" * 300, "null\0byte"])
def test_a_folder_that_cannot_be_read_is_not_the_affair_of_its_owner(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    leases.refuse_living(tmp_path / name)


def test_a_living_owner_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    """Its lease file cannot be read, but changes."""
    path = path_of(tmp_path, 4)
    path.write_text('{"format": 2, "beats": 0}')
    timer = threading.Timer(0.3, path.write_text, ('{"format": 2, "beats": 1}',))
    timer.start()
    with pytest.raises(ValueError, match="belongs to a run that is still going"):
        take(tmp_path, patience_s=20)
    timer.join()
    take(tmp_path, patience_s=0.4).release()


def test_further_fields_of_a_lease_are_passed_over() -> None:
    record = left_by(7, "1")
    more = json.loads(record.encode()) | {"colour": "red", "format": 1}
    assert leases.decode_lease(json.dumps(more).encode()) == record
    assert leases.decode_lease(json.dumps(more | {"format": 2}).encode()) is None
    assert leases.decode_lease(b"[]") is None
