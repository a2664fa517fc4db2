"""Verifiers of the house judge what follows a model's thinking."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.environments import ask, opened
from support.tiny import write_tokenizer

from megarl.data.chat_template import TAGS, tags_of
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.codec import Codec
from megarl.environments.response_text import Counted, answer_part
from megarl.environments.verifiers import load_verifier
from megarl.run.evaluate import final_answer
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.verifiers import (
    FormatConfig,
    JsonSchemaConfig,
    LengthConfig,
    NamedVerifierConfig,
    RegexConfig,
)
from megarl.types import Prompt

SETTINGS: dict[str, dict[str, Any]] = {
    "exact_match": {},
    "exact_match after a marker": {"verifier": "exact_match", "answer_after": "="},
    "math": {},
    "numeric": {},
    "numeric after a marker": {"verifier": "numeric", "answer_after": "="},
    "choice": {},
    "regex": {"regex": RegexConfig(pattern=r"is (\w+)")},
    "json_schema": {"json_schema": JsonSchemaConfig(schema='{"type": "integer"}', value="")},
}
SAID = {  # {verifier: (answer, how it is said, how another answer is said)}
    "exact_match": ("7", "7", "5"),
    "exact_match after a marker": ("7", "= 7", "= 5"),
    "math": ("7", "\\boxed{7}", "\\boxed{5}"),
    "numeric": ("7", "It is 7", "It is 5"),
    "numeric after a marker": ("7", "= 7 or so", "= 5 or so"),
    "choice": ("B", "The answer is B.", "The answer is C."),
    "regex": ("7", "it is 7", "it is 5"),
    "json_schema": ("", "```json\n7\n```", "```json\nseven\n```"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_thinking_is_not_judged(name: str) -> None:
    config = EnvironmentConfig(**{"verifier": name, **SETTINGS[name]})
    answer, right, wrong = SAID[name]
    opened = "user: what?\nassistant: <think>\n"
    assert ask(config, answer, f"<think>{wrong}</think>{right}") == 1.0
    assert ask(config, answer, f"<think>{right}</think>{wrong}") == 0.0
    assert ask(config, answer, f"{wrong}\n</think>\n\n{right}", opened) == 1.0
    assert ask(config, answer, f"{right}\n</think>\n\n{wrong}", opened) == 0.0
    assert ask(config, answer, f"<think>{right}") == ask(config, answer, right, opened) == 0.0
    assert ask(config, answer, f"<think>{right}</think>") == 0.0
    assert ask(config, answer, right, f"{opened}\n</think>\n\n") == 1.0  # thinking is turned off
    for thinking in (None, ("<plan>", "</plan>")):
        whole = EnvironmentConfig(**{"verifier": name, **SETTINGS[name]}, thinking=thinking)
        assert ask(whole, answer, right, opened) == 1.0
    assert ask(whole, answer, f"<plan>{wrong}</plan>{right}") == 1.0


def test_a_mixture_judges_what_follows_the_thinking() -> None:
    parts = {"m": NamedVerifierConfig(verifier="math")}
    verify: Any = load_verifier(EnvironmentConfig(mixture=parts))
    prompt = Prompt(0, "", [], "7", {}, "m")
    assert asyncio.run(verify(prompt, "<think>\\boxed{5}</think>\\boxed{7}")) == 1.0


def test_lengths_count_the_thinking() -> None:
    settings = LengthConfig(kind="cosine", longest=10, verifier="math")
    config = EnvironmentConfig(verifier="length", length=settings)
    for text, right in (("<think>5</think>#### 7", True), ("<think>#### 7</think>5", False)):
        found = ask(config, "7", Counted.of(text, 8))
        assert found["length"] == 8 and found["correct"] == right


def test_formats_see_the_thinking_if_it_is_among_their_tags() -> None:
    text = "<think>so</think><answer>7</answer>"
    whole = EnvironmentConfig(verifier="format")
    answer = EnvironmentConfig(verifier="format", format=FormatConfig(tags=("answer",)))
    assert ask(whole, "", text) == ask(answer, "", text) == 1.0
    assert ask(whole, "", "<answer>7</answer>") == 0.0
    assert ask(answer, "", "<think><answer>7</answer></think>7") == 0.0
    assert ask(answer, "", "<think><answer>5</answer></think><answer>7</answer>") == 1.0


def test_a_function_of_a_user_receives_the_whole_response(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from megarl.environments.response_text import answer_part\n"
        "def whole(prompt, response):\n    return float(response.startswith('<think>'))\n"
        "def part(prompt, response):\n    return float(answer_part(response, ()) == '7')\n"
    )
    for name in ("whole", "part"):
        assert ask(EnvironmentConfig(verifier=f"{tmp_path}/own.py:{name}"), "7", "<think>5</think>7") == 1.0  # fmt: skip


@pytest.mark.parametrize(("template", "tags"), [
    ("{{ messages }}", TAGS), (None, TAGS),
    ("{% if '</think>' in content %}{{ content.split('</think>')[-1] }}{% endif %}", TAGS),
    ("[THINK]{{ thoughts }}[/THINK]", ("[THINK]", "[/THINK]")),
    ("<seed:think>{{ thoughts }}</seed:think>", ("<seed:think>", "</seed:think>")),
    ("<thought>\n</thought>", ("<thought>", "</thought>")),
    ("\u25c1think\u25b7\u25c1/think\u25b7", ("\u25c1think\u25b7", "\u25c1/think\u25b7")),
])  # fmt: skip
def test_a_chat_template_names_the_tags(template: str | None, tags: tuple[str, str]) -> None:
    assert tags_of(template) == tags


def test_majorities_count_what_follows_the_thinking() -> None:
    math = EnvironmentConfig(verifier="math")
    assert final_answer("<think>\\boxed{5}</think>\\boxed{7}", math) == "7"
    assert final_answer("\\boxed{7}", math, "assistant: <think>\n") is None
    assert answer_part("<think>5</think>7<think>8", ()) == ""


async def test_tags_of_the_template_reach_the_verifier(tmp_path: Path) -> None:
    """Also where they are special tokens, which decoding leaves out otherwise."""
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.chat_template = "[THINK]{{ messages }}[/THINK]"
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    codec = Codec.of(tokenizer)
    opening, closing = map(codec.tokenizer.token_to_id, ["[THINK]", "[/THINK]"])
    ids = [opening, *codec.encode("5"), closing, *codec.encode("7")]
    assert codec.decode(ids) == "[THINK]5[/THINK]7" and codec.decode([*ids, 1]) == codec.decode(ids)
    async with opened(EnvironmentConfig(), codec=codec) as environment:
        prompts = [Prompt(0, "", [1], one) for one in ("7", "5")]
        given = np.array(ids, np.int32)
        found = [(await environment.score(one, given, 4, False)).correct for one in prompts]
    assert found == [True, False]


def test_tags_are_a_pair() -> None:
    with pytest.raises(ValueError, match="set an opening and a closing tag"):
        EnvironmentConfig(thinking=("<think>",))
