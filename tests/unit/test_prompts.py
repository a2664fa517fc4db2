"""Prompts and demonstrations: rows become tokens before the run starts, and what is wrong with one
is said with its line.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megarl.data.config import DemonstrationsConfig, PromptsConfig
from megarl.data.demonstrations import load_demonstrations
from megarl.data.fingerprint import fingerprint
from megarl.data.order import Order
from megarl.data.rows import READERS
from megarl.data.source import load_prompts
from megarl.rollout.service import PromptSource

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "extra": {"level": n}} for n in range(10, 17)]


def byte_tokenizer(
    *, template: str | None = TEMPLATE, around: str | None = None
) -> PreTrainedTokenizerFast:
    """One id a byte; `around` is what the tokenizer itself puts around a text, such as '<bos> $A
    <eos>'.
    """
    special = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {
        token: n for n, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    fast = Tokenizer(models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    if around:
        fast.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=[(token, vocabulary[token]) for token in special]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    made.chat_template = template
    return made


TOKENIZER = byte_tokenizer()
BOS, EOS = 1, 2


def write(path: Path, rows: list[Any]) -> str:
    """Rows in the format of `path`'s suffix."""
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        import csv

        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


def prompts(source: str, *, seed: int = 1, tokenizer: Any = TOKENIZER, **changes: Any) -> Any:
    return load_prompts(PromptsConfig(source=source, **changes), tokenizer, seed=seed)


@pytest.mark.parametrize("suffix", READERS)
def test_every_format_gives_the_same_prompts(suffix: str, tmp_path: Path) -> None:
    rows = [{"prompt": f'{n}, "{n}"\nis', "answer": str(n)} for n in range(5)]
    source: PromptSource = prompts(write(tmp_path / f"rows{suffix}", rows))
    assert len(source) == 5
    for index, prompt in enumerate(source):  # type: ignore[call-overload]
        assert prompt.index == index
        assert prompt.text == rows[index]["prompt"]
        assert prompt.token_ids == TOKENIZER(prompt.text).input_ids
        assert prompt.answer == rows[index]["answer"]
        assert prompt.fields == rows[index]
    assert len(prompts(str(tmp_path / f"rows{suffix}"), limit=2)) == 2


def test_values_stay_as_the_file_has_them(tmp_path: Path) -> None:
    """Nothing is guessed: a reader that infers types turns 007 into 7 and NA into null."""
    table = tmp_path / "rows.csv"
    table.write_text("prompt,answer\nNA,007\nnull,1.50\n")
    assert [(row.text, row.answer) for row in prompts(str(table))] == [
        ("NA", "007"),
        ("null", "1.50"),
    ]
    lines = tmp_path / "rows.jsonl"
    lines.write_text(
        '{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 1.5}\n'
        '{"prompt": "2024-01-01", "answer": "x"}\n'
    )
    found = list(prompts(str(lines)))
    assert [row.answer for row in found] == ["1", "1.5", "x"]
    assert found[2].text == "2024-01-01"


def test_a_local_folder_goes_through_datasets(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", ROWS)
    source = prompts(str(tmp_path / "set"), answer_column="extra.level")
    assert [prompt.answer for prompt in source] == [str(n) for n in range(10, 17)]
    with pytest.raises(ValueError, match=r"prompts\.split 'dev'"):
        prompts(str(tmp_path / "set"), split="dev")


def test_each_epoch_is_a_permutation_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    source, again, other = prompts(file), prompts(file), prompts(file, seed=2)
    numpy.random.seed(0)
    random.seed(0)
    epochs = [[source.at(7 * epoch + n).index for n in range(7)] for epoch in range(6)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    numpy.random.seed(1)
    random.seed(1)
    backwards = [again.at(n).index for n in reversed(range(42))]
    assert backwards[::-1] == [index for epoch in epochs for index in epoch]
    assert [other.at(n).index for n in range(42)] != backwards[::-1]
    unshuffled = prompts(file, shuffle=False)
    assert [unshuffled.at(n).index for n in range(14)] == [*range(7), *range(7)]


def test_the_order_is_the_same_on_every_version() -> None:
    assert [Order(7, seed=1, shuffle=True).row(n) for n in range(14)] == [
        5,
        3,
        0,
        4,
        2,
        6,
        1,
        5,
        2,
        3,
        4,
        1,
        0,
        6,
    ]


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 50),
    seed=st.integers(0, 2**31 - 1),
    asked=st.lists(st.integers(0, 10**6), max_size=20),
)
def test_order_is_a_pure_function(num_rows: int, seed: int, asked: list[int]) -> None:
    order = Order(num_rows, seed=seed, shuffle=True)
    first = [order.row(ordinal) for ordinal in asked]
    assert [Order(num_rows, seed=seed, shuffle=True).row(ordinal) for ordinal in asked] == first
    assert sorted(order.row(num_rows * 3 + n) for n in range(num_rows)) == list(range(num_rows))


@pytest.mark.parametrize(
    ("around", "before"),
    [(None, []), ("<bos> $A", [BOS]), ("$A <eos>", []), ("<bos> $A <eos>", [BOS])],
)
def test_a_prompt_starts_as_the_tokenizer_says_and_never_ends(
    around: str | None, before: list[int], tmp_path: Path
) -> None:
    file = write(
        tmp_path / "rows.jsonl",
        [{"prompt": "ab", "answer": "1"}, {"prompt": "ab<eos>", "answer": "1"}],
    )
    first, second = prompts(file, tokenizer=byte_tokenizer(around=around))
    plain = TOKENIZER("ab").input_ids
    assert first.token_ids == [*before, *plain]
    assert second.token_ids[: len(before) + 3] == [
        *before,
        *plain,
        EOS,
    ], "an end that stands in the text is the user's"


def test_chat_columns_and_the_template(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
    ]
    file = write(
        tmp_path / "rows.parquet", [{"prompt": chat, "reward_model": {"ground_truth": "2"}}]
    )
    read = {
        "template": "chat",
        "answer_column": "reward_model.ground_truth",
        "tokenizer": byte_tokenizer(around="<bos> $A <eos>"),
    }
    (prompt,) = prompts(file, **read, system="brief", instruction="Go.")
    assert (
        prompt.text
        == "<|system|>brief<eos><|user|>one<eos><|assistant|>1<eos><|user|>two\nGo.<eos><|assistant|>"
    )
    assert prompt.token_ids == TOKENIZER(prompt.text).input_ids, (
        "the template's special tokens, and no others"
    )
    assert prompt.answer == "2"
    assert prompt.fields["prompt"] == chat, "the row itself stays as it was"
    text = write(tmp_path / "text.jsonl", [{"prompt": "two", "answer": 2}])
    (prompt,) = prompts(text, template="chat")
    assert prompt.text == "<|user|>two<eos><|assistant|>"
    (prompt,) = prompts(text, instruction="Go.")
    assert prompt.text == "two\nGo."
    with pytest.raises(
        ValueError, match=r"row 0.*is a chat, but prompts\.template is 'none'; set it to 'chat'"
    ):
        prompts(file, answer_column="reward_model.ground_truth")
    with pytest.raises(ValueError, match=r"has no chat template; set prompts.template to 'none'"):
        prompts(file, **{**read, "tokenizer": byte_tokenizer(template=None)})
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "x"}]
    file = write(
        tmp_path / "own.jsonl", [{"prompt": own, "answer": "1"}, {"prompt": own[:1], "answer": "1"}]
    )
    with pytest.raises(
        ValueError, match=r"line 1.*a system message of its own; remove prompts.system"
    ):
        prompts(file, template="chat", system="brief")
    with pytest.raises(
        ValueError, match=r"line 2.*no user message to append prompts.instruction to"
    ):
        prompts(file, template="chat", instruction="Go.")
    file = write(tmp_path / "broken.jsonl", [{"prompt": [{"role": "user"}], "answer": "1"}])
    with pytest.raises(ValueError, match=r"neither a text nor a chat.*set prompts\.prompt_column"):
        prompts(file, template="chat")


def test_answers_after_a_marker(tmp_path: Path) -> None:
    file = write(
        tmp_path / "rows.jsonl",
        [{"prompt": "q", "answer": "3 #### 4\n#### 1,234 "}, {"prompt": "q", "answer": "no"}],
    )
    assert prompts(file, answer_after="####", limit=1).at(0).answer == "1,234"
    with pytest.raises(
        ValueError, match=r"line 2 .*does not contain prompts\.answer_after = '####'"
    ):
        prompts(file, answer_after="####")


LINES = {
    "missing": (None, r"prompts\.source .*data\.jsonl does not exist; set it to a file"),
    "empty": ("", r"data\.jsonl is empty; set it to one with at least one row"),
    "blank lines only": ("\n\n", r"data\.jsonl is empty"),
    "malformed": (
        '{"prompt": "a", "answer": "1"}\n\n{"prompt": \n',
        r"data\.jsonl, line 3: not JSON: .*mend the line",
    ),
    "not an object": (
        '{"prompt": "a", "answer": "1"}\n["a"]\n',
        r"data\.jsonl, line 2 is a list; make every line an object",
    ),
    "no prompt": (
        '\n{"question": "a", "answer": "1"}',
        (
            r"line 2 \(row 0.*no column 'prompt'; set prompts\.prompt_column to one of: question,"
            r" answer"
        ),
    ),
    "null": ('{"prompt": null, "answer": "1"}', r"line 1 .*column 'prompt' is null"),
    "number": (
        '{"prompt": {"a": 1}, "answer": "1"}',
        r"line 1 .*the prompt is an object, not a text",
    ),
    "no tokens": ('{"prompt": "", "answer": "1"}', r"line 1 .*the prompt has no tokens"),
    "empty answer": (
        '{"prompt": "a", "answer": " "}',
        r"line 1 .*the answer \(column 'answer'\) is empty",
    ),
    "list answer": (
        '{"prompt": "a", "answer": ["1"]}',
        r"line 1 .*the answer .* is a list, not a text",
    ),
    "too long": (
        '{"prompt": "a", "answer": "1"}\n{"prompt": "123456789", "answer": "1"}',
        r"line 2 \(row 1.*has 9 tokens, but prompts\.max_prompt_tokens is 8; set it to at least 9",
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_what_is_wrong_with_a_row_is_said_with_its_line(case: str, tmp_path: Path) -> None:
    content, message = LINES[case]
    if content is not None:
        (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        prompts(str(tmp_path / "data.jsonl"), max_prompt_tokens=8)


def test_nested_columns_and_other_formats_say_what_is_wrong(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(
        ValueError,
        match=r"no column 'extra\.depth'; set prompts\.answer_column to one of: extra\.level",
    ):
        prompts(file, answer_column="extra.depth")
    with pytest.raises(
        ValueError, match=r"no column 'answer\.value'.*answer \(it has no columns inside\)"
    ):
        prompts(file, answer_column="answer.value")
    (tmp_path / "lines.json").write_text('{"a": 1}\n{"a": 2}')
    with pytest.raises(ValueError, match=r"lines\.json, line 2: not JSON.*must be named \.jsonl"):
        prompts(str(tmp_path / "lines.json"))
    (tmp_path / "one.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"one\.json holds an object; make it a list"):
        prompts(str(tmp_path / "one.json"))
    (tmp_path / "mixed.json").write_text('[{"a": 1}, 5]')
    with pytest.raises(
        ValueError, match=r"mixed\.json, row 1 \(from 0\) is 5; make every row an object"
    ):
        prompts(str(tmp_path / "mixed.json"))
    (tmp_path / "short.csv").write_text('prompt,answer\n"a\nb",1\nc\n')
    with pytest.raises(
        ValueError, match=r"short\.csv, line 4 has 1 values for the 2 columns prompt, answer"
    ):
        prompts(str(tmp_path / "short.csv"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"bad\.parquet is not parquet"):
        prompts(str(tmp_path / "bad.parquet"))
    (tmp_path / "latin.csv").write_bytes(b"prompt,answer\n\xe9,1\n")
    with pytest.raises(ValueError, match=r"latin\.csv is not UTF-8 \(byte 14"):
        prompts(str(tmp_path / "latin.csv"))
    (tmp_path / "rows.xml").write_text("<a/>")
    with pytest.raises(
        ValueError,
        match=r"ends in '\.xml', but known files end in \.json, \.jsonl, \.parquet, \.csv",
    ):
        prompts(str(tmp_path / "rows.xml"))


def test_an_absent_hub_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(
        ValueError, match=r"prompts\.source 'nobody/nothing' is neither a file.*hub did not answer"
    ):
        prompts("nobody/nothing")
    assert time.monotonic() - started < 10


def demonstrations(source: str, *, tokenizer: Any = TOKENIZER, **changes: Any) -> Any:
    return load_demonstrations(
        DemonstrationsConfig(source=source, shuffle=False, **changes), tokenizer, seed=1
    )


@pytest.mark.parametrize("around", [None, "<bos> $A <eos>"])
def test_a_response_ends_once(around: str | None, tmp_path: Path) -> None:
    rows = [{"prompt": "a=", "response": "b"}, {"prompt": "a=", "response": "b<eos>"}]
    made = demonstrations(
        write(tmp_path / "rows.jsonl", rows), tokenizer=byte_tokenizer(around=around)
    )
    assert len(made) == 2
    for ordinal in range(4):
        one = made.at(ordinal)
        assert one.index == ordinal % 2
        assert one.prompt_ids == [BOS] * bool(around) + TOKENIZER("a=").input_ids
        assert one.response_ids == [*TOKENIZER("b").input_ids, EOS]


def test_demonstrations_say_what_is_wrong(tmp_path: Path) -> None:
    file = write(
        tmp_path / "rows.jsonl",
        [{"prompt": "ab", "response": "cd"}, {"prompt": "ab", "response": "cde"}],
    )
    with pytest.raises(
        ValueError,
        match=r"line 2 .*have 6 tokens, but demonstrations\.max_tokens is 5; set it to at least 6",
    ):
        demonstrations(file, max_tokens=5)
    with pytest.raises(
        ValueError, match=r"set demonstrations\.response_column to one of: prompt, response"
    ):
        demonstrations(file, response_column="reply")
    with pytest.raises(ValueError, match=r"line 1 .*the response \(column 'response'\) is empty"):
        demonstrations(write(tmp_path / "empty.jsonl", [{"prompt": "ab", "response": ""}]))
    with pytest.raises(ValueError, match=r"demonstrations\.template to 'none'"):
        demonstrations(file, template="chat", tokenizer=byte_tokenizer(template=None))
    chat = write(
        tmp_path / "chat.jsonl", [{"prompt": [{"role": "user", "content": "q"}], "response": "a"}]
    )
    assert (
        TOKENIZER.decode(demonstrations(chat, template="chat").at(0).prompt_ids)
        == "<|user|>q<eos><|assistant|>"
    )


def test_twenty_thousand_rows_take_seconds(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n}+{n}=", "answer": str(2 * n), "response": f"#{2 * n}"}
        for n in range(20_000)
    ]
    file = write(tmp_path / "rows.jsonl", rows)
    started = time.monotonic()
    assert len(prompts(file)) == len(demonstrations(file)) == 20_000
    assert time.monotonic() - started < 20


def test_unique_keeps_the_first_row_of_each_prompt_and_its_line(tmp_path: Path) -> None:
    rows = [
        {"prompt": p, "answer": str(n)}
        for n, p in enumerate(["1+1=", "2+2=", "1+1=", "3+3=", "2+2="])
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = load_prompts(
        PromptsConfig(source=str(path), unique=True, shuffle=False), TOKENIZER, seed=0
    )
    assert [(prompt.text, prompt.answer) for prompt in found] == [
        ("1+1=", "0"),
        ("2+2=", "1"),
        ("3+3=", "3"),
    ]


CHAT = [{"role": "user", "content": "caf\u00e9 \U0001f600?"}]


def test_the_fingerprint_is_the_same_in_every_process_and_version() -> None:
    """A digest written down once: other versions of Python and of the libraries must find it."""
    rows = [("1+1=", "2"), (CHAT, "x"), (7, ""), ({"b": [1.5, None], "a": True}, "\ud83d")]
    wanted = "4 rows, xxh3-128 5e6452efdcaf96ca73a599733b5c6272"
    assert fingerprint(["chat", True, None], rows) == wanted
    code = (
        "import sys; from megarl.data.fingerprint import fingerprint;"
        f"print(fingerprint({['chat', True, None]!r}, {rows!r}))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == wanted


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


def test_the_fingerprint_of_demonstrations_is_of_the_content(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}=", "response": str(n)} for n in range(5)]
    changed = [*rows[:4], {"prompt": "4=", "response": "5"}]
    one, same, other = (
        demonstrations(write(tmp_path / f"{name}.jsonl", found)).fingerprint
        for name, found in (("one", rows), ("same", rows), ("other", changed))
    )
    assert one == same != other


def test_the_fingerprint_costs_less_than_a_tenth_of_reading(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=" * 20, "answer": str(2 * n)} for n in range(20_000)]
    file = Path(write(tmp_path / "rows.jsonl", rows))

    def seconds(call: Any) -> float:
        started = time.process_time()
        call()
        return time.process_time() - started

    pairs = [(row["prompt"], row["answer"]) for row in rows]
    reading = min(seconds(lambda: prompts(str(file))) for _ in range(3))
    assert min(seconds(lambda: fingerprint([], pairs)) for _ in range(3)) < 0.1 * reading
