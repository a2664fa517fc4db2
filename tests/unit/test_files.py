"""What stands in a run folder where megarl keeps a file or a folder of its own, and is none: it is
refused in a line before anything reads or writes it. And JSON that cannot be read to its depth.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.tiny import sft_config

from megarl import cli
from megarl.apps.runs.report import write_report
from megarl.apps.tune.reference_scores import read_scores, write_scores
from megarl.checkpoints import lease, manifest
from megarl.checkpoints.run_folder import check_writable, plan_folder
from megarl.errors import UserError
from megarl.ledger.journal import Reader
from megarl.observe.sinks import read_records
from megarl.system.files import refuse_unfit, remove_folder
from megarl.system.trace_files import read_traces

DEEP = "[" * 200_000
OWNER = ".owner.json"
FILES = (
    *(OWNER, "ledger.jsonl", "metrics.jsonl", "evaluations.jsonl", "transcripts.jsonl"),
    *("transcripts.000001-000002.jsonl", "recipe.yaml", "run.log", "report.html"),
    *("activity/rank0.json", "activity/stacks/rank0.txt", "reference/0a.npy"),
)
FOLDERS = ("activity", "activity/stacks", "checkpoints", "reference", "tensorboard")


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


def run_folder(folder: Path) -> Path:
    """A folder with a file or a folder of every name."""
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).touch()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    (folder / "checkpoints/step_000001").mkdir()
    return folder


ODD: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a symbolic link to nothing": lambda path: path.symlink_to("/nonexistent/x"),
    "a loop of symbolic links": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", [*ODD, "a folder or a file"])
def test_what_is_no_file_or_folder_is_refused_by_every_door(tmp_path: Path, kind: str) -> None:
    run = run_folder(tmp_path / "run")
    config = sft_config(run, steps=1, resume="auto")
    refuse_unfit(run)
    for name in (*FILES, *FOLDERS):
        path = run / name
        aside = tmp_path / "aside"
        path.rename(aside)
        found = kind
        if kind in ODD:
            ODD[kind](path)
        elif name in FILES:
            path.mkdir()
            found = "a folder"
        else:
            path.touch()
            found = "a file"
        with pytest.raises(ValueError) as said:
            refuse_unfit(run)
        message = str(said.value)
        assert message.startswith(f"{path} is {found}, ") and "move it away" in message
        for starts in (True, False):
            with pytest.raises(ValueError, match=name), plan_folder(config, starts=starts):
                pass
        with pytest.raises(ValueError, match=name):
            check_writable(str(run), setting="folder")
        for command in ("status", "report", "ledger"):
            with pytest.raises(UserError, match=name):
                cli.plan([command, str(run)]).run()
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        aside.rename(path)
    refuse_unfit(run)


def test_links_files_of_others_and_files_that_vanish_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(tmp_path / "run")
    (run / "metrics.jsonl").rename(tmp_path / "elsewhere")
    (run / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    (run / "checkpoints").rename(tmp_path / "large disk")
    (run / "checkpoints").symlink_to(tmp_path / "large disk")
    (run / "checkpoints/latest").symlink_to("step_000009")  # what is removed as the run goes on
    os.mkfifo(run / "checkpoints/step_000001/x")
    (run / "notes").mkdir()
    refuse_unfit(run)
    refuse_unfit(tmp_path / "none")
    refuse_unfit(tmp_path / "elsewhere")
    (run / "gone").touch()  # between the list of the folder and the look at it
    listed = list(os.scandir(run))
    (run / "gone").unlink()
    monkeypatch.setattr(os, "scandir", lambda path: iter(listed if path == run else []))
    refuse_unfit(run)


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
    "locked": """
import subprocess
os.makedirs('a/b/c'); open('a/f', 'w').close(); open('a/b/g', 'w').close()
subprocess.run("chattr +i a/f a/b; chattr +a a", shell=True, stderr=-3)""",
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
