"""`megarl init`: what it writes can be checked and trained at once, and nothing is overwritten."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commands import megarl
from support.tiny import write_model

from megarl.apps.launch.new_task import main, task_files
from megarl.errors import UserError


def test_a_new_task_is_ready_to_be_trained(tmp_path: Path) -> None:
    """Here and, as a plan, on two GPUs; the tiny model has no chat template."""
    mine = tmp_path / "my task"
    assert main([str(mine), f"--model={write_model(tmp_path / 'model')}"]) == 0
    # A command of the tests runs in the repository's folder.
    words = ["--folder", str(mine / "run"), "--prompts.source", str(mine / "problems.jsonl")]
    words += ["--evaluation.prompts.source", str(mine / "held_out.jsonl")]
    done = megarl("run", str(mine / "recipe.yaml"), *words, "--check")
    assert done.code == 0, done.err
    assert "64 prompts" in done.err + done.out
    done = megarl("run", str(mine / "recipe.yaml"), "--dry-run", *words)
    assert done.code == 0 and "megarl run: 1 trainer rank, the fewest that" in done.err, done.err
    assert "--nproc-per-node 1 -m megarl run " in done.out


def test_an_instruct_model_gets_its_chat_template(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert task_files(str(tmp_path))["recipe.yaml"].count("template: chat") == 2
    assert task_files("hub/name")["recipe.yaml"].count("template: chat") == 2


def test_the_reward_of_a_new_task() -> None:
    names: dict[str, Any] = {}
    exec(task_files("m")["my_reward.py"], names)
    prompt = SimpleNamespace(answer="42")
    responses = ("17 plus 25 is 42.", "42, or 43", "", "-42")
    assert [names["score"](prompt, one) for one in responses] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("words", [[], ["a", "b"], ["--model", "m"], ["a", "--model"]])
def test_other_words_are_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"megarl init FOLDER \[--model PATH\]"):
        main(words)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine")
    with pytest.raises(UserError, match=r"has files already, such as recipe.yaml"):
        main([str(tmp_path)])
    with pytest.raises(UserError, match="cannot be written"):
        main([str(tmp_path / "recipe.yaml")])
    assert [one.name for one in tmp_path.iterdir()] == ["recipe.yaml"]
