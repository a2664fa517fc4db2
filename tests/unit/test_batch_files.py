"""The batches of a run as files: written and read bit by bit, damage and gaps found."""

from __future__ import annotations

import threading
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import UserError
from megarl.rollout import batch_files
from megarl.rollout.batch_files import (
    BatchWriter,
    batch_file,
    batch_of,
    read_batch,
    recorded,
    refuse_gaps,
    write_batch,
)
from megarl.types import Samples, StepBatch


def made(lengths: list[list[int]], step: int = 0, seed: int = 0) -> StepBatch:
    """A random batch: for each mini-batch the lengths of its samples."""
    draw, number, samples = np.random.default_rng(seed), 0, []
    for of_part in lengths:
        parts = []
        for length in of_part:
            parts.append(
                Samples.one(
                    number,
                    draw.integers(0, 1 << 20, length),
                    engine_logprobs=-draw.exponential(size=length),
                    reward=float(draw.normal()),
                )
            )
            number += 1
        samples.append(Samples.concatenate(parts))
    return StepBatch(
        step=step,
        samples=samples,
        micro_batches=[[list(range(len(part)))] for part in lengths],
        rewards=draw.normal(size=number),
        groups=np.arange(number) // 2,
        response_tokens=draw.integers(1, 9, number),
        mini_batch_of=np.repeat(np.arange(len(lengths)), [len(part) for part in lengths]),
        metrics={"reward/mean": 0.1 + 0.2, "odd": float("nan"), "most": float("inf")},
        warning="a warning",
    )


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), max_size=3),
    seed=st.integers(0, 99),
)
def test_a_batch_is_read_bit_by_bit(
    lengths: list[list[int]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    batch = made(lengths, step=seed, seed=seed)
    path = batch_file(tmp_path_factory.mktemp("run"), seed, 3)
    write_batch(path, batch, num_data_ranks=5)
    found, data_ranks = read_batch(path)
    assert data_ranks == 5
    pairs = [(batch, found), *zip(batch.samples, found.samples, strict=True)]
    for whole, part in pairs:
        for name in (one.name for one in fields(whole) if one.name != "samples"):
            wanted, got = getattr(whole, name), getattr(part, name)
            if isinstance(wanted, np.ndarray):
                assert (wanted.dtype, wanted.shape) == (got.dtype, got.shape), name
                assert wanted.tobytes() == got.tobytes(), name
            else:
                assert repr(wanted) == repr(got), name


def test_files_of_a_version_that_told_no_prompts_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple(name for name in batch_files.OF_SAMPLES if name != "prompts")
    monkeypatch.setattr(batch_files, "OF_SAMPLES", names)
    write_batch(batch_file(tmp_path, 0, 0), made([[3, 4]]), num_data_ranks=1)
    monkeypatch.undo()
    found, _ = read_batch(batch_file(tmp_path, 0, 0))
    assert found.samples[0].prompts.tolist() == [-1, -1]


@pytest.mark.parametrize("before", [b"[[[0, ", b"reward", b""], ids=["rows", "metric", "array"])
def test_a_flipped_bit_is_found(before: bytes, tmp_path: Path) -> None:
    path = batch_file(tmp_path, 0, 0)
    write_batch(path, made([[5, 7]]), num_data_ranks=1)
    content = bytearray(path.read_bytes())
    content[content.rindex(before) + len(before) if before else -1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"step_000001.rank_000.safetensors is damaged"):
        read_batch(path)
    keys = [content.replace(key, key[:-1] + b"_", 1) for key in (b"format", b"digest", b"megarl")]
    for torn in (content[:-8], *keys):
        path.write_bytes(torn)
        with pytest.raises(ValueError, match="cannot be read"):
            read_batch(path)


def test_gaps_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set to true"):
        refuse_gaps(tmp_path, 1)
    for step, rank in ((0, 0), (0, 1), (1, 0)):
        write_batch(batch_file(tmp_path, step, rank), made([[3]], step), num_data_ranks=2)
    assert refuse_gaps(tmp_path, 1) == 2
    assert batch_of(tmp_path, 0, 1, 2).step == 0
    with pytest.raises(ValueError, match="is of step 1 and of 2 data ranks, and not of 1"):
        batch_of(tmp_path, 0, 1, 1)
    batch_file(tmp_path, 4, 0).write_bytes(batch_file(tmp_path, 0, 0).read_bytes())
    with pytest.raises(ValueError, match=r"step_000005.* is of step 1"):
        batch_of(tmp_path, 4, 0, 2)
    with pytest.raises(ValueError, match=r"step_000002.rank_001.* set\s+replay.steps to 1"):
        refuse_gaps(tmp_path, 2)
    for rank in (1, 2):
        write_batch(batch_file(tmp_path, 1, rank), made([[3]], 1), num_data_ranks=3)
    with pytest.raises(ValueError, match=r"step_000002.rank_002.* is of a data rank more"):
        refuse_gaps(tmp_path, 2)


def test_a_start_removes_what_counts_no_longer(tmp_path: Path) -> None:
    """A run is resumed after step 1 with two data ranks instead of three; what a killed rank was
    writing is removed too.
    """
    ends = [f"step_000001.rank_00{rank}.safetensors.0123abcd.writing" for rank in (0, 1)]
    for step in range(3):
        for rank in range(3):
            write_batch(batch_file(tmp_path, step, rank), made([[3]], step), num_data_ranks=3)
    for end in ends:
        (tmp_path / "batches" / end).touch()
    BatchWriter(tmp_path, data_rank=0, num_data_ranks=2).start(1)
    assert recorded(tmp_path) == {0: {0, 1, 2}, 1: {1}, 2: {1}}
    assert [(tmp_path / "batches" / end).exists() for end in ends] == [False, True]
    BatchWriter(tmp_path, data_rank=1, num_data_ranks=2).start(1)
    assert recorded(tmp_path) == {0: {0, 1, 2}}


def test_a_batch_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "batches").write_text("a file in the folder's place")
    writer = BatchWriter(tmp_path, data_rank=0, num_data_ranks=1)
    writer.write(made([[3]]))
    assert "set observe.batches to false" in writer.flush()


def test_a_run_that_lost_its_folder_changes_no_batch(tmp_path: Path) -> None:
    path, reasons = batch_file(tmp_path, 1, 0), [""]
    write_batch(path, made([[5]], 1, seed=1), num_data_ranks=1)
    before = path.read_bytes()
    writer = BatchWriter(tmp_path, data_rank=0, num_data_ranks=1, lost=lambda: reasons[0])
    reasons[0] = "the run folder was taken over by another run"
    writer.write(made([[5]], 1, seed=2))
    assert writer.flush() == "the run folder was taken over by another run"
    with pytest.raises(UserError, match="taken over"):
        writer.start(0)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_disk_that_does_not_answer_ends_the_wait_for_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_files, "WRITTEN_WITHIN_S", 0.2)
    answers = threading.Event()

    def hang() -> str:
        answers.wait(120)
        return ""

    writer = BatchWriter(tmp_path, data_rank=0, num_data_ranks=1, lost=hang)
    writer.write(made([[5]]))
    began = time.monotonic()
    assert "was not on the disk" in (said := writer.flush()) and "within 0.2 s" in said
    assert time.monotonic() - began < 60
    assert all(one.daemon for one in threading.enumerate() if one.name == "batch writer")
    answers.set()
    assert writer._writing is not None
    writer._writing.result(60)
    assert writer.flush() == ""
