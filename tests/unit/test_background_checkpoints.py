"""Files of a checkpoint that are kept in memory and written by threads."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from megarl.checkpoints import rank_files
from megarl.checkpoints.background import REPORTS, Writing
from megarl.checkpoints.manifest import digest
from megarl.checkpoints.rank_files import RankFiles


def filled(files: RankFiles) -> None:
    """Two files that are created here, and one that its own library writes."""
    folder = files.folder
    state = {"a": torch.arange(5000), "b": torch.ones(3, 3)}
    torch.save(state, files.create(folder / "state.pt"))  # pyright: ignore[reportArgumentType]
    files.add(folder / "plain", b"0123456789")

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
    assert told == {name: digest(tmp_path / name) for name in ("state.pt", "plain", "own")}
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
    assert (tmp_path / "x").read_bytes() == b"kept in memory, much too much"
    file.write(b", and the rest")
    files.add(tmp_path / "y", b"another")
    assert (tmp_path / "y").read_bytes() == b"another"
    assert files.finish() == {name: digest(tmp_path / name) for name in ("x", "y")}
    assert (tmp_path / "x").read_bytes() == b"kept in memory, much too much, and the rest"


def writing(
    folder: Path,
    rank: int,
    write: Callable[[], Mapping[str, str]],
    committed: list[dict[str, str]] | None = None,
    num_ranks: int = 2,
) -> Writing:
    def commit(digests: Mapping[str, str]) -> None:
        assert committed is not None and not (folder / REPORTS).exists()
        committed.append(dict(digests))

    (folder / REPORTS).mkdir(exist_ok=True)
    return Writing(7, folder=folder, rank=rank, num_ranks=num_ranks, write=write, commit=commit)


def full_disk() -> dict[str, str]:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_checkpoint_is_committed_once_every_rank_has_written(tmp_path: Path) -> None:
    committed, may_write = list[dict[str, str]](), threading.Event()

    def slow() -> dict[str, str]:
        assert may_write.wait(20)
        return {"b": "2"}

    first = writing(tmp_path, 0, lambda: {"a": "1"}, committed)
    second = writing(tmp_path, 1, slow)
    assert first.wait_written(20) == "" and not first.wait_ended(0.5) and committed == []
    may_write.set()
    # Nobody asks: the threads alone commit.
    assert first.wait_ended(20) and committed == [{"a": "1", "b": "2"}]
    assert second.wait_written(20) == "" == first.wait_committed([], 20)


def test_digests_that_were_sent_replace_reports_that_are_not_seen(tmp_path: Path) -> None:
    committed = list[dict[str, str]]()
    first = writing(tmp_path, 0, lambda: {"a": "1"}, committed)
    assert first.wait_written(20) == ""
    assert first.wait_committed([{"a": "1"}, {"b": "2"}], 20) == ""
    assert committed == [{"a": "1", "b": "2"}]


def test_a_rank_that_cannot_write_keeps_the_others_from_committing(tmp_path: Path) -> None:
    committed = list[dict[str, str]]()
    first = writing(tmp_path, 0, lambda: {"a": "1"}, committed)
    second = writing(tmp_path, 1, full_disk)
    assert "No space left" in second.wait_written(20) and second.wait_ended(20)
    assert not list((tmp_path / REPORTS).iterdir())
    first.give_up(20)
    assert first.wait_ended(0) and committed == []


def test_waits_have_an_end(tmp_path: Path) -> None:
    may_write = threading.Event()

    def stuck() -> dict[str, str]:
        may_write.wait(60)
        return {}

    one = writing(tmp_path, 0, stuck, [], num_ranks=1)
    assert one.wait_written(0.1) == "its files were not on the disk after 0 s"
    assert "was not committed" in one.wait_committed([{}], 0.1)
    may_write.set()
    assert one.wait_ended(20)


def test_a_commit_that_fails_is_told(tmp_path: Path) -> None:
    def commit(digests: Mapping[str, str]) -> None:
        raise OSError(errno.EPERM, "another run owns the folder")

    one = Writing(7, folder=tmp_path, rank=0, num_ranks=1, write=lambda: {"a": "1"}, commit=commit)
    assert one.wait_written(20) in ("", "[Errno 1] another run owns the folder")
    assert "another run" in one.wait_committed([{"a": "1"}], 20)


def test_a_half_written_report_is_not_read(tmp_path: Path) -> None:
    committed = list[dict[str, str]]()
    first = writing(tmp_path, 0, lambda: {"a": "1"}, committed)
    half = tmp_path / REPORTS / "rank_00001.writing"
    half.write_text('{"b": ')
    assert first.wait_written(20) == "" and not first.wait_ended(0.3)
    half.write_text(json.dumps({"b": "2"}))
    half.rename(half.with_suffix(".json"))
    assert first.wait_ended(20) and committed == [{"a": "1", "b": "2"}]
