"""Damaged files of a run folder are named, and what programs leave behind is removed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megarl.apps.runs.report import write_report
from megarl.apps.tune.reference_scores import read_scores, write_scores
from megarl.checkpoints import lease, manifest
from megarl.ledger.journal import Reader
from megarl.observe.sinks import read_records
from megarl.system.files import remove_folder
from megarl.system.trace_files import read_traces

DEEP = "[" * 200_000
OWNER = ".owner.json"


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """Whoever waits for the other end of a FIFO is ended."""

    def end(number: int, frame: object) -> None:
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_json_too_deep_to_read_is_damage(tmp_path: Path) -> None:
    (tmp_path / OWNER).write_text(DEEP)
    assert lease.read_owner(tmp_path) is None
    path = tmp_path / "metrics.jsonl"
    for text in (DEEP + "\n", '{"step": ' + "9" * 5000 + "}\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"line 1 is not JSON .*; delete the line"):
            list(read_records(path))
    with pytest.raises(ValueError, match="line 1 is not the first line of a ledger"):
        Reader(path)
    (tmp_path / "rank0.json").write_text(DEEP + "\n")
    assert read_traces(tmp_path) == []
    digests = tmp_path / "digests.json"
    digests.write_text(DEEP)
    assert "digests.json cannot be read" in manifest.damage(tmp_path)
    digests.unlink()
    os.mkfifo(digests)
    assert "digests.json cannot be read" in manifest.damage(tmp_path)


HUGE = b"{'descr': '<f8', 'fortran_order': False, 'shape': (%d, 2)}"


@pytest.mark.parametrize("content", [
    b"PK\x03\x04" + b"x" * 50,
    b"",
    b"nonsense",
    *(b"\x93NUMPY\x01\0v\0" + (HUGE % rows).ljust(117) + b"\n" + bytes(48)
     for rows in (6 * 10**13, 2**62, 2**70, 10**40, -3)),
    b"\x93NUMPY\x01\0v\0" + (b"(" * 100).ljust(117) + b"\n",
])  # fmt: skip
def test_damaged_scores_of_a_reference_are_computed_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    assert read_scores(path, 3) is None
    write_scores(path, np.ones((3, 2)))
    scores = read_scores(path, 3)
    assert scores is not None and scores.tolist() == np.ones((3, 2)).tolist()
    path.write_bytes(path.read_bytes()[:-1])
    assert read_scores(path, 3) is None
    path.unlink()
    os.mkfifo(path)
    assert read_scores(path, 3) is None


@pytest.mark.parametrize(("name", "record"), [
    ("metrics", '{"step": 3, "loss": "x"}'),
    ("metrics", '{"step": 3, "loss": ' + "9" * 400 + "}"),
    ("metrics", '{"step": ' + "9" * 400 + "}"),
    ("evaluations", '{"step": 3, "eval/accuracy": 1, "transcripts": 7}'),
])  # fmt: skip
def test_metrics_of_a_wrong_type_are_named(tmp_path: Path, name: str, record: str) -> None:
    from megarl.checkpoints.run_files import check_run_files

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5, "kl": null}\n')
    (tmp_path / "evaluations.jsonl").write_text('{"step": 1, "eval/x": 1, "transcripts": []}\n')
    check_run_files(tmp_path, None)
    write_report(tmp_path, title="x")
    with (tmp_path / f"{name}.jsonl").open("a") as file:
        file.write(record + "\n")
    match = rf"{name}\.jsonl, line 2 .*; delete the line: sed"
    with pytest.raises(ValueError, match=match):
        check_run_files(tmp_path, None)
    with pytest.raises(ValueError, match=match):
        write_report(tmp_path, title="x")


def test_nobody_else_may_write_files_of_a_command(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    command = [sys.executable, "-m", "megarl", "report", str(tmp_path)]
    for umask, mode in ((0, 0o644), (0o027, 0o640)):
        subprocess.run(command, umask=umask, check=True, capture_output=True)
        found = (tmp_path / "report.html").stat().st_mode
        assert stat.S_IMODE(found) == mode


LEFT_BEHIND = {
    "deep": "for _ in range(1500): os.mkdir('d'); os.chdir('d')",
    "long": "for _ in range(60): os.mkdir('n' * 255); os.chdir('n' * 255)",
    "closed": "os.makedirs('a/b/c'); os.chmod('a/b', 0); os.chmod('a', 0o500)",
    "links": "os.symlink('../kept', 'a'); os.mkdir('b'); os.symlink('../../kept/file', 'b/c');"
    " os.mkfifo('d'); os.symlink('a', 'b/e'); os.link('../kept/file', 'f')",
}


@pytest.mark.parametrize("tree", LEFT_BEHIND)
def test_what_a_program_leaves_is_removed(tree: str, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("1")
    (tmp_path / "kept" / "file").chmod(0o640)
    (tmp_path / "left").mkdir()
    makes = f"import os\nos.chdir({str(tmp_path / 'left')!r})\n{LEFT_BEHIND[tree]}"
    subprocess.run([sys.executable, "-c", makes], check=True)
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("left", "gone", "link", "kept/file"):
        remove_folder(tmp_path / name)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["kept", "link"]
    file = tmp_path / "kept" / "file"
    assert file.read_text() == "1" and file.stat().st_mode & 0o777 == 0o640
