"""A file of a run folder that is lost or broken is told before a run goes on, with a way out."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support.tiny import sft_config

from megarl.checkpoints.progress import Progress, write_progress
from megarl.checkpoints.run_files import check_run_files, outlook
from megarl.ledger.journal import FILE, SEAL, sealed

STEP = 6


def ledger_of(run: str) -> list[bytes]:
    """The lines of a run's ledger."""
    lines, before = [], 0
    for number in range(30):
        record = {"event": "x", "value": number} if number else {"event": "ledger", "run": run}
        line, before = sealed(number, {"format": 1} | record, before)
        lines.append(line)
    return lines


def run_folder(folder: Path) -> Path:
    """The folder of a run with 9 steps and a checkpoint of step 6; returns the checkpoint."""
    lines = ledger_of("this")
    (folder / FILE).write_bytes(b"".join(lines))
    records = "".join(json.dumps({"step": step, "x": step / 3}) + "\n" for step in range(1, 10))
    for name in ("metrics", "evaluations", "transcripts"):
        (folder / f"{name}.jsonl").write_text(records)
    (folder / "recipe.yaml").write_text("folder: x\nsteps: 20\n")
    checkpoint = folder / "checkpoints" / f"step_{STEP:06d}"
    checkpoint.mkdir(parents=True)
    held = b"".join(lines[:20])
    seal = SEAL.search(held[-20:])
    assert seal is not None
    position: dict[str, int | str] = {"bytes": len(held), "crc": seal[1].decode()}
    write_progress(checkpoint, Progress(STEP, 0, 0, "", "", "", ledger=position))
    return checkpoint


def changed(path: Path, line: int, text: str) -> None:
    """Put `text` in the place of a line of a file, from 1."""
    lines = path.read_text().splitlines(keepends=True)
    lines[line - 1] = text
    path.write_text("".join(lines))


def test_a_sound_folder_is_not_remarked_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = run_folder(tmp_path)
    check_run_files(tmp_path, checkpoint)
    check_run_files(tmp_path, None)
    check_run_files(tmp_path / "new", None)
    assert capsys.readouterr().err == ""
    for name in ("metrics.jsonl", FILE):  # torn by a kill
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 10')
    check_run_files(tmp_path, checkpoint)
    said = capsys.readouterr().err
    assert said == f"megarl: {tmp_path / FILE}: cutting off a torn tail of 11 bytes\n"


@pytest.mark.parametrize("name", ["metrics", "evaluations", "transcripts"])
@pytest.mark.parametrize("text", ['{"step": 4, \n', "\0\0\0\n", '{"x": 1}\n', "\n"])
def test_a_broken_line_is_named_and_the_command_removes_it(
    tmp_path: Path, name: str, text: str
) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    checkpoint, path = run_folder(folder), folder / f"{name}.jsonl"
    changed(path, 4, text)
    with pytest.raises(
        ValueError, match=rf"{name}\.jsonl, line 4 .*; delete the line: sed"
    ) as said:
        check_run_files(folder, checkpoint)
    assert "\n" not in str(said.value)
    subprocess.run(str(said.value).partition("line: ")[2], shell=True, check=True)
    check_run_files(folder, checkpoint)
    assert len(path.read_text().splitlines()) == 8


def test_the_part_of_the_transcripts_that_is_read_again_is_looked_at(tmp_path: Path) -> None:
    checkpoint = run_folder(tmp_path)
    for steps in ("000001-000005", "000006-000008"):
        shutil.copy(tmp_path / "transcripts.jsonl", tmp_path / f"transcripts.{steps}.jsonl")
        changed(tmp_path / f"transcripts.{steps}.jsonl", 2, "nonsense\n")
    with pytest.raises(ValueError, match=r"transcripts\.000006-000008\.jsonl, line 2 is not JSON"):
        check_run_files(tmp_path, checkpoint)


@pytest.mark.parametrize("how", ["missing", "garbled", "twice"])
@pytest.mark.parametrize("line", [12, 25])
def test_a_damaged_ledger_can_be_cut_behind_the_checkpoint(
    tmp_path: Path, how: str, line: int
) -> None:
    checkpoint, path = run_folder(tmp_path), tmp_path / FILE
    text = path.read_text().splitlines(keepends=True)[line - 1]
    new = {"missing": "", "garbled": text.replace("x", "y"), "twice": text + text}[how]
    changed(path, line, new)
    at = line + (how == "twice")
    with pytest.raises(ValueError, match=rf"line {at} is damaged .* move the file away") as said:
        check_run_files(tmp_path, checkpoint)
    cut = str(said.value).partition(f"remove it from line {at} on: ")[2]
    assert bool(cut) is (line == 25), "the checkpoint's own part cannot be cut"
    if cut:
        subprocess.run(cut.partition(" (")[0], shell=True, check=True)
        check_run_files(tmp_path, checkpoint)
        assert len(path.read_text().splitlines()) == at - 1


@pytest.mark.parametrize("lines", [ledger_of("this")[:12], ledger_of("that")])
def test_another_runs_ledger_is_refused(tmp_path: Path, lines: list[bytes]) -> None:
    checkpoint = run_folder(tmp_path)
    (tmp_path / FILE).write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match="is not the ledger of checkpoint step_000006"):
        check_run_files(tmp_path, checkpoint)


def test_lost_files_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run_folder(tmp_path)
    (tmp_path / FILE).unlink()
    check_run_files(tmp_path, checkpoint)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("megarl: warning: ")
    for part in ("has no ledger.jsonl", "after step 6", "put it back"):
        assert part in said
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "recipe.yaml").unlink()
    check_run_files(tmp_path, checkpoint)
    assert "has no recipe.yaml, metrics.jsonl and ledger.jsonl" in capsys.readouterr().err
    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    check_run_files(tmp_path, checkpoint)
    assert capsys.readouterr().err == "", "a checkpoint that was copied alone"


@pytest.mark.parametrize("text", [b"steps: [1\n", b"\xff\xfe\0", b"steps\n"])
def test_an_unreadable_recipe_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes
) -> None:
    """It is only compared with; the run writes it anew."""
    checkpoint = run_folder(tmp_path)
    (tmp_path / "recipe.yaml").write_bytes(text)
    check_run_files(tmp_path, checkpoint)
    (said,) = capsys.readouterr().err.splitlines()
    assert "recipe.yaml" in said and "changed settings cannot be told" in said


@pytest.mark.parametrize("name", ["metrics.jsonl", FILE, "transcripts.jsonl"])
def test_what_is_no_file_is_told(tmp_path: Path, name: str) -> None:
    checkpoint = run_folder(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=rf"{name} cannot be read \(.*directory\); move it away"):
        check_run_files(tmp_path, checkpoint)


@pytest.mark.parametrize(("steps", "says"), [(20, "a start continues it"), (6, "is finished")])
def test_check_says_what_a_start_would_do(tmp_path: Path, steps: int, says: str) -> None:
    config = sft_config(tmp_path, steps=steps, resume="auto")
    said = outlook(config, run_folder(tmp_path), 20)
    assert f"holds a run {'that is finished, ' if steps == 6 else ''}at step 6 of {steps}" in said
    assert says in said
    assert outlook(config, None, 20) == ""
