"""A run folder has one owner: taking, refusing, taking over, losing and releasing its lease."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.commands import python, until
from support.tiny import sft_config

from megarl.checkpoints import lease as leases
from megarl.checkpoints.lease import ENDED, NAME, Record, read_owner, take
from megarl.checkpoints.run_folder import plan_folder

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
    """What the folder says of its owner."""
    record = read_owner(folder)
    assert record is not None
    return record


def left_by_another(folder: Path, **changes: object) -> Record:
    """A file that a run on another host has left."""
    record = Record("0123456789abcdef", "there", 77, "2026-01-02 03:04:05")
    record = replace(record, **changes)  # pyright: ignore[reportArgumentType]
    beside = folder / "beside"
    beside.write_bytes(record.encode())
    beside.replace(folder / NAME)  # a reader never sees half of it
    return record


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
        until(lambda: owner(tmp_path).heartbeats >= 3)
    assert owner(tmp_path).state == ENDED
    with held(tmp_path, patience_s=1) as again:
        assert again.run_id != first.run
        assert [path.name for path in tmp_path.glob(".owner*")] == [NAME]
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


def test_a_killed_owner_is_replaced_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "go").touch()
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("won")
        with pytest.raises(ValueError, match=f"process {process.pid} on "):
            take(tmp_path, patience_s=100)
        process.kill()
        process.wait()
    leases.refuse_living(tmp_path)
    with held(tmp_path, patience_s=100) as lease:
        assert owner(tmp_path).run == lease.run_id
    lines = capsys.readouterr().err
    assert lines.count("\n") == 1 and f"taken over from process {process.pid} on" in lines


def test_an_owner_on_another_host_is_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    left_by_another(tmp_path)
    began = time.monotonic()
    take(tmp_path, patience_s=0.5).release()
    assert time.monotonic() - began >= 0.5
    lines = capsys.readouterr().err
    assert "waiting up to 0.5 s" in lines and "owner_timeout_s" in lines and "taken over" in lines

    left_by_another(tmp_path)
    timer = threading.Timer(0.3, lambda: left_by_another(tmp_path, heartbeats=1))
    timer.start()
    with pytest.raises(ValueError, match="on there, since 2026"):
        take(tmp_path, patience_s=100)
    timer.join()
    left_by_another(tmp_path, state=ENDED)
    take(tmp_path, patience_s=100).release()
    (tmp_path / NAME).write_text('{"format": 2}')  # of another version of megarl
    began = time.monotonic()
    take(tmp_path, patience_s=0.4).release()
    assert time.monotonic() - began >= 0.4


def test_a_file_system_that_locks_nothing_has_the_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(leases.fcntl, "flock", refuses)
    left_by_another(tmp_path)
    take(tmp_path, patience_s=0.1).release()
    monkeypatch.setattr(leases, "RENEW_S", 0.02)
    with held(tmp_path / "run", patience_s=0.1), pytest.raises(ValueError, match="still going"):
        take(tmp_path / "run", patience_s=10)


def test_a_released_folder_is_free_though_a_forked_child_lives(tmp_path: Path) -> None:
    lease = take(tmp_path, patience_s=1)
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    lease.release()
    take(tmp_path, patience_s=1).release()
    os.kill(child, 9)
    os.waitpid(child, 0)


def test_an_owner_that_ends_while_it_is_watched(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    left_by_another(tmp_path)
    timer = threading.Timer(0.2, lambda: left_by_another(tmp_path, state=ENDED))
    timer.start()
    take(tmp_path, patience_s=100).release()
    timer.join()


@pytest.mark.parametrize("dead", [False, True])
def test_of_several_that_start_at_once_one_wins(tmp_path: Path, dead: bool) -> None:
    if dead:
        left_by_another(tmp_path, machine=leases.machine())
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
        told = "no file can be made there .*No space left.*; set folder to a folder of your own"
        with pytest.raises(ValueError, match=told), plan_folder(sft_config(tmp_path)):
            pass
    assert read_owner(tmp_path) is None and len(os.listdir(tmp_path)) == 1
    take(tmp_path, patience_s=100).release()


def test_a_run_notices_that_it_lost_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspended for longer than another host has waited, it wakes up beside the new owner."""
    monkeypatch.setattr(leases, "RENEW_S", 0.02)
    lost = take(tmp_path, patience_s=1)
    monkeypatch.setattr(leases, "_try_lock", lambda descriptor: True)  # as on another host
    monkeypatch.setattr(leases.os, "uname", lambda: SimpleNamespace(nodename="there"))
    monkeypatch.setattr(leases, "_watch", lambda *_: None)
    new = take(tmp_path, patience_s=1)
    assert f"was taken over by process {os.getpid()} on there" in lost.problem()
    lost.release()
    assert new.problem() == "" and owner(tmp_path).state == "runs"
    (tmp_path / NAME).unlink()
    assert "is gone" in new.problem()
    new.release()


def test_a_second_start_is_refused_without_heavy_imports() -> None:
    heavy = "[m for m in ('torch', 'ray', 'transformers', 'deepspeed') if m in sys.modules]"
    code = f"import sys, megarl.cli, megarl.checkpoints.run_folder; print({heavy})"
    done = python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", ["loop/run", "file", "file/run", "n" * 300, "null\0byte"])
def test_a_folder_that_cannot_be_read_is_not_the_affair_of_its_owner(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    leases.refuse_living(tmp_path / name)
