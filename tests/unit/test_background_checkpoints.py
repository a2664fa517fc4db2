"""Files of a checkpoint that are kept in memory and written by threads."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import random
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]

from megarl.checkpoints import rank_files
from megarl.checkpoints.background import Writing
from megarl.checkpoints.checkpoint import Checkpoints
from megarl.checkpoints.lease import Lease
from megarl.checkpoints.manifest import file_digest, remove_unfinished
from megarl.checkpoints.rank_files import RankFiles
from megarl.system import host_memory


def filled(files: RankFiles) -> None:
    """Two files that are created here, and one that its own library writes."""
    folder = files.folder
    state = {"a": torch.arange(5000), "b": torch.ones(3, 3)}
    torch.save(state, files.create(folder / "state.pt"))  # pyright: ignore[reportArgumentType]
    files.create(folder / "plain").write(b"0123456789")

    def write_own() -> list[Path]:
        (folder / "own").write_text("own")
        return [folder / "own"]

    files.add_later(write_own)
    state["a"].zero_()  # as the next step would


@pytest.mark.parametrize("in_background", [False, True])
def test_the_files_are_those_that_were_handed_over(tmp_path: Path, in_background: bool) -> None:
    files = RankFiles(tmp_path, in_background=in_background)
    filled(files)
    assert (tmp_path / "plain").exists() is not in_background
    told = files.finish()
    assert told == {name: file_digest(tmp_path / name) for name in ("state.pt", "plain", "own")}
    assert torch.equal(torch.load(tmp_path / "state.pt")["a"], torch.arange(5000))
    assert (tmp_path / "plain").read_bytes() == b"0123456789"


def test_what_would_fill_the_memory_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 70
    monkeypatch.setattr(rank_files, "LOOK_BYTES", 10)
    monkeypatch.setattr(rank_files, "free_memory", lambda: (free, 100))
    files = RankFiles(tmp_path, in_background=True)
    file = files.create(tmp_path / "x")
    file.write(b"kept in memory, ")
    assert not (tmp_path / "x").exists()
    free = 20
    file.write(b"much too much")
    assert (tmp_path / "x").exists() and not file._kept
    file.write(b", and the rest")
    files.create(tmp_path / "y").write(b"another")
    assert (tmp_path / "y").exists()
    assert files.finish() == {name: file_digest(tmp_path / name) for name in ("x", "y")}
    assert (tmp_path / "x").read_bytes() == b"kept in memory, much too much, and the rest"


@pytest.mark.parametrize("disk", ["direct", "refuses", "refuses later", "writes in parts"])
def test_files_past_the_page_cache_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    """Sizes about those of the buffer, on disks that take O_DIRECT, that do not, and whose writes
    end anywhere.
    """
    monkeypatch.setattr(rank_files, "BUFFER_BYTES", 8192)
    real_open = os.open

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *mode)

    class Raw(io.FileIO):
        def write(self, content: Any) -> int:
            if disk == "refuses later" and fcntl.fcntl(self, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            # The next part begins within a sector, where O_DIRECT fails by itself.
            return super().write(content[: max(1, len(content) // 3)])

    if disk == "refuses":
        monkeypatch.setattr(rank_files.os, "open", refuse)
    elif disk != "direct":
        monkeypatch.setattr(rank_files.os, "fdopen", lambda number, *_, **__: Raw(number, "wb"))
    for size in (0, 1, 8191, 8192, 8193, 3 * 8192, 50_000):
        content = random.Random(size).randbytes(size)
        file = rank_files.DirectFile(tmp_path / str(size))
        for start in range(0, size, 1000):
            file.write(memoryview(content)[start : start + 1000])
        file.sync()
        file.close()
        assert (tmp_path / str(size)).read_bytes() == content


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    """The second of three files is on a full disk."""

    class Raw(io.FileIO):
        def write(self, content: Any) -> int:
            if self.name == "2":
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content[: max(1, len(content) // 2)])

    monkeypatch.setattr(rank_files, "BUFFER_BYTES", 4096)
    opened: list[Raw] = []

    def fdopen(number: int, *_: object, **__: object) -> Raw:
        opened.append(Raw(number, "wb"))
        opened[-1].name = str(len(opened))
        return opened[-1]

    monkeypatch.setattr(rank_files.os, "fdopen", fdopen)
    files = RankFiles(tmp_path, in_background=in_background)
    made = [files.create(tmp_path / str(number)) for number in range(3)]
    for file in made:
        file.write(b"x" * 5000)
    assert ("No space left" in files.problem) is not in_background
    with pytest.raises(OSError, match="No space left"):
        files.finish()
    assert len(opened) == 2 and all(file.closed for file in opened)


def writing(
    store: Store, rank: int, write: Callable[[], Mapping[str, str]],
    committed: list[dict[str, str]] | None = None, num_ranks: int = 2,
) -> Writing:  # fmt: skip
    def commit(digests: Mapping[str, str]) -> None:
        assert committed is not None
        committed.append(dict(digests))

    return Writing(7, store=store, rank=rank, num_ranks=num_ranks, write=write, commit=commit)


def full_disk() -> dict[str, str]:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_checkpoint_is_committed_once_every_rank_has_written() -> None:
    store = HashStore()
    committed, may_write = list[dict[str, str]](), threading.Event()

    def slow() -> dict[str, str]:
        assert may_write.wait(20)
        return {"b": "2"}

    first = writing(store, 0, lambda: {"a": "1"}, committed)
    second = writing(store, 1, slow)
    assert first.wait_written(20) == "" and not first._is_over(0.5) and committed == []
    may_write.set()
    # Nobody asks: the threads alone commit.
    assert first._is_over(20) and committed == [{"a": "1", "b": "2"}]
    assert second.wait_written(20) == "" == first.wait_committed(20)


def test_a_checkpoint_that_is_given_up_is_not_committed() -> None:
    store, committed = HashStore(), list[dict[str, str]]()
    first = writing(store, 0, lambda: {"a": "1"}, committed)
    assert first.wait_written(20) == "" and first.give_up(20) and committed == []


def test_a_rank_that_cannot_write_keeps_the_others_from_committing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, committed = HashStore(), list[dict[str, str]]()
    first = writing(store, 0, lambda: {"a": "1"}, committed)
    second = writing(store, 1, full_disk)
    assert "No space left" in second.wait_written(20) and second._is_over(20)
    # Rank 0 learns of it by itself, and says so where the run ends by an error.
    assert first._is_over(20) and committed == []
    first.linger(20)
    assert "step 7 is not saved: rank 1: [Errno 28] No space" in capsys.readouterr().err
    assert first.wait_written(20) == "" and "No space" in first.wait_committed(20)


def test_before_an_error_ends_the_run_ranks_wait_for_the_commit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = HashStore()
    committed, may_write = list[dict[str, str]](), threading.Event()

    def slow() -> dict[str, str]:
        assert may_write.wait(20)
        return {"a": "1"}

    first = writing(store, 0, slow, committed)
    second = writing(store, 1, lambda: {"b": "2"})
    assert second.wait_written(20) == "" and not second._is_over(0.5)
    threading.Timer(1.5, may_write.set).start()
    first.linger(20)
    second.linger(20)
    assert committed == [{"a": "1", "b": "2"}]
    said = capsys.readouterr().err
    assert "writing the checkpoint of step 7" in said and "step 7 is saved" in said


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_of_a_container_is_seen_from_a_group_below(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm has it: the job has the limit, the step below none."""
    limit, used, cached = host_memory.NAMES[version]
    own = tmp_path / "own"
    own.write_text({1: "9:cpu:/x\n4:memory:/job/step\n", 2: "0::/job/step\n"}[version])
    job = tmp_path / ("memory/job" if version == 1 else "job")
    (job / "step").mkdir(parents=True)
    for folder, most in ((job, 1_000_000), (job / "step", {1: 2**63 - 4096, 2: "max"}[version])):
        (folder / limit).write_text(f"{most}\n")
        (folder / used).write_text("700000\n")
        (folder / "memory.stat").write_text(f"anon 5\n{cached[0]} 100000\n")
    monkeypatch.setattr(host_memory, "OWN", own)
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    assert host_memory.free_memory() == (400_000, 1_000_000)


def test_waits_have_an_end() -> None:
    may_write = threading.Event()

    def stuck() -> dict[str, str]:
        may_write.wait(60)
        return {}

    one = writing(HashStore(), 0, stuck, [], num_ranks=1)
    assert one.wait_written(0.1) == "its files were not on the disk after 0 s"
    assert "was not committed" in one.wait_committed(0.1)
    may_write.set()
    assert one._is_over(20)


def test_a_commit_that_fails_is_told() -> None:
    def commit(digests: Mapping[str, str]) -> None:
        raise OSError(errno.EPERM, "another run owns the folder")

    write = lambda: {"a": "1"}  # noqa: E731
    one = Writing(7, store=HashStore(), rank=0, num_ranks=1, write=write, commit=commit)
    assert one.wait_written(20) in ("", "[Errno 1] another run owns the folder")
    assert "another run" in one.wait_committed(20)


@pytest.mark.parametrize("replaces", [True, False])
def test_a_commit_that_is_overtaken_leaves_the_new_owners_checkpoint(
    replaces: bool, tmp_path: Path
) -> None:
    """A run stands still after its last look at the lease; meanwhile another one takes the folder
    over, removes what is unfinished, and saves the same step.
    """
    finished, final = tmp_path / ".writing_000010.old", tmp_path / "step_000010"
    finished.mkdir()
    if replaces:
        final.mkdir()

    class Owner:
        def require(self) -> None:
            remove_unfinished(tmp_path)
            shutil.rmtree(final, ignore_errors=True)
            final.mkdir()
            (final / "weights").write_text("of the new owner")

    saved = Checkpoints.__new__(Checkpoints)
    saved.folder, saved.keep, saved.owner = tmp_path, 1, cast(Lease, Owner())
    with pytest.raises(OSError):
        saved._commit(finished, final, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000010"]
    assert (final / "weights").read_text() == "of the new owner"
