"""What a chat template makes of the rows of a data set: nothing of a row is left out unsaid, and a
turn of the model ends with one token wherever it is read.
"""

from __future__ import annotations

import gzip
import itertools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from support.chat_templates import CHATML, FAMILIES, tokenizer_of
from support.commands import write_rows
from support.tiny import write_model
from tokenizers import AddedToken, Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast

from megarl.apps.serve.judge import JudgePrompt
from megarl.apps.tools.markup import TurnMarkup
from megarl.data.chat_template import end_of_turn, without_end
from megarl.data.demonstrations import load_demonstrations
from megarl.data.preferences import load_preferences
from megarl.data.source import load_prompts
from megarl.data.tokens import scored_tokens
from megarl.environments.codec import Codec
from megarl.settings.config import RunConfig, from_tree
from megarl.settings.data import (
    DemonstrationsConfig,
    PreferencesConfig,
    PromptsConfig,
    PromptSourceConfig,
)
from megarl.settings.serve import JudgeConfig
from megarl.settings.training import ModelConfig
from megarl.trainer.model_config import load_model_config
from megarl.trainer.plan import stop_tokens

SECTIONS = {
    "prompts": PromptsConfig, "demonstrations": DemonstrationsConfig,
    "preferences": PreferencesConfig,
}  # fmt: skip
ASK = {"role": "user", "content": "rain?"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"city": "Rome"}}}
TEXT_CALL = {"type": "function", "function": {"name": "look", "arguments": '{"city": "Rome"}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "wet", "tool_call_id": "a", "name": "look"}
ANSWER = {"role": "assistant", "content": "yes"}
SYSTEM = {"role": "system", "content": "s"}
MORE = {"role": "user", "content": "sure?"}
NO = {"role": "assistant", "content": "no"}
CHAT = {"template": "chat"}
TALKS = CHAT | {"messages_column": "messages"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
WRITTEN = '<call>look {"city": "Rome"}</call>'


def load(kind: Any, source: str, tokenizer: Any, **settings: Any) -> Any:
    """Rows of a file read as `kind`, the configuration of one of the three kinds of data, says."""
    more = {name: settings.pop(name) for name in ("single", "tools") if name in settings}
    loaders = {PromptsConfig: load_prompts, DemonstrationsConfig: load_demonstrations}
    read: Any = loaders.get(kind, load_preferences)
    return read(kind(source=source, **settings), tokenizer, seed=1, **more)


def written(folder: Path, *rows: Any) -> str:
    return write_rows(folder / "rows.jsonl", rows)


def conversation(folder: Path, tokenizer: Any, messages: Any, **columns: Any) -> list[str]:
    """[prompt, then the stretches that are trained on] of a conversation."""
    (found,) = all_rows(folder, tokenizer, messages, **columns)
    return found


def all_rows(folder: Path, tokenizer: Any, messages: Any, **columns: Any) -> list[list[str]]:
    """The same of each row that a conversation becomes."""
    source = written(folder, {"messages": messages, **columns})
    rows = load(DemonstrationsConfig, source, tokenizer, **TALKS, shuffle=False)
    found = []
    for row in map(rows.at, range(len(rows))):
        pairs = zip(row.response_ids, row.response_mask, strict=True)
        stretches = itertools.groupby(pairs, key=lambda pair: pair[1])
        replies = [[token for token, _ in some] for chosen, some in stretches if chosen]
        found.append([tokenizer.decode(ids) for ids in (row.prompt_ids, *replies)])
    return found


def preference(folder: Path, tokenizer: Any, **row: Any) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of a row."""
    one = load(PreferencesConfig, written(folder, row), tokenizer, template="chat").row(0)
    prompt, chosen, rejected = map(tokenizer.decode, (one.prompt_ids, *one.responses))
    return prompt, chosen, rejected


def prompt(folder: Path, tokenizer: Any, chat: Any, **columns: Any) -> str:
    source = written(folder, {"prompt": chat, "answer": "1", **columns})
    return load(PromptsConfig, source, tokenizer, template="chat").at(0).text


# ------------------------------------------------------------------------- all that a row says


@pytest.mark.parametrize("call", [CALL, TEXT_CALL], ids=["object", "JSON"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_tool_calls_are_trained_on(call: Any, content: Any, tmp_path: Path) -> None:
    calls = {"role": "assistant", **content, "tool_calls": [call]}
    shown, *replies = conversation(
        tmp_path, tokenizer_of(CHATML), [ASK, calls, RESULT, ANSWER], tools=TOOLS
    )
    assert '"name": "look"' in shown
    assert replies == [f"{WRITTEN}<|im_end|>", "yes<|im_end|>"]


def test_tools_and_calls_of_prompts_and_preferences(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    text = prompt(tmp_path, tokenizer, [ASK, CALLS, RESULT], tools=json.dumps(TOOLS))
    assert '"name": "look"' in text and WRITTEN in text and "<result>wet</result>" in text
    shown, chosen, rejected = preference(
        tmp_path, tokenizer, prompt=[ASK], chosen=[CALLS], rejected=[ANSWER], tools=TOOLS
    )
    assert '"name": "look"' in shown
    assert (chosen, rejected) == (f"{WRITTEN}<|im_end|>", "yes<|im_end|>")


LOST: list[tuple[str, list[dict[str, Any]]]] = [
    (r"'reasoning_content' of turn 1 \(from 0\), of role 'assistant'",
     [ASK, ANSWER | {"reasoning_content": "clouds"}]),
    ("'name' of turn 0", [ASK | {"name": "Ann"}, ANSWER]),
    ("'weight' of turn 1", [ASK, ANSWER | {"weight": 0}]),
    ("'train' of turn 1", [ASK, ANSWER | {"train": False}]),
    ("'function_call' of turn 1", [ASK, ANSWER | {"function_call": {"a": 1}}]),
]  # fmt: skip


@pytest.mark.parametrize(("said", "messages"), LOST)
def test_what_the_template_leaves_out_is_refused(
    said: str, messages: list[Any], tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(CHATML)
    lost = f"line 1 .*the chat template does not write {said}.*remove it"
    with pytest.raises(ValueError, match=lost):
        conversation(tmp_path, tokenizer, messages)
    with pytest.raises(ValueError, match=lost):
        prompt(tmp_path, tokenizer, [*messages, ASK])
    with pytest.raises(ValueError, match=lost):
        preference(tmp_path, tokenizer, chosen=messages, rejected=[*messages[:1], CALLS])


def test_a_template_that_leaves_out_more(tmp_path: Path) -> None:
    plain = tokenizer_of(CHATML, CHATML.template.replace("tools", "nothing"))
    with pytest.raises(ValueError, match=r"line 1 .*does not write the tools of the row"):
        conversation(tmp_path, plain, [ASK, ANSWER], tools=TOOLS)
    calls_only = CHATML.template.replace("m.content or ''", "m.content if not m.tool_calls")
    both = CALLS | {"content": "let me see"}
    with pytest.raises(ValueError, match="does not write 'content' of turn 1"):
        conversation(tmp_path, tokenizer_of(CHATML, calls_only), [ASK, both])
    first = CHATML.template.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    two = CALLS | {"tool_calls": [CALL, CALL]}
    with pytest.raises(ValueError, match="does not write 'tool_calls' of turn 1"):
        conversation(tmp_path, tokenizer_of(CHATML, first), [ASK, two])
    deaf = CHATML.template.replace("<result>{{ m.content }}", "<result>")
    with pytest.raises(ValueError, match=r"does not write 'content' of turn 2 .*role 'tool'"):
        conversation(tmp_path, tokenizer_of(CHATML, deaf), [ASK, CALLS, RESULT, ANSWER])


def test_a_key_that_the_template_writes(tmp_path: Path) -> None:
    thinks = CHATML.template.replace(
        "\n{{ m.content",
        "\n{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content",
    )
    messages = [ASK, ANSWER | {"reasoning_content": "clouds", "name": None, "audio": []}]
    found = conversation(tmp_path, tokenizer_of(CHATML, thinks), messages)
    assert found[1:] == ["(clouds)yes<|im_end|>"]


def test_results_in_another_order_than_their_calls(tmp_path: Path) -> None:
    calls = CALLS | {"tool_calls": [CALL | {"id": "a"}, CALL | {"id": "b"}]}
    results = [RESULT, RESULT | {"tool_call_id": "b", "content": "dry"}]
    tokenizer = tokenizer_of(CHATML)
    assert len(conversation(tmp_path, tokenizer, [ASK, calls, *results, ANSWER])) == 3
    with pytest.raises(ValueError, match=r"turn 2 .*is the result of call 'b', which is call 1"):
        conversation(tmp_path, tokenizer, [ASK, calls, *results[::-1], ANSWER])


BROKEN: dict[str, tuple[Any, Any, str]] = {
    "arguments": ([{"function": {"name": "f", "arguments": "{a"}}], TOOLS, "of a call of 'f' are"),
    "a call": (["f"], TOOLS, "a tool call is not"),
    "a name": ([{"function": {"arguments": {}}}], TOOLS, "a tool call is not"),
    "tools": ([CALL], "look", "column 'tools' is a text, not a list of tools"),
    "a tool": ([CALL], ["look"], "column 'tools' is a list, not a list of tools"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_calls_and_tools_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    calls, tools, said = BROKEN[name]
    with pytest.raises(ValueError, match=f"line 1 .*{said}"):
        conversation(
            tmp_path, tokenizer_of(CHATML), [ASK, CALLS | {"tool_calls": calls}], tools=tools
        )


def test_the_column_of_the_tools(tmp_path: Path) -> None:
    source = written(tmp_path, {"prompt": "q", "answer": "1", "functions": TOOLS, "tools": "x"})
    tokenizer = tokenizer_of(CHATML)

    def prompts(column: str, **more: Any) -> Any:
        return load(PromptsConfig, source, tokenizer, **CHAT, tools_column=column, **more)

    named, without = prompts("functions"), prompts("")
    assert '"look"' in named.at(0).text and '"look"' not in without.at(0).text
    assert named.fingerprint != without.fingerprint
    with pytest.raises(ValueError, match=r"no column 'tool'; set prompts\.tools_column to one of"):
        prompts("tool")
    with pytest.raises(ValueError, match=r"beside environment\.tools.*set prompts\.tools_column"):
        prompts("functions", tools=TOOLS)


# --------------------------------------------------------------- nulls that Arrow has filled in


def tool(name: str, **arguments: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": arguments}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def calling(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


CITY, DAY = {"city": {"type": "string"}}, {"day": {"type": "object", "enum": ["Mon"]}}
FILLED = [  # rows whose tools and calls each have keys that those of others lack
    {"prompt": [asked], "answer": "1", "messages": [asked, *said], "tools": tools}
    | {"chosen": [asked, *said], "rejected": [asked, *said[:-1], NO]}
    for asked, said, tools in (
        (ASK, [calling("look", city="Rome")], [tool("look", **CITY)]),
        (MORE, [calling("at", day={"n": 1}), RESULT, calling("now")], [tool("at", **DAY)]),
        (ASK, [ANSWER], []),
        (ASK, [calling("at", day={"m": [{"k": 0}, {"l": 1}]})], [tool("now"), tool("at", **DAY)]),
    )
]


def tokens_of(source: str, tokenizer: Any) -> list[list[list[int]]]:
    """Tokens of the prompts, conversations and pairs of each row."""
    read: dict[str, Any] = {"source": source, "tokenizer": tokenizer, "shuffle": False}
    asked = load(PromptsConfig, **read, **CHAT)
    talks = load(DemonstrationsConfig, **read, **TALKS)
    pairs = load(PreferencesConfig, **read, **CHAT, prompt_column="")
    return [
        [list(one) for one in (asked.at(n).token_ids, talks.at(n).prompt_ids,
         talks.at(n).response_ids, pairs.row(n).prompt_ids, *pairs.row(n).responses)]
        for n in range(len(asked))
    ]  # fmt: skip


@pytest.mark.parametrize("parts", [False, True])
def test_the_same_chat_from_json_and_from_arrow(parts: bool, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = json.loads(json.dumps(FILLED))
    if parts:
        for number, turn in enumerate(t for row in rows for t in row["messages"] if t["content"]):
            more = {f"cache{number % 2}": {"ttl": 5}}
            turn["content"] = [{"type": "text", "text": turn["content"]} | more]
    tokenizer = tokenizer_of(CHATML)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    want = tokens_of(written(tmp_path, *rows), tokenizer)
    shown = "".join(tokenizer.decode(ids) for row in want for ids in row)
    assert "null" not in shown and '"k": 0}, {"l": 1' in shown
    for source in ("rows.parquet", "saved", "*.parquet"):
        found = tokens_of(str(tmp_path / source), tokenizer)
        for number, (row, other) in enumerate(zip(want, found, strict=True)):
            assert list(map(tokenizer.decode, other)) == list(map(tokenizer.decode, row)), number


def test_a_null_that_is_meant_stays(tmp_path: Path) -> None:
    """In files of JSON, and in the text of JSON, which Arrow does not fill."""
    tools = [tool("look", city={"type": "string", "default": None})]
    talk = [ASK, calling("look", city=None)]
    inside = [talk[0], json.loads(json.dumps(talk[1]))]
    inside[1]["tool_calls"][0]["function"]["arguments"] = '{"city": null}'
    wanted, *_ = conversation(tmp_path, tokenizer_of(CHATML), talk, tools=tools)
    assert '"default": null' in wanted
    line = json.dumps({"messages": talk, "tools": tools})
    (tmp_path / "rows.json").write_text(f"[{line}]")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    for number, messages in enumerate((json.dumps(talk), inside)):
        table = pyarrow.Table.from_pylist([{"messages": messages, "tools": json.dumps(tools)}])
        pyarrow.parquet.write_table(table, tmp_path / f"rows{number}.parquet")
    for name in ("rows.jsonl", "rows.json", "rows.jsonl.gz", "rows0.parquet", "rows1.parquet"):
        row = load(DemonstrationsConfig, str(tmp_path / name), tokenizer_of(CHATML), **TALKS).at(0)
        shown = tokenizer_of(CHATML).decode([*row.prompt_ids, *row.response_ids])
        assert shown == f'{wanted}<call>look {{"city": null}}</call><|im_end|>'


HALF = "a\ud800"
HALVES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (PromptsConfig, {"prompt": json.dumps([ASK | {"content": HALF}])}, CHAT),
    (PromptsConfig, {"answer": HALF}, {}),
    (PromptsConfig, {"tools": [tool(HALF)]}, CHAT),
    (DemonstrationsConfig, {"text": HALF}, {"text_column": "text"}),
    (DemonstrationsConfig, {"messages": [ASK, calling("f", city=HALF)]}, TALKS),
    (PreferencesConfig, {"chosen": [NO | {"content": HALF}]}, CHAT),
]
"""(kind of data, what a row then has, settings)"""


@pytest.mark.parametrize(("kind", "change", "settings"), HALVES)
def test_half_of_a_character_is_named(
    kind: Any, change: Any, settings: Any, tmp_path: Path
) -> None:
    row: dict[str, Any] = {"prompt": "q", "answer": "1", "response": "a", "text": "abc"}
    row |= {"chosen": "b", "rejected": "c", "messages": [ASK, ANSWER]}
    source = written(tmp_path, row, row | change)
    place = r"^\S+rows.jsonl, line 2 \(row 1, .*\)"
    with pytest.raises(ValueError, match=rf"{place}: a text holds half .*\(U\+D800\)"):
        load(kind, source, tokenizer_of(CHATML), **settings)


# ------------------------------------------------------------------- preferences: prompt + side

BEFORE = "".join(
    f"<|im_start|>{role}\n{text}<|im_end|>\n"
    for role, text in (("system", "s"), ("user", "rain?"), ("assistant", "yes"), ("user", "sure?"))
)
JOINED: dict[str, tuple[Any, list[Any]]] = {
    "goes on": ([SYSTEM, ASK], [ANSWER, MORE]),
    "last turn": ([SYSTEM, ASK, ANSWER, MORE], []),
    "whole": ([SYSTEM, ASK], [SYSTEM, ASK, ANSWER, MORE]),
    "whole, of more turns": ([SYSTEM, ASK, ANSWER, MORE], [SYSTEM, ASK, ANSWER, MORE]),
    "its end": ([SYSTEM, ASK], [ASK, ANSWER, MORE]),
    "its last turns": ([SYSTEM, ASK, ANSWER, MORE], [ANSWER, MORE]),
    "system apart": ([SYSTEM], [ASK, ANSWER, MORE]),
    "first question as a text": ("rain?", [SYSTEM, ASK, ANSWER, MORE]),
    "last question as a text": ("sure?", [SYSTEM, ASK, ANSWER, MORE]),
    "null": (None, [SYSTEM, ASK, ANSWER, MORE]),
}


@pytest.mark.parametrize("name", JOINED)
def test_a_response_goes_on_from_the_prompt(name: str, tmp_path: Path) -> None:
    asked, side = JOINED[name]
    row = {"prompt": asked, "chosen": [*side, ANSWER], "rejected": [*side, NO]}
    found = preference(tmp_path, tokenizer_of(CHATML), **row)
    assert found == (f"{BEFORE}<|im_start|>assistant\n", "yes<|im_end|>", "no<|im_end|>")


def test_a_response_to_another_prompt(tmp_path: Path) -> None:
    row = {"prompt": "snow?", "chosen": [ASK, ANSWER], "rejected": [ASK, NO]}
    tokenizer, said = tokenizer_of(CHATML), "column 'chosen' is a conversation that neither"
    with pytest.raises(ValueError, match=rf"line 1 .*{said}.*set preferences\.prompt_column"):
        preference(tmp_path, tokenizer, **row)
    source = written(tmp_path, row)
    one = load(PreferencesConfig, source, tokenizer, template="chat", prompt_column="").row(0)
    assert "rain?" in tokenizer.decode(one.prompt_ids)
    goes_on = {"chosen": [ANSWER, MORE, ANSWER], "rejected": [ANSWER, MORE, NO]}
    with pytest.raises(ValueError, match=r"no column 'prompt'; set preferences\.prompt_column"):
        preference(tmp_path, tokenizer, **goes_on)


# ------------------------------------------------------------------------ a template's variables

OFF = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
THINKS = CHATML.template.replace("assistant\n", f"assistant\n{OFF}").replace(
    "\n{{ m.content", "\n{% if m.role == 'assistant' %}" + OFF + "{% endif %}{{ m.content"
)
"""As Qwen3's: with enable_thinking false, a reply follows thoughts that are over."""


@pytest.mark.parametrize("value", [None, True, False])
def test_variables_are_read_wherever_a_template_writes(value: bool | None, tmp_path: Path) -> None:
    tokenizer: Any = tokenizer_of(CHATML, THINKS)
    thoughts = "<think></think>" if value is False else ""
    set_to: dict[str, Any] = {} if value is None else {"enable_thinking": value}
    read: dict[str, Any] = {"template": "chat", "template_variables": set_to}

    source = written(tmp_path, {"prompt": "rain?", "answer": "1", "response": "yes"})
    asked = load(PromptsConfig, source, tokenizer, **read).at(0).text
    assert asked == f"<|im_start|>user\nrain?<|im_end|>\n<|im_start|>assistant\n{thoughts}"
    part: dict[str, Any] = {"source": source, "weight": 1.0, "template_variables": set_to}
    mixture = (PromptSourceConfig(**part),)
    assert load(PromptsConfig, "", tokenizer, sources=mixture, **CHAT).at(0).text == asked
    pair = load(DemonstrationsConfig, source, tokenizer, **read).at(0)
    assert tokenizer.decode(pair.prompt_ids) == asked
    source = written(tmp_path, {"messages": [ASK, ANSWER]})
    talk = load(DemonstrationsConfig, source, tokenizer, **read).at(0)
    assert (talk.prompt_ids, talk.response_ids) == (pair.prompt_ids, pair.response_ids)
    source = written(tmp_path, {"prompt": "rain?", "chosen": "yes", "rejected": "no"})
    one = load(PreferencesConfig, source, tokenizer, **read).row(0)
    assert (one.prompt_ids, one.responses[0]) == (pair.prompt_ids, pair.response_ids)

    judge = JudgePrompt(tokenizer, JudgeConfig(template_variables=set_to), "{response}")
    assert tokenizer.decode(judge.ids({"response": "rain?"})) == asked
    markup = TurnMarkup(tokenizer, TOOLS, set_to)
    assert markup.results("<|im_end|>", ["look"], ["wet"]).endswith(f"assistant\n{thoughts}")


def test_a_variable_that_the_template_does_not_read(tmp_path: Path) -> None:
    more = "{% set date = date or strftime_now('%Y') %}{{ bos_token }}" + THINKS
    known = "its variables are date, enable_thinking; set one of them"
    for template, name, said in (
        (more, "enable_thinkin", rf"has 'enable_thinkin', which is no variable .*; {known}"),
        (more, "messages", f"has 'messages', which is no variable .*; {known}"),
        (CHATML.template, "date", "is set, but the chat template has no variables; leave it out"),
    ):
        tokenizer = tokenizer_of(CHATML, template)
        read: dict[str, Any] = {"template": "chat", "template_variables": {name: False}}
        source = written(tmp_path, {"prompt": "q", "answer": "1", "response": "a"})
        for section, kind in SECTIONS.items():
            with pytest.raises(ValueError, match=rf"^{section}\.template_variables {said}$"):
                load(kind, source, tokenizer, **read)
        with pytest.raises(ValueError, match=rf"^judge\.template_variables {said}$"):
            JudgePrompt(tokenizer, JudgeConfig(template_variables={name: False}), "{response}")


@pytest.mark.parametrize("kind", SECTIONS.values())
def test_other_variables_are_other_data(kind: Any, tmp_path: Path) -> None:
    row = {"prompt": "q", "answer": "1", "response": "a", "chosen": "a", "rejected": "b"}
    source, tokenizer, found = written(tmp_path, row), tokenizer_of(CHATML, THINKS), set()
    for one in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        rows = load(kind, source, tokenizer, template="chat", template_variables=one)
        found.add(rows.fingerprint)
    assert len(found) == 3


DATED = "{{ strftime_now('%d %B') }}\n" + CHATML.template


def test_another_day_is_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a template writes the date, the rows are the same on another day, and a run goes on."""
    row: dict[str, Any] = {"prompt": "q", "answer": "1", "response": "a", "chosen": "a"}
    row |= {"rejected": "b", "messages": [ASK, ANSWER], "text": "t", "good": True}
    other = {"prompt": "r", "response": "b", "text": "u", "good": False}
    of_kto: Any = {"response_column": "text", "label_column": "good", "single": True}
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (PromptsConfig, {}), (PromptsConfig, {"sources": True}),
        (DemonstrationsConfig, {}), (DemonstrationsConfig, {"messages_column": "messages"}),
        (PreferencesConfig, {}), (PreferencesConfig, {"single": True}), (PreferencesConfig, of_kto),
    ]  # fmt: skip

    def digests(
        day: int, template: str = DATED, changed: dict[str, Any] | None = None
    ) -> tuple[list[str], list[str]]:
        """(fingerprints, prompts) of data of all kinds."""
        clock = type("clock", (), {"now": staticmethod(lambda: datetime(2026, 5, day))})
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
        made = {} if changed is None else changed
        source = written(tmp_path, row | made, row | other)
        tokenizer: Any = tokenizer_of(CHATML, template)
        found, shown = [], []
        for kind, more in kinds:
            if "sources" in more:
                more = {"sources": (PromptSourceConfig(source=source, weight=1.0),)}
            place = "" if "sources" in more else source
            rows = load(kind, place, tokenizer, template="chat", shuffle=False, **more)
            first = rows.at(0)
            found.append(rows.fingerprint)
            ids = first.token_ids if kind is PromptsConfig else first.prompt_ids
            shown.append(tokenizer.decode(ids))
        return found, shown

    today, texts = digests(2)
    assert all("02 May" in text for text in texts)
    later, texts = digests(3)
    assert later == today and all("03 May" in text for text in texts)
    for template, changed in (
        ("! " + DATED, None), (DATED, {"prompt": "p", "messages": [ASK, NO]}),
    ):  # fmt: skip
        found, _ = digests(2, template, changed)
        assert all(one != before for one, before in zip(found, today, strict=True))
    found, _ = digests(2, DATED, {"rejected": "c", "text": "w"})
    same = [one == before for one, before in zip(found, today, strict=True)]
    assert same == [True] * 4 + [False] * 3


def test_tools_are_shown_with_one_set_of_variables() -> None:
    asked: dict[str, Any] = {"source": "a", "template": "chat"}
    thinks = asked | {"template_variables": {"thinking": True}}
    tree: dict[str, Any] = {"model": {"path": "m"}, "folder": "f", "prompts": thinks}
    tree["environment"] = {"tools": {"functions": ["a.py:f"]}}
    with pytest.raises(ValueError, match=r"template_variables of prompts and evaluation.*set the"):
        from_tree(RunConfig, tree | {"evaluation": {"prompts": asked}}, where="x")
    assert from_tree(RunConfig, tree | {"evaluation": {"prompts": thinks}}, where="x")


# ------------------------------------------------------------- thoughts that a template has opened

BODY = "{% for m in messages %}<|im_start|>{{ m.role }}\n{WRITTEN}<|im_end|>\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
OPENING = {
    # As DeepSeek-R1's: what follows the thoughts is all that is written of a reply.
    "drops": "{{ m.content.split('</think>')[-1] }}",
    # As Qwen3-Thinking's: the thoughts are taken out of a reply and written in a form of its own.
    "writes": "{% if m.role == 'assistant' %}{% set t = m.reasoning_content or (m.content.split("
    "'</think>')[0].split('<think>')[-1] if '</think>' in m.content else '') %}<think>\n"
    "{{ t.strip('\n') }}\n</think>\n\n{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}",
    "as it is": "{{ m.content }}",
    "twice": "{% if m.role == 'assistant' %}<think>\n</think>{% endif %}{{ m.content }}",
}
"""{name: how a template that opens the thoughts itself writes a message}"""
OPENED = "<|im_start|>user\nrain?<|im_end|>\n<|im_start|>assistant\n<think>\n"
THOUGHTS = ("<think>\nclouds\n</think>\n\nyes", "clouds\n</think>\n\nyes")


def opening(name: str) -> Any:
    return tokenizer_of(CHATML, BODY.replace("{WRITTEN}", OPENING[name]) + ASKS)


def pair_of(folder: Path, tokenizer: Any, said: Any) -> list[str]:
    source = written(folder, {"prompt": "rain?", "response": said})
    row = load(DemonstrationsConfig, source, tokenizer, template="chat").at(0)
    return [tokenizer.decode(row.prompt_ids), tokenizer.decode(row.response_ids)]


def in_every_kind(folder: Path, tokenizer: Any, said: str) -> list[str]:
    """[prompt, response] of "rain?" and a reply, the same in pairs, conversations and
    preferences.
    """
    found, reply = pair_of(folder, tokenizer, said), {"role": "assistant", "content": said}
    assert conversation(folder, tokenizer, [ASK, reply]) == found
    worse = reply | {"content": f"{said}no"}
    chosen = preference(folder, tokenizer, prompt="rain?", chosen=[reply], rejected=[worse])
    assert [*chosen[:2]] == found
    return found


@pytest.mark.parametrize("said", THOUGHTS, ids=["its tag", "no tag"])
@pytest.mark.parametrize("name", OPENING)
def test_thoughts_are_opened_once(name: str, said: str, tmp_path: Path) -> None:
    found = in_every_kind(tmp_path, opening(name), said)
    assert found == [OPENED, f"{THOUGHTS[1]}<|im_end|>"]


GAP = CHATML.template.replace("{{ m.content", "{{ ' ' if m.role == 'assistant' }}{{ m.content")
WRITES = {  # {name: (template, response, what is trained on)}
    "a space before": (tokenizer_of(FAMILIES["mistral"]), "a", " a</s>"),
    "a space of the prompt": (
        tokenizer_of(CHATML, GAP + "{{ ' ' if add_generation_prompt }}"), "a", "a<|im_end|>"
    ),
    "trimmed": (tokenizer_of(FAMILIES["llama"]), "  a \n", "a<|eot_id|>"),
    "trimmed, ended": (tokenizer_of(FAMILIES["gemma"]), " a<end_of_turn>", "a<end_of_turn>"),
    "words before": (
        tokenizer_of(CHATML, CHATML.template.replace("{{ m.content or", "{{ '<final>' if m.role =="
        " 'assistant' }}{{ m.content or")), "a ", "<final>a <|im_end|>"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_a_reply_is_trained_on_as_the_template_writes_it(name: str, tmp_path: Path) -> None:
    tokenizer, said, want = WRITES[name]
    assert in_every_kind(tmp_path, tokenizer, said)[1] == want


CALL_CHAT = [ANSWER | {"tool_calls": [CALL]}]
STORED: dict[str, tuple[Any, str]] = {  # {name: (response, what is trained on)}
    "a list": ([ANSWER], "yes<|im_end|>"),
    "a call": (json.dumps(CALL_CHAT), f"yes{WRITTEN}<|im_end|>"),
    "no chat": ('[{"a": 1}]', '[{"a": 1}]<|im_end|>'),
}


@pytest.mark.parametrize("name", STORED)
def test_a_response_may_be_a_chat_of_one_turn(name: str, tmp_path: Path) -> None:
    tokenizer, (said, want) = tokenizer_of(CHATML), STORED[name]
    assert pair_of(tmp_path, tokenizer, said)[1] == want
    found = preference(tmp_path, tokenizer, prompt="rain?", chosen=said, rejected="no")
    assert found[1] == want
    if name == "no chat":
        return
    data = {"prompt": "rain?", "response": said, "chosen": said, "rejected": "no", "good": True}
    source = written(tmp_path, data)
    for column, kind in (("response", DemonstrationsConfig), ("chosen", PreferencesConfig)):
        with pytest.raises(ValueError, match=f"line 1 .*column '{column}' holds a chat; set .*cha"):
            load(kind, source, tokenizer, template="rendered")


@pytest.mark.parametrize("turns", [[ANSWER, MORE, ANSWER], [ASK], [ASK, ANSWER], [RESULT, ANSWER]])
def test_a_response_of_other_turns_is_refused(turns: Any, tmp_path: Path) -> None:
    said = r"line 1 .*column 'response' is a chat of .*demonstrations\.messages_column"
    for value in (turns, json.dumps(turns)):
        with pytest.raises(ValueError, match=said):
            pair_of(tmp_path, tokenizer_of(CHATML), value)


def test_a_pair_that_the_template_writes_in_another_way(tmp_path: Path) -> None:
    moved = CHATML.template.replace("|im_start|>{{ m.role }}", "|im_start|>{{ messages|length }}")
    with pytest.raises(ValueError, match=r"line 1 .*writes the prompt in another way once"):
        pair_of(tmp_path, tokenizer_of(CHATML, moved), "a")
    deaf = CHATML.template.replace("m.content or ''", "m.content if m.role == 'user'")
    with pytest.raises(ValueError, match=r"line 1 .*does not write 'content' of turn 1"):
        pair_of(tmp_path, tokenizer_of(CHATML, deaf), "a")


@pytest.mark.parametrize("name", ["drops", "as it is"])
def test_a_reply_without_thoughts_where_they_are_opened(name: str, tmp_path: Path) -> None:
    """It is trained on as the template writes it, which is said."""
    tokenizer = opening(name)
    source = written(tmp_path, {"prompt": "rain?", "response": "yes"})
    rows = load(DemonstrationsConfig, source, tokenizer, **CHAT)
    assert "writes the thoughts of 1 replies of demonstrations, or that there are" in rows.warning
    prompt = OPENED.removesuffix("<think>\n")
    assert in_every_kind(tmp_path, tokenizer, "yes") == [prompt, "yes<|im_end|>"]
    assert pair_of(tmp_path, tokenizer, "<think></think>yes")[1] == "</think>yes<|im_end|>"
    thinks = {"role": "assistant", "content": THOUGHTS[0]}
    pair = preference(tmp_path, tokenizer, prompt=[ASK], chosen=[thinks], rejected=[ANSWER])
    assert pair == (prompt, f"<think>\n{THOUGHTS[1]}<|im_end|>", "yes<|im_end|>")


def test_thoughts_that_the_template_writes(tmp_path: Path) -> None:
    """In a form of its own, from a key of their own; empty ones where a reply has none."""
    tokenizer = opening("writes")
    thinks = ANSWER | {"reasoning_content": "clouds"}
    assert conversation(tmp_path, tokenizer, [ASK, thinks])[1] == f"{THOUGHTS[1]}<|im_end|>"
    assert conversation(tmp_path, tokenizer, [ASK, ANSWER])[1] == "\n</think>\n\nyes<|im_end|>"
    with pytest.raises(ValueError, match="does not write 'reasoning_content' of turn 1"):
        conversation(tmp_path, opening("drops"), [ASK, thinks])
    thought = {"role": "assistant", "content": THOUGHTS[0]}
    rows = all_rows(tmp_path, opening("drops"), [ASK, thought, MORE, thought])
    assert [trained for _, *trained in rows] == [[f"{THOUGHTS[1]}<|im_end|>"]] * 2


# ------------------------------------------------------------------ one end of a turn everywhere


def test_a_tag_that_is_an_added_token_ends_no_turn() -> None:
    template = CHATML.template.replace("{% endfor %}<|im_end|>", "{% endfor %}</a><|im_end|>")
    tokenizer: Any = tokenizer_of(CHATML, template)
    tokenizer.add_tokens([AddedToken("</a>", special=False, normalized=False)])
    assert "</a><|im_end|>" in tokenizer.apply_chat_template(
        [{"role": "assistant", "content": "yes"}], tokenize=False
    )
    assert end_of_turn(tokenizer, "chat") == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_ends_with_one_token_everywhere(name: str, tmp_path: Path) -> None:
    """In demonstrations of both kinds, preferences, what a reward model reads, a tool session's
    turns, and the tokens that stop an engine.
    """
    family = FAMILIES[name]
    tokenizer: Any = tokenizer_of(family)
    end = tokenizer.convert_tokens_to_ids(family.end)
    gap = " " if name == "mistral" else ""  # which its template puts before an answer
    want = [*tokenizer(f"{gap}yes", add_special_tokens=False).input_ids, end]
    assert end_of_turn(tokenizer, "chat") == end == end_of_turn(tokenizer, "rendered")
    assert end_of_turn(tokenizer, "none") == tokenizer.eos_token_id

    source = written(tmp_path, {"prompt": "rain?", "response": "yes"})
    pair = load(DemonstrationsConfig, source, tokenizer, template="chat").at(0)
    assert pair.response_ids == want
    talk = [ASK, ANSWER, MORE, ANSWER]
    assert conversation(tmp_path, tokenizer, talk)[1:] == [f"{gap}yes{family.end}"] * 2
    source = written(tmp_path, {"prompt": [ASK], "chosen": [ANSWER], "rejected": [NO]})
    one = load(PreferencesConfig, source, tokenizer, template="chat").row(0)
    assert (one.prompt_ids, one.responses[0]) == (pair.prompt_ids, want)

    shown = tokenizer.decode(pair.prompt_ids)
    (scored,) = scored_tokens(
        tokenizer, [shown], [f"{gap}yes"], "rendered", end_of_turn(tokenizer, "rendered")
    )
    assert scored == [*pair.prompt_ids, *want]
    model = ModelConfig(path=str(write_model(tmp_path / "model", vocab_size=300)))
    hf = load_model_config(model)
    assert end in stop_tokens(tokenizer, model, hf, [end])
    more = {end, tokenizer.eos_token_id}
    GenerationConfig(eos_token_id=5).save_pretrained(model.path)
    assert set(stop_tokens(tokenizer, model, hf, [end])) == {5, *more}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", ["chatml", "llama", "gemma"])
def test_a_session_does_not_read_the_end_of_a_turn(name: str, special: bool) -> None:
    """Also where the tokenizer does not call the token a special one."""
    tokenizer: Any = tokenizer_of(FAMILIES[name])
    if not special:
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        for token in described["added_tokens"]:
            token["special"] = token["content"] != FAMILIES[name].end
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(described)), eos_token=FAMILIES[name].eos
        )
        tokenizer.chat_template = FAMILIES[name].template
    ids = tokenizer(f"yes{FAMILIES[name].end}", add_special_tokens=False).input_ids
    assert len(ids) == 4
    for whole in (True, False):
        assert Codec.of(tokenizer, whole=whole).decode(np.array(ids, np.int32)) == "yes"


def test_a_session_of_tools_ends_a_turn_once() -> None:
    """The template writes more behind the end of a turn than the model did."""
    twice = CHATML.template.replace("endfor %}<|im_end|>", "endfor %}<|im_end|><|endoftext|>")
    markup = TurnMarkup(tokenizer_of(CHATML, twice), TOOLS)
    follows = markup.results("<call>look {}</call><|im_end|>", ["look"], ["wet"])
    assert follows.startswith("<|endoftext|>\n<|im_start|>user\n<result>wet")


def test_bare_texts_for_a_chat_model_are_said(tmp_path: Path) -> None:
    """Not of a text that somebody has rendered, and not of a model without a template."""

    def warnings(prompt: str, tokenizer: Any) -> list[str]:
        row = {"prompt": prompt, "answer": "a", "response": "b", "chosen": "b", "rejected": "c"}
        source = written(tmp_path, row)
        return [load(kind, source, tokenizer).warning for kind in SECTIONS.values()]

    chatml: Any = tokenizer_of(CHATML)
    for name, warning in zip(SECTIONS, warnings("rain?", chatml), strict=True):
        assert warning.startswith(f"{name}.template is none") and "template to chat" in warning
    assert warnings("<|im_start|>user\nrain?<|im_end|>\n", chatml) == ["", "", ""]
    chatml.chat_template = None
    assert warnings("rain?", chatml) == ["", "", ""]


def test_many_ends_in_a_text_are_read_once() -> None:
    """Of an agent's body of 2 MB, which would otherwise stop the gateway for hours."""
    tokenizer: Any = tokenizer_of(CHATML)
    end, text = tokenizer.convert_tokens_to_ids("<|im_end|>"), "<|im_end|>" * 200_000 + "x"
    assert without_end(tokenizer, [text, f"{text}<|im_end|>\n"], end) == [text, text]


@pytest.mark.parametrize("ends", ["{end}", "{end}\n", "{end} {eos}\n\n"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_end_in_a_turn_is_not_doubled(name: str, ends: str, tmp_path: Path) -> None:
    """Of the model, in data of every kind; in what others write, the end is text."""
    family, tokenizer = FAMILIES[name], tokenizer_of(FAMILIES[name])
    end = ends.format(end=family.end, eos=family.eos)
    plain = [ASK, ANSWER, MORE, NO]
    ended = [
        turn | {"content": f"{turn['content']}{end}"} if turn["role"] == "assistant" else turn
        for turn in plain
    ]
    assert conversation(tmp_path, tokenizer, ended) == conversation(tmp_path, tokenizer, plain)
    want = preference(tmp_path, tokenizer, chosen=plain, rejected=[*plain[:-1], ANSWER])
    assert preference(tmp_path, tokenizer, chosen=ended, rejected=[*ended[:-1], ANSWER]) == want
    assert prompt(tmp_path, tokenizer, ended[:3]) == prompt(tmp_path, tokenizer, plain[:3])
    inside = [ASK | {"content": f"a{family.end}b"}, ANSWER]
    assert f"a{family.end}b" in conversation(tmp_path, tokenizer, inside)[0]


@pytest.mark.parametrize("name", ["llama", "gemma", "mistral"])
def test_a_text_begins_once(name: str, tmp_path: Path) -> None:
    """Under `template: none` the tokenizer begins a text, also one that begins already."""
    family = FAMILIES[name]
    tokenizer: Any = tokenizer_of(family)
    texts = ["a", f"{family.bos}a", tokenizer.apply_chat_template([ASK], tokenize=False)]
    source = written(tmp_path, *({"prompt": text, "answer": "1"} for text in texts))
    rows = load(PromptsConfig, source, tokenizer, shuffle=False)
    for row in rows:
        assert row.token_ids[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in row.token_ids[1:]
    assert rows.at(0).token_ids == rows.at(1).token_ids
    data: dict[str, Any] = {"response": "b", "chosen": "b", "rejected": "c", "good": True}
    made = ({"prompt": text, "text": f"{text}{family.eos}", **data} for text in texts)
    read: Any = {"source": written(tmp_path, *made), "tokenizer": tokenizer, "shuffle": False}
    pairs = load(DemonstrationsConfig, **read)
    wholes = load(DemonstrationsConfig, **read, text_column="text")
    sides = load(PreferencesConfig, **read)
    end = end_of_turn(tokenizer, "none")
    scored = scored_tokens(tokenizer, texts, ["b"] * 3, "none", end)
    for number, row in enumerate(rows):
        assert pairs.at(number).prompt_ids == sides.at(number).prompt_ids == row.token_ids
        assert scored[number] == [*row.token_ids, *pairs.at(number).response_ids]
        whole = wholes.at(number)
        ids = list(row.token_ids)
        assert [*whole.prompt_ids, *whole.response_ids] == [*ids, *([end] * (ids[-1] != end))]
