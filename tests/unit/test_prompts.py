"""Prompts and demonstrations: rows become tokens before the run starts, and what is wrong with one
is said with its line.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from support.chat_templates import Family, tokenizer_of
from support.commands import write_rows
from tokenizers import processors

from megarl.data.demonstrations import load_demonstrations
from megarl.data.rows import READERS, fingerprint
from megarl.data.source import load_prompts
from megarl.settings.data import DemonstrationsConfig, PromptsConfig

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "extra": {"level": n}} for n in range(10, 17)]


def byte_tokenizer(*, template: str | None = TEMPLATE, around: str = "$A") -> Any:
    """One id a byte; `around` is what the tokenizer itself puts around a text, such as '<bos> $A
    <eos>'.
    """
    made = tokenizer_of(Family("", end="<eos>", eos="<eos>", bos="<bos>"))
    special = [(one, made.convert_tokens_to_ids(one)) for one in ("<bos>", "<eos>")]
    around_texts = processors.TemplateProcessing(single=around, special_tokens=special)
    made.backend_tokenizer.post_processor = around_texts
    made.chat_template = template
    return made


TOKENIZER = byte_tokenizer()
BOS, EOS = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id


def refused(message: str) -> Any:
    """`pytest.raises` of a user's error."""
    return pytest.raises(ValueError, match=message)


def turns(*words: str) -> list[dict[str, str]]:
    """A chat of roles, each followed by what it says."""
    pairs = zip(words[::2], words[1::2], strict=True)
    return [{"role": role, "content": content} for role, content in pairs]


def write(path: Path, rows: list[Any]) -> str:
    """Rows in the format of `path`'s suffix."""
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix in (".jsonl", ".ndjson"):
        write_rows(path, rows)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(
                [list(rows[0]), *(row.values() for row in rows)]
            )
    return str(path)


def prompts(source: str, *, seed: int = 1, tokenizer: Any = TOKENIZER, **changes: Any) -> Any:
    return load_prompts(PromptsConfig(source=source, **changes), tokenizer, seed=seed)


ASKED, REPLY = turns("user", "q"), turns("assistant", "a")


@pytest.mark.parametrize("suffix", READERS)
def test_every_format_gives_the_same_prompts(suffix: str, tmp_path: Path) -> None:
    rows = [{"prompt": f'{n}, "{n}"\nis', "answer": str(n)} for n in range(5)]
    file = write(tmp_path / f"rows{suffix}", rows)
    source = prompts(file)
    found = [(one.index, one.text, one.answer, one.fields) for one in source]
    assert found == [(n, row["prompt"], row["answer"], row) for n, row in enumerate(rows)]
    assert source.at(0).token_ids == TOKENIZER(source.at(0).text).input_ids
    assert len(prompts(file, limit=2)) == 2


def test_each_epoch_is_a_permutation_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    source, again, other = prompts(file), prompts(file), prompts(file, seed=2)
    random.seed(0)
    epochs = [[source.at(7 * epoch + n).index for n in range(7)] for epoch in range(6)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    random.seed(1)
    backwards = [again.at(n).index for n in reversed(range(42))]
    assert backwards[::-1] == [index for epoch in epochs for index in epoch]
    assert [other.at(n).index for n in range(42)] != backwards[::-1]
    unshuffled = prompts(file, shuffle=False)
    assert [unshuffled.at(n).index for n in range(14)] == [*range(7), *range(7)]


@pytest.mark.parametrize(
    ("around", "before"),
    [("$A", []), ("<bos> $A", [BOS]), ("$A <eos>", []), ("<bos> $A <eos>", [BOS])],
)
def test_a_prompt_starts_as_the_tokenizer_says_and_never_ends(
    around: str, before: list[int], tmp_path: Path
) -> None:
    rows = [{"prompt": "ab", "answer": "1"}, {"prompt": "ab<eos>", "answer": "1"}]
    file = write(tmp_path / "rows.jsonl", rows)
    first, second = prompts(file, tokenizer=byte_tokenizer(around=around))
    wanted = [*before, *TOKENIZER("ab").input_ids]
    assert first.token_ids == wanted
    # An end that stands in the text is the user's.
    assert second.token_ids[: len(wanted) + 1] == [*wanted, EOS]


def test_chat_columns_and_the_template(tmp_path: Path) -> None:
    chat = turns("user", "one", "assistant", "1", "user", "two")
    row = {"prompt": chat, "reward_model": {"ground_truth": "2"}}
    file = write(tmp_path / "rows.parquet", [row])
    read: dict[str, Any] = {"template": "chat", "answer_column": "reward_model.ground_truth"}
    read["tokenizer"] = byte_tokenizer(around="<bos> $A <eos>")
    (prompt,) = prompts(file, **read, system="brief", instruction="Go.")
    asked = "<|user|>one<eos><|assistant|>1<eos><|user|>two\nGo.<eos><|assistant|>"
    assert prompt.text == f"<|system|>brief<eos>{asked}"
    # The template's special tokens, and no others.
    assert prompt.token_ids == TOKENIZER(prompt.text).input_ids
    assert prompt.answer == "2"
    assert prompt.fields["prompt"] == chat, "the row itself stays as it was"
    text = write(tmp_path / "text.jsonl", [{"prompt": "two", "answer": 2}])
    (prompt,) = prompts(text, template="chat")
    assert prompt.text == "<|user|>two<eos><|assistant|>"
    (prompt,) = prompts(text, instruction="Go.")
    assert prompt.text == "two\nGo."
    with refused(r"row 0.*is a chat, but prompts\.template is 'none'; set it to 'chat'"):
        prompts(file, answer_column="reward_model.ground_truth")
    with refused(r"has no chat template; set prompts.template to 'none'"):
        prompts(file, **{**read, "tokenizer": byte_tokenizer(template=None)})
    chats = turns("system", "mine", "user", "x"), turns("tool", "x")
    file = write(tmp_path / "own.jsonl", [{"prompt": one, "answer": "1"} for one in chats])
    with refused(r"line 1.*a system message of its own; remove prompts.system"):
        prompts(file, template="chat", system="brief")
    with refused(r"line 2.*no user message to append prompts.instruction to"):
        prompts(file, template="chat", instruction="Go.")
    file = write(tmp_path / "broken.jsonl", [{"prompt": [{"role": "user"}], "answer": "1"}])
    with refused(r"neither a text nor a chat.*set prompts\.prompt_column"):
        prompts(file, template="chat")


def test_answers_after_a_marker(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "answer": "3 #### 4\n#### 1,234 "}, {"prompt": "q", "answer": "no"}]
    file = write(tmp_path / "rows.jsonl", rows)
    assert prompts(file, answer_after="####", limit=1).at(0).answer == "1,234"
    with refused(r"line 2 .*does not contain prompts\.answer_after = '####'"):
        prompts(file, answer_after="####")


GOOD = '{"prompt": "a", "answer": "1"}\n'
FILES = [
    (".jsonl", None, r"prompts\.source .*data\.jsonl does not exist; set it to a file"),
    (".jsonl", "", r"data\.jsonl is empty; set it to one with at least one row"),
    (".jsonl", GOOD + '\n{"prompt": \n', r"data\.jsonl, line 3: not JSON: .*mend it"),
    (".jsonl", GOOD + '["a"]\n', r"data\.jsonl, line 2 .* is a list; make every row an object"),
    (".jsonl", '\n{"query": "a", "answer": "1"}',
     r"line 2 \(row 0.*no column 'prompt'; set prompts\.prompt_column to one of: query, answer"),
    (".jsonl", '{"prompt": null, "answer": "1"}', r"line 1 .*column 'prompt' is null"),
    (".jsonl", '{"prompt": {"a": 1}, "answer": "1"}', r"line 1 .*prompt is an object, not a text"),
    (".jsonl", '{"prompt": "", "answer": "1"}', r"line 1 .*the prompt has no tokens"),
    (".jsonl", '{"prompt": "a", "answer": " "}', r"line 1 .*answer \(column 'answer'\) is empty"),
    (".jsonl", '{"prompt": "a", "answer": ["1"]}', r"line 1 .*the answer .* is a list, not a text"),
    (".jsonl", GOOD + '{"prompt": "123456789", "answer": "1"}',
     r"^1 of 2 prompts have more tokens than prompts\.max_prompt_tokens = 8 \(the longest 9\), "
     r"the first is .*line 2 \(row 1.* with 9; set max_prompt_tokens to at least 9, or"),
    (".json", '{"a": 1}\n{"a": 2}', r"data\.json, line 2: not JSON.*must be named \.jsonl"),
    (".json", '{"a": 1}', r"data\.json holds an object; make it a list"),
    (".json", '[{"a": 1}, 5]', r"data\.json \(row 1, .*is 5; make every row an object"),
    (".csv", "prompt,answer,answer\na,1,2\n", r"the header has a column twice"),
    (".csv", 'prompt,answer\n"a\nb",1\nc\n',
     r"data\.csv, line 4 has not one value for each of the columns prompt, answer"),
    (".csv", "prompt,answer\na,1,2\n", r"data\.csv, line 2 has not one value for each"),
    (".csv", b"prompt,answer\n\xe9,1\n", r"data\.csv cannot be read: .*byte 0xe9 in position 14.*UTF-8"),
    (".parquet", "PAR1 no", r"data\.parquet is not parquet"),
    (".xml", "<a/>", r"ends in '\.xml', but known files end in \.jsonl, \.ndjson, \.json, \.parquet, \.csv"),
]  # fmt: skip


@pytest.mark.parametrize(("suffix", "content", "message"), FILES)
def test_what_is_wrong_with_a_file_is_said_with_its_line(
    suffix: str, content: str | bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / f"data{suffix}"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(message):
        prompts(str(path), max_prompt_tokens=8)


def test_an_absent_hub_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with refused(r"prompts\.source 'nobody/nothing' is neither a file.*hub did not answer"):
        prompts("nobody/nothing")
    assert time.monotonic() - started < 60


def demonstrations(source: str, *, tokenizer: Any = TOKENIZER, **changes: Any) -> Any:
    return load_demonstrations(
        DemonstrationsConfig(source=source, shuffle=False, **changes), tokenizer, seed=1
    )


def test_demonstrations_say_what_is_wrong(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "response": "cd"}, {"prompt": "ab", "response": "cde"}]
    file = write(tmp_path / "rows.jsonl", rows)
    too_long = (
        r"^1 of 2 rows .*demonstrations\.max_tokens = 5 \(the longest 6\).*line 2 .*at least 6"
    )
    with refused(too_long):
        demonstrations(file, max_tokens=5)
    with refused(r"line 1 .*the response \(column 'response'\) is empty"):
        demonstrations(write(tmp_path / "empty.jsonl", [{"prompt": "ab", "response": ""}]))


LENGTHS = [{"prompt": "x" * length, "answer": str(length)} for length in (3, 12, 8, 20, 9)]


def test_prompts_that_are_too_long(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", LENGTHS)
    with refused(r"^3 of 5 .*the longest 20\), the first is .*line 2 .*12;"):
        prompts(file, max_prompt_tokens=8)
    found = prompts(file, max_prompt_tokens=8, too_long="drop")
    assert [one.answer for one in found] == ["3", "8"] and found.longest == 8
    assert found.warning.startswith("3 of 5 prompts have more tokens than prompts.max_prompt_tok")
    assert " = 8 (the longest 20); they are left out" in found.warning
    short = write(tmp_path / "short.jsonl", [LENGTHS[0], LENGTHS[2]])
    assert found.fingerprint == prompts(short).fingerprint
    with refused(r"5 of 5 .*no row is left; raise max_prompt_tokens"):
        prompts(file, max_prompt_tokens=2, too_long="drop")
    rows = [row | {"prompt": f"begin {row['prompt']} end"} for row in LENGTHS]
    file = write(tmp_path / "marked.jsonl", rows)
    found = prompts(file, max_prompt_tokens=8, too_long="truncate_left", template="rendered")
    assert [one.text for one in found] == [" xxx end"] + ["xxxx end"] * 4
    assert all(TOKENIZER.decode(one.token_ids) == one.text for one in found)
    other = prompts(file, max_prompt_tokens=9, too_long="truncate_left", template="rendered")
    assert other.fingerprint != found.fingerprint
    assert prompts(file, too_long="truncate_left", template="rendered").warning == ""


def test_demonstrations_that_are_too_long(tmp_path: Path) -> None:
    rows = [{"prompt": "abcdef", "response": "xyz"}, {"prompt": "ab", "response": "x"}]
    file = write(tmp_path / "rows.jsonl", rows)
    found = demonstrations(file, max_tokens=7, too_long="truncate_left", template="rendered")
    assert TOKENIZER.decode(found.at(0).prompt_ids + found.at(0).response_ids) == "defxyz<eos>"
    assert "1 of 2 rows" in found.warning and "lose the first tokens" in found.warning
    assert len(demonstrations(file, max_tokens=7, too_long="drop")) == 1
    with refused(r"1 of 2 responses leave no room .*line 1 .*'drop'"):
        demonstrations(file, max_tokens=4, too_long="truncate_left")
    chat = turns("user", "0123456789", "assistant", "a", "user", "q", "assistant", "b")
    file = write(tmp_path / "chats.jsonl", [{"messages": chat}] * 2 + [{"messages": chat[2:]}])
    whole = demonstrations(file, **AS_TALKS)
    found = demonstrations(file, **AS_TALKS, max_tokens=whole.longest - 5, too_long="truncate_left")
    assert len(found) == 3 and found.longest == whole.longest - 5
    assert TOKENIZER.decode(found.at(0).prompt_ids).startswith("r|>0123456789<eos>")
    assert found.at(0).response_ids == whole.at(0).response_ids
    assert found.at(0).response_mask == whole.at(0).response_mask
    dropped = demonstrations(file, **AS_TALKS, max_tokens=whole.longest - 1, too_long="drop")
    assert len(dropped) == 1 and dropped.at(0).response_mask == whole.at(2).response_mask


def test_twice_the_rows_are_twice_the_calls(tmp_path: Path) -> None:
    """Reading is not quadratic, which is seen in the number of Python's calls."""

    def read(count: int) -> int:
        rows = [{"prompt": f"{n}=", "answer": "1", "response": str(n)} for n in range(count)]
        file, calls = write(tmp_path / "rows.jsonl", rows), [0]

        def note(frame: Any, event: str, argument: Any) -> None:
            calls[0] += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            found = len(prompts(file)), len(demonstrations(file))
        finally:
            sys.setprofile(None)
        assert found == (count, count)
        return calls[0]

    read(10)  # which also imports
    assert read(1200) < 2.2 * read(600)


def test_unique_keeps_the_first_row_of_each_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(at)} for at, n in enumerate((1, 2, 1, 3, 2))]
    found = prompts(write(tmp_path / "rows.jsonl", rows), unique=True, shuffle=False)
    kept = [(prompt.text, prompt.answer) for prompt in found]
    assert kept == [("1+1=", "0"), ("2+2=", "1"), ("3+3=", "3")]


CHAT = [{"role": "user", "content": "caf\u00e9 \U0001f600?"}]


def test_the_fingerprint_is_the_same_in_every_process_and_version() -> None:
    """A digest written down once: other versions of Python and of the libraries must find it."""
    rows = [("1+1=", "2"), (CHAT, "x"), (7, ""), ({"b": [1.5, None], "a": True}, "\ud83d")]
    wanted = "4 rows, xxh3-128 5e6452efdcaf96ca73a599733b5c6272"
    assert fingerprint(["chat", True, None], rows) == wanted


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(9)]

    def digest(folder: str, rows: list[dict[str, Any]], **changes: Any) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        suffix = changes.pop("suffix", ".jsonl")
        return prompts(write(tmp_path / folder / f"rows{suffix}", rows), **changes).fingerprint

    one = digest("a", rows)
    # The same rows elsewhere, in another format, under other column names, beside other columns.
    assert digest("b", rows) == one
    assert digest("c", rows, suffix=".parquet") == one
    renamed = [{"q": row["prompt"], "a": row["answer"], "more": 1} for row in rows]
    assert digest("d", renamed, prompt_column="q", answer_column="a") == one
    assert digest("e", rows + rows, limit=9) == digest("e", rows + rows, unique=True) == one
    # Anything that a cursor's rows depend on.
    others = [
        digest("f", [*rows[:8], rows[8] | {"prompt": "8+8 ="}]),
        digest("g", [*rows[:8], rows[8] | {"answer": "17"}]),
        digest("h", rows[::-1]),
        digest("i", rows, limit=8),
        digest("j", rows, shuffle=False),
        digest("k", rows, instruction="Think."),
        digest("l", rows, template="chat"),
        digest("m", rows, template="chat", system="Brief."),
        digest("n", rows, template="chat", tokenizer=byte_tokenizer(template=TEMPLATE + " ")),
        # Where one text ends and the next begins.
        digest("o", [{"prompt": "1+1=2", "answer": "3"}]),
        digest("p", [{"prompt": "1+1=", "answer": "23"}]),
    ]
    assert len({one, *others}) == len(others) + 1
    taught = [demonstrations(write(tmp_path / "t.jsonl", [{"prompt": "4=", "response": said}]))
              for said in "445"]  # fmt: skip
    assert taught[0].fingerprint == taught[1].fingerprint != taught[2].fingerprint


CHOICES: list[tuple[Any, Any, str]] = [
    (["3", "4", "5"], 1, "B"),
    (["three", "four"], "1", "B"),
    (["3", "4"], "4", "B"),
    ({"label": ["1", "2"], "text": ["x", "y"]}, "2", "2"),
    ({"A": "x", "B": "y"}, "B", "B"),
    (["8", "2", "24", "120"], 2, "C"),
    (["8", "2", "24"], "C", "C"),
    (["0", "1"], "1", "B"),  # digits with one meaning for two reasons
]


@pytest.mark.parametrize(("choices", "answer", "label"), CHOICES)
def test_choices_become_lines_and_the_answer_a_label(
    choices: Any, answer: Any, label: str, tmp_path: Path
) -> None:
    rows = [{"prompt": "which?", "choices": choices, "answer": answer}]
    file = write(tmp_path / "rows.jsonl", rows)
    read = {"choices_column": "choices", "instruction": "Say #### and the letter."}
    (prompt,) = prompts(file, **read)
    if isinstance(choices, dict):
        lines = "1. x\n2. y" if "label" in choices else "A. x\nB. y"
    else:
        lines = "\n".join(f"{chr(65 + n)}. {text}" for n, text in enumerate(choices))
    assert prompt.text == f"which?\n{lines}\nSay #### and the letter."
    assert prompt.answer == label and prompt.fields == rows[0]
    (chat,) = prompts(file, **read, template="chat")
    assert chat.text == f"<|user|>{prompt.text}<eos><|assistant|>"


LABELLED = {"label": ["1", "2"], "text": ["x", "y"]}
BAD_CHOICES: list[tuple[Any, Any, str]] = [
    ("3, 4", 0, r"line 1.*choices are a text.*set prompts\.choices_column"),
    ([str(n) for n in range(27)], 0, r"holds no list of 2 to 26 texts"),
    ({"label": ["A", "A"], "text": ["x", "y"]}, "A", r"holds no list"),
    (["x", "y"], 2, r"the answer '2' is none of the labels A, B, no text .* from 0 to 1"),
    (["x", "x"], "x", r"line 1.*the answer 'x' may mean A or B"),
    (["8", "2", "24"], "2", r"line 1.*'2' may mean B or C.*as letters, or as integers from 0"),
    (["C", "A", "G"], "A", r"'A' may mean A or B"),
    (LABELLED, 1, r"'1' may mean 1 or 2"),
]


@pytest.mark.parametrize(("choices", "answer", "message"), BAD_CHOICES)
def test_choices_that_cannot_be_read(
    choices: Any, answer: Any, message: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "rows.jsonl", [{"prompt": "?", "choices": choices, "answer": answer}])
    with refused(message):
        prompts(file, choices_column="choices")


def test_prompts_without_answers(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"prompt": "write a poem"}])
    assert [prompt.answer for prompt in prompts(file, answer_column="")] == [""]
    with refused(r"answer_after is .*answer_column is ''"):
        PromptsConfig(answer_column="", answer_after="####")
    file = write(tmp_path / "nested.jsonl", ROWS)
    with refused(r"no column 'extra\.depth'; set prompts\.answer_column to one of: extra\.level"):
        prompts(file, answer_column="extra.depth")
    with refused(r"no column 'answer\.value'.*answer \(it has no columns inside\)"):
        prompts(file, answer_column="answer.value")


def test_content_parts_are_joined(tmp_path: Path) -> None:
    def part(text: str) -> dict[str, str]:
        return {"type": "text", "text": text}

    chats = [[{"role": "user", "content": [part("one "), part("two")]}], turns("user", "one two")]
    file = write(tmp_path / "rows.jsonl", [{"prompt": one, "answer": "1"} for one in chats])
    first, second = prompts(file, template="chat")
    assert first.text == second.text
    for bad in ({"type": "image_url", "image_url": "x"}, {"type": "text"}, "one"):
        row = {"prompt": [{"role": "user", "content": [bad]}], "answer": "1"}
        file = write(tmp_path / "bad.jsonl", [row])
        with refused(r"line 1.*a content part that is .*only parts"):
            prompts(file, template="chat")


AS_TALKS = {"messages_column": "messages", "template": "chat"}
TALK = turns(
    *("system", "s", "user", "q", "assistant", "r", "user", "qq", "assistant", "rr", "user", "bye")
)


def trained(row: Any) -> Any:
    """The stretches of a conversation's response that are trained on, as text."""
    pairs = zip(row.response_ids, row.response_mask, strict=True)
    stretches = itertools.groupby(pairs, key=lambda pair: pair[1])
    return [TOKENIZER.decode([token for token, _ in some]) for chosen, some in stretches if chosen]


def test_a_conversation_is_trained_on_in_the_turns_of_the_assistant(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"messages": TALK}])
    row = demonstrations(file, **AS_TALKS).at(0)
    assert TOKENIZER.decode(row.prompt_ids) == "<|system|>s<eos><|user|>q<eos><|assistant|>"
    # What follows the last reply is left out.
    assert TOKENIZER.decode(row.response_ids) == "r<eos><|user|>qq<eos><|assistant|>rr<eos>"
    assert trained(row) == ["r<eos>", "rr<eos>"]
    newline = byte_tokenizer(template=TEMPLATE.replace("<eos>", "<eos>\n"))
    row = demonstrations(file, tokenizer=newline, **AS_TALKS).at(0)
    assert trained(row) == ["r<eos>", "rr<eos>"], "what the template writes behind the end is given"
    endless = byte_tokenizer(template=TEMPLATE.replace("<eos>", ""))
    row = demonstrations(file, tokenizer=endless, **AS_TALKS).at(0)
    assert trained(row) == ["r", "rr<eos>"], "the last reply ends, or no reply would"


def test_conversations_that_cannot_be_trained_on(tmp_path: Path) -> None:
    for talk in (TALK[:2], TALK[2:4]):
        file = write(tmp_path / "rows.jsonl", [{"messages": talk}])
        with refused(r"line 1.*needs a turn of another role and then"):
            demonstrations(file, **AS_TALKS)
    empty = [*TALK[:4], {"role": "assistant", "content": " "}]
    file = write(tmp_path / "rows.jsonl", [{"messages": TALK}, {"messages": empty}])
    with refused(r"line 2.*turn 4 \(from 0\), of the assistant, is empty"):
        demonstrations(file, **AS_TALKS)
    forgets = byte_tokenizer(
        template=TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else 'x' }}")
    )
    file = write(tmp_path / "rows.jsonl", [{"messages": TALK}])
    with refused(r"line 1.*writes the turns before turn 2 \(from 0\) in another way"):
        demonstrations(file, tokenizer=forgets, **AS_TALKS)
    with refused(r"messages_column is 'messages', but .*template is 'none'"):
        DemonstrationsConfig(messages_column="messages")


@pytest.mark.parametrize(("turn", "what", "lost", "instead"), [
    (1, "prompts", "\u00e9", "?"),
    (2, "responses", "\u00e9", ""),
    (4, "responses", "\t", ""),
    (2, "responses", "a\tb", "a b"),
    (2, "responses", "a  b", "a b"),
])  # fmt: skip
def test_a_conversation_that_loses_characters_is_warned_about(
    turn: int, what: str, lost: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = byte_tokenizer()
    decode = deaf.batch_decode
    heard = lambda *args, **named: [one.replace(lost, instead) for one in decode(*args, **named)]  # noqa: E731
    monkeypatch.setattr(deaf, "batch_decode", heard)
    read = AS_TALKS | {"tokenizer": deaf}
    assert not demonstrations(write(tmp_path / "a.jsonl", [{"messages": TALK}]), **read).warning
    talk = [one | {"content": f"x{lost}y"} if n == turn else one for n, one in enumerate(TALK)]
    warning = demonstrations(write(tmp_path / "b.jsonl", [{"messages": talk}]), **read).warning
    assert f"the tokenizer changes 100% of the {what} of demonstrations" in warning


NO_QUESTIONS: list[tuple[Any, str]] = [
    (TALK[1:3], r"last turn .* of the assistant.*drop the last turn .*messages_column"),
    ([*TALK[:3], *turns("user", " ")], r"user message \(turn 3, from 0\) is empty"),
    ([{"role": "user", "content": []}], r"user message \(turn 0, .* is empty"),
    (TALK[:1], r"has a system message only; add a user message"),
]


@pytest.mark.parametrize(("value", "message"), NO_QUESTIONS)
def test_a_chat_that_asks_nothing_is_refused(value: Any, message: str, tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "answer": "1", "response": "1"} for prompt in (TALK[:2], value)]
    file = write(tmp_path / "rows.jsonl", rows)
    for load in (prompts, demonstrations):
        with refused(rf"line 2.*{message}"):
            load(file, template="chat")


def test_a_chat_may_be_stored_as_the_text_of_its_json(tmp_path: Path) -> None:
    chats = [json.dumps(TALK[:2]), json.dumps(TALK[:4], indent=1), "[{x}] is what?", "[]"]
    rows = [{"prompt": chat, "answer": "1", "messages": json.dumps(TALK)} for chat in chats]
    file = write(tmp_path / "rows.csv", rows)
    assert [prompt.text for prompt in prompts(file, template="chat")] == [
        "<|system|>s<eos><|user|>q<eos><|assistant|>",
        "<|system|>s<eos><|user|>q<eos><|assistant|>r<eos><|user|>qq<eos><|assistant|>",
        "<|user|>[{x}] is what?<eos><|assistant|>",
        "<|user|>[]<eos><|assistant|>",
    ]
    assert trained(demonstrations(file, **AS_TALKS).at(0)) == ["r<eos>", "rr<eos>"]


def test_lines_of_csv_end_at_line_feeds_and_carriage_returns_only(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes("prompt,answer\r\na\u2028b\x0bc\x85d,1\r\ne,2\nf\n".encode())
    with refused(r"line 4 has not one value"):
        prompts(str(file))
    assert [row.text for row in prompts(str(file), limit=2)] == ["a\u2028b\x0bc\x85d", "e"]


def test_decimal_numbers_of_parquet_are_answers(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": Decimal(text)} for text in ("1.50", "0.00")]
    file = write(tmp_path / "rows.parquet", rows)
    assert [row.answer for row in prompts(file)] == ["1.50", "0.00"]
    rows = [{"prompt": "a", "answer": Decimal("0.0000000100")}]
    assert next(iter(prompts(write(tmp_path / "small.parquet", rows)))).answer == "0.0000000100"
    file = write(tmp_path / "bytes.parquet", [{"prompt": "a", "answer": b"1"}])
    with refused(r"row 0.*the answer .* is b'1', not a text"):
        prompts(file)


MESSAGES = turns("user", "q1", "assistant", "a1", "user", "q2", "assistant", "a2")
SHAREGPT = [
    {"from": "human" if turn["role"] == "user" else "gpt", "value": turn["content"]}
    for turn in MESSAGES
]
EMPTY: list[dict[str, Any]] = [
    {"role": None, "content": None}, {"role": "user"}, {"content": "a2"}
]  # fmt: skip
OUR_TOOLS = turns("system", "s", "user", "q", "assistant", "f()", "tool", "4", "assistant", "a")
THEIRS = ["system", "user", "function_call", "observation", "assistant"]
TOOLS = [
    {"from": name, "value": turn["content"]} for name, turn in zip(THEIRS, OUR_TOOLS, strict=True)
]
IN_CHAT = {"template": "chat"}
SEVERAL = [*ASKED, *REPLY, *ASKED]
FORMS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("'completion'", {"prompt": "q", "completion": "a"}, {}, {"prompt": "q", "response": "a"}),
    ("'completion'", {"prompt": SEVERAL, "completion": REPLY}, IN_CHAT,
     {"prompt": SEVERAL, "response": "a"}),
    ("'completion'", {"prompt": json.dumps(ASKED), "completion": json.dumps(REPLY)}, IN_CHAT,
     {"prompt": ASKED, "response": "a"}),
    ("chats of prompt", {"prompt": ASKED, "completion": [*REPLY, *ASKED, *REPLY]}, IN_CHAT,
     {"messages": [*SEVERAL, *REPLY]}),
    ("'messages'", {"messages": MESSAGES}, IN_CHAT, {"messages": MESSAGES}),
    ("ShareGPT", {"conversations": SHAREGPT}, IN_CHAT, {"messages": MESSAGES}),
    ("ShareGPT", {"conversations": [  # both names
        a | other for a, other in zip(SHAREGPT, [MESSAGES[0], *EMPTY], strict=True)
     ]}, IN_CHAT, {"messages": MESSAGES}),
    ("ShareGPT", {"conversations": SHAREGPT, "system": "s", "tools": ""}, IN_CHAT,
     {"messages": [*turns("system", "s"), *MESSAGES]}),
    ("ShareGPT", {"conversations": TOOLS}, IN_CHAT, {"messages": OUR_TOOLS}),
    ("Alpaca", {"instruction": "do", "input": "", "output": "a"}, {},
     {"prompt": "do", "response": "a"}),
    ("Alpaca", {"instruction": "do", "input": "this", "output": "a"}, IN_CHAT,
     {"prompt": "do\nthis", "response": "a"}),
    ("Alpaca", {"instruction": "do", "input": 4, "output": "a"}, {},
     {"prompt": "do\n4", "response": "a"}),
]  # fmt: skip


@pytest.mark.parametrize(("says", "row", "settings", "ours"), FORMS)
def test_demonstrations_of_others_are_recognised(
    says: str, row: Any, settings: Any, ours: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They give the tokens, masks and fingerprint of our own form, and the form is said."""
    found = demonstrations(write(tmp_path / "theirs.jsonl", [row] * 3), **settings)
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("demonstrations: ") and says in said
    if "messages" in ours:
        settings = settings | {"messages_column": "messages"}
    else:
        settings = settings | {"prompt_column": "prompt", "response_column": "response"}
    wanted = demonstrations(write(tmp_path / "ours.jsonl", [ours] * 3), **settings)
    assert found.at(1) == wanted.at(1) and found.fingerprint == wanted.fingerprint
    assert capfd.readouterr().err == ""
    if settings.get("template") == "chat" and says != "Alpaca":
        with refused(r"template"):
            demonstrations(str(tmp_path / "theirs.jsonl"))


def test_whole_texts_are_trained_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "texts.jsonl", [{"text": "abc", "source": "x"}])
    for named in ({}, {"text_column": "text"}, {"text_column": "text", "template": "rendered"}):
        found = demonstrations(file, **named).at(0)
        whole = [*found.prompt_ids, *found.response_ids]
        assert len(found.prompt_ids) == 1 and found.response_mask is None
        assert TOKENIZER.decode(whole) == "abc<eos>"
    assert capfd.readouterr().err.count("whole texts") == 1  # not where the column is named
    with refused(r"text_column is 'text', but .*template is 'chat'"):
        demonstrations(file, text_column="text", template="chat")
    with refused(r"no column 'prompt'; set .* to one of: text, source"):
        demonstrations(file, response_column="source")  # named columns: nothing is recognised
    longer = write(tmp_path / "longer.jsonl", [{"text": "abcdefgh"}, {"text": "abc"}])
    assert len(demonstrations(longer, max_tokens=6, too_long="drop")) == 1


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"conversations": SHAREGPT}, {"conversations": [{"from": "x", "value": "q"}]}],
         r"line 2 .*from 'x'; known are human"),
        ([{"conversations": SHAREGPT}, {"conversations": "q"}], r"line 2 .*is a text; make it"),
        ([{"conversations": SHAREGPT}, {"other": 1}], "line 2 .*no column 'conversations'"),
        ([{"prompt": [*ASKED, *REPLY, *ASKED], "completion": [*REPLY, *ASKED, *REPLY]}],
         "line 1 .*which turns to train on"),
        ([{"prompt": ASKED, "completion": [REPLY[0] | {"reasoning_content": "r"}]}],
         "line 1 .*'reasoning_content' of turn 1"),
        ([{"prompt": ASKED, "completion": ASKED}], "line 1 .*one turn of the assistant"),
        ([{"conversations": [SHAREGPT[0], SHAREGPT[1] | {"weight": 0}]}], "'weight' of turn 1"),
        ([{"conversations": TOOLS, "system": "t"}], "line 1 .*column 'system' and a turn"),
        ([{"instruction": "q", "input": [1], "output": "a"}], "line 1 .*the input is a list"),
        ([{"instruction": "q", "output": "a", "history": [["b", "c"]]}], "column 'history'"),
        ([{"instruction": "q", "output": "a", "system": "s"}], "column 'system' is not read"),
        *(([{"prompt": "q", "response": "a", name: None},
            {"prompt": f"<{name.rstrip('s')}>q", "response": "a", name: x}],
           f"line 2 .*'<{name.rstrip('s')}>' stands for column '{name}', which is not shown")
          for name, x in (("images", ["a.png"]), ("audio", {"path": "b"}))),
        ([{"text": "abc"}], "whole texts, .*set demonstrations.template to 'none'"),
    ],
)  # fmt: skip
def test_rows_of_another_form_are_refused(rows: list[Any], says: str, tmp_path: Path) -> None:
    with refused(says):
        demonstrations(write(tmp_path / "rows.jsonl", rows), template="chat")


def test_images_beside_the_text_are_not_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "q", "answer": "1"}
    more = [{"images": ["a.png"]}, {"images": [], "audio": None}, {"image": "b.png"}, {}]
    found = prompts(write(tmp_path / "rows.jsonl", [row | one for one in more]))
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("prompts: 2 of 4 rows ") and "'image', 'images'" in said
    assert "not shown to the model" in said and len(found) == 4
    assert found.at(0).fields.get("images") in (["a.png"], [], None)
    plain = write(tmp_path / "plain.jsonl", [row, row | {"prompt": "what is <image>?"}])
    assert len(prompts(plain)) == 2


def test_the_json_of_a_chat_needs_a_template(tmp_path: Path) -> None:
    template, chat = "rendered", json.dumps(TALK[:2])
    rows = [{"prompt": one, "answer": "1", "response": "a", "text": one} for one in ("q", chat)]
    file = write(tmp_path / "rows.jsonl", rows)
    for load in (prompts, demonstrations):
        with refused(r"line 2 .*the prompt is a chat, but .*set it to 'ch"):
            load(file, template=template)
    with refused(r"line 2 .*column 'text' holds a chat; set .*messages_co"):
        demonstrations(file, template=template, text_column="text")
    literal = write(tmp_path / "literal.jsonl", [{"prompt": '[{"a": 1}]', "answer": "1"}])
    assert prompts(literal, template=template).at(0).text == '[{"a": 1}]'


def test_folders_that_datasets_has_saved(tmp_path: Path) -> None:
    import datasets

    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    rows = datasets.Dataset.from_list([{"prompt": "q", "answer": "1"}] * 2)
    rows.save_to_disk(one)
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(two)
    assert len(prompts(one)) == 2 and len(prompts(two, split="test")) == 1
    with refused(r"split 'test' .*it has the splits train"):
        prompts(one, split="test")
    with refused(r"split 'dev' .*has the splits train, test"):
        prompts(two, split="dev")


def test_prompts_of_others_are_recognised(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    verl = {"data_source": "gsm8k", "prompt": ASKED, "ability": "math"}
    verl |= {"reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 0}}
    (found,) = prompts(write(tmp_path / "verl.parquet", [verl]), template="chat")
    assert found.answer == "4" and found.fields["extra_info"]["index"] == 0
    assert "verl's rows" in capfd.readouterr().err
    for name in ("question", "problem"):
        (found,) = prompts(write(tmp_path / f"{name}.jsonl", [{name: "2+2", "answer": "4"}]))
        assert (found.text, found.answer) == ("2+2", "4")
        assert f"column '{name}'" in capfd.readouterr().err
    both = write(tmp_path / "both.jsonl", [{"question": "2", "problem": "3", "answer": "4"}])
    with refused(r"prompt_column to one of: question, problem, answer"):
        prompts(both)
    (found,) = prompts(both, prompt_column="problem")
    assert found.text == "3" and capfd.readouterr().err == ""


def test_several_files_are_one_source(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("b", "a", "c"):
        write(folder / f"{name}.jsonl", [{"prompt": f"{name}{n}", "answer": "1"} for n in (0, 1)])
    for source in (str(folder), f"{folder}/*.jsonl"):
        texts = [one.text for one in prompts(source, limit=5)]
        assert texts == ["a0", "a1", "b0", "b1", "c0"]
    (folder / "b.jsonl").write_text('{"prompt": "b"}\n')
    with refused(r"b.jsonl, line 1 \(row 0.*no column 'answer'"):
        prompts(str(folder))
