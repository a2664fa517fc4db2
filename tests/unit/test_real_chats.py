"""The chat template of a pretrained model: what is read of a chat, and what is trained on, are the
tokens that transformers makes of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.real import TURNS, real_folder

from megarl.data.chat_template import end_of_turn
from megarl.data.demonstrations import load_demonstrations
from megarl.data.preferences import load_preferences
from megarl.data.source import load_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.settings.data import DemonstrationsConfig, PreferencesConfig, PromptsConfig

SYSTEM = {"role": "system", "content": "You answer in one sentence."}
TURN = [
    [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    for asked, said in TURNS
]
CHATS: dict[str, list[dict[str, str]]] = {
    "default system message": TURN[0],
    "several turns": [*TURN[0], *TURN[1], *TURN[2]],
    "own system message": [SYSTEM, *TURN[0], *TURN[1]],
    "ends with a question": [*TURN[0], TURN[1][0]],
    "two replies in a row": [*TURN[0], TURN[2][1], *TURN[1]],
    "lines, signs and other scripts": [
        {"role": "user", "content": "  Print 'é' twice,\nthen 猫.  "},
        {"role": "assistant", "content": "```python\nprint('é' * 2)\n```\n\n猫 🐈‍⬛"},
        *TURN[0],
    ],
}
DEFAULT = "You are a helpful AI assistant named SmolLM"


def ids(tokenizer: Any, chat: Any, *, asks: bool = False) -> list[int]:
    """The tokens that transformers makes of a chat; with `asks`, up to where a reply begins."""
    made = tokenizer.apply_chat_template(chat, add_generation_prompt=asks, return_dict=True)
    return made["input_ids"]


def by_prefixes(tokenizer: Any, chat: Any) -> tuple[list[int], list[int]]:
    """(tokens of a chat up to the end of its last reply; 1 where a token is of a reply or ends
    one), found by tokenising the chat up to every reply, with it and without.
    """
    whole, mask = [], []
    for number, turn in enumerate(chat):
        if turn["role"] != "assistant":
            continue
        before = ids(tokenizer, chat[:number], asks=True)
        after = ids(tokenizer, chat[: number + 1])
        assert after[: len(before)] == before and before[: len(whole)] == whole
        *whole, line_break = after
        assert tokenizer.decode([line_break]) == "\n" and whole[-1] == tokenizer.eos_token_id
        mask += [0] * (len(before) - len(mask)) + [1] * (len(whole) - len(before))
    return whole, mask


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(real_folder("smollm2")), trust_remote_code=False)


def written(folder: Path, **row: Any) -> str:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return str(file)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", CHATS)
def test_what_is_trained_on_is_what_transformers_writes(
    name: str, tokenizer: Any, tmp_path: Path
) -> None:
    chat = CHATS[name]
    source = written(tmp_path, messages=chat)
    config = DemonstrationsConfig(source=source, messages_column="messages", template="chat")
    row = load_demonstrations(config, tokenizer, seed=1).at(0)
    assert row.response_mask is not None
    whole, mask = by_prefixes(tokenizer, chat)
    assert row.prompt_ids + row.response_ids == whole
    assert [0] * len(row.prompt_ids) + row.response_mask == mask
    assert (DEFAULT in tokenizer.decode(whole)) == (chat[0] is not SYSTEM)
    trained = tokenizer.decode([one for one, chosen in zip(whole, mask, strict=True) if chosen])
    replies = [turn["content"] for turn in chat if turn["role"] == "assistant"]
    assert trained == "".join(f"{reply}<|im_end|>" for reply in replies)


@pytest.mark.real
@pytest.mark.slow
def test_prompts_and_pairs_are_what_transformers_writes(tokenizer: Any, tmp_path: Path) -> None:
    """A question alone has the default system message, one with `prompts.system` that one."""
    asked, good = TURN[0]
    source, bad = written(tmp_path, prompt=asked["content"], answer="Paris"), "Lyon."
    for system, before in (("", []), (SYSTEM["content"], [SYSTEM])):
        config = PromptsConfig(source=source, template="chat", system=system)
        prompt = load_prompts(config, tokenizer, seed=1).at(0)
        assert prompt.token_ids == ids(tokenizer, [*before, asked], asks=True)
    source = written(tmp_path, prompt=[asked], chosen=good["content"], rejected=bad)
    config = PreferencesConfig(source=source, template="chat")
    pair = load_preferences(config, tokenizer, seed=1).row(0)
    for response, reply in zip(pair.responses, (good["content"], bad), strict=True):
        chat = [asked, {"role": "assistant", "content": reply}]
        assert (pair.prompt_ids + response, len(pair.prompt_ids)) == (
            by_prefixes(tokenizer, chat)[0],
            len(ids(tokenizer, [asked], asks=True)),
        )
    assert end_of_turn(tokenizer, "chat", {}) == tokenizer.eos_token_id
