"""`megarl chat` before a model is loaded: what answers, and what is asked."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.apps.runs.chat import Chat, main, model_of, questions
from megarl.errors import UserError


def test_of_a_run_the_newest_checkpoint_answers(tmp_path: Path) -> None:
    assert model_of(str(tmp_path)) == str(tmp_path)
    assert model_of("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="has no checkpoint yet"):
        model_of(str(tmp_path))
    for step in ("999999", "1000000"):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir()
    assert model_of(str(tmp_path)) == str(tmp_path / "checkpoints" / "step_1000000" / "model")


def test_each_line_is_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(questions("one")) == ["one"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n\n  b  \nc"))
    assert list(questions(None)) == ["a", "b", "c"]


@pytest.mark.parametrize(("words", "said"), [
    (["m", "--max-tokens", "0"], "--max-tokens is at least 1"),
    (["m", "--max-tokens", "x"], "megarl chat: --max-tokens has an invalid int value: 'x'; see"),
    (["m", "--temperature", "-1"], "--temperature 0 to 100"),
    (["m", "--temperature", "nan"], "--temperature 0 to 100"),
    ([], "the following arguments are required: model"),
    (["/nowhere/m", "--prompt", "?"], "there is no such folder here"),
])  # fmt: skip
def test_mistakes_are_one_line(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        main(words)


def test_a_question_without_a_token_is_refused() -> None:
    chat: Any = Chat.__new__(Chat)
    chat._template, chat._tokenizer = None, lambda text: SimpleNamespace(input_ids=[])
    with pytest.raises(UserError, match="knows no character of '漢'"):
        next(chat.reply("漢"))
