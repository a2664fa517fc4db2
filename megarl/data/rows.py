"""Rows of a data set, whatever holds them, and the columns of a row.

    source --read_rows--> Table (rows, and where each was found) --column, render, encode--> texts
    and token ids

To add a file format, write a function (path, limit) -> Table and name its suffix in `READERS`.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megarl.data.hub import hub_state, why_absent
from megarl.schema import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in the order of their file."""

    source: str
    rows: list[Row]
    lines: list[int] | None = None
    """Line of each row, from 1, where the file has lines."""

    def only(self, indices: list[int]) -> Table:
        """The rows at `indices`, which keep their places in the file."""
        lines = [self.lines[index] for index in indices] if self.lines else None
        return Table(self.source, [self.rows[index] for index in indices], lines)

    def place(self, index: int) -> str:
        """Where row `index` was found, for errors."""
        line = f", line {self.lines[index]}" if self.lines else ""
        return f"{self.source}{line} (row {index}, counted from 0)"


def read_json(path: Path, limit: int | None) -> Table:
    """A list of objects."""
    try:
        tree = json.loads(_text(path))
    except json.JSONDecodeError as error:
        fix = (
            "; a file with one object a line must be named .jsonl"
            if error.msg == "Extra data"
            else "; mend the file"
        )
        raise ValueError(f"{path}, line {error.lineno}: not JSON: {error.msg}{fix}") from None
    require(
        isinstance(tree, list),
        f"{path} holds {_kind(tree)}; make it a list of objects, or name it .jsonl",
    )
    for index, row in enumerate(tree[:limit]):
        require(
            isinstance(row, dict),
            f"{path}, row {index} (from 0) is {_kind(row)}; make every row an object",
        )
    return Table(str(path), tree[:limit])


def read_jsonl(path: Path, limit: int | None) -> Table:
    """One object a line; blank lines are passed over."""
    rows: list[Row] = []
    lines: list[int] = []
    # Not splitlines(): it also cuts at characters that may stand in a JSON string.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        if limit is not None and len(rows) == limit:
            break
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: not JSON: {error.msg} at column {error.colno}; mend the"
                " line"
            ) from None
        require(
            isinstance(row, dict),
            f"{path}, line {number} is {_kind(row)}; make every line an object",
        )
        rows.append(row)
        lines.append(number)
    return Table(str(path), rows, lines)


def read_parquet(path: Path, limit: int | None) -> Table:
    """A parquet table; nested columns become nested objects."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not parquet: {error}; write it anew, or name it by what it holds"
        ) from None
    return Table(str(path), (table if limit is None else table.slice(0, limit)).to_pylist())


def read_csv(path: Path, limit: int | None) -> Table:
    """Comma-separated with a line of column names; every value is a text."""
    rows: list[Row] = []
    lines: list[int] = []
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(_text(path).splitlines(keepends=True), strict=True)
    try:
        names = next(reader, [])
        line = reader.line_num + 1
        for values in reader:
            if limit is not None and len(rows) == limit:
                break
            if values:
                require(
                    len(values) == len(names),
                    f"{path}, line {line} has {len(values)} values for the {len(names)} columns"
                    f" {', '.join(names)}; mend the line (a comma inside a value needs quotes"
                    " around it)",
                )
                rows.append(dict(zip(names, values, strict=True)))
                lines.append(line)
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: not CSV: {error}; mend the line"
        ) from None
    finally:
        csv.field_size_limit(before)
    return Table(str(path), rows, lines)


READERS: dict[str, Callable[[Path, int | None], Table]] = {
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
    ".csv": read_csv,
}


def read_rows(
    source: str, *, split: str, limit: int | None, setting: str, subset: str = ""
) -> Table:
    """The rows of a file, by its suffix, or of a data set on the hub; raises `ValueError` naming
    file and line.

    `setting` is the section of the recipe ("prompts"), for errors.
    """
    require(
        bool(source),
        f"{setting}.source is empty; set it to a data file or the name of a data set on the hub",
    )
    path = Path(source)
    reader = READERS.get(path.suffix.lower())
    if reader is not None:
        require(
            path.is_file(), f"{setting}.source {path} does not exist; set it to a file that does"
        )
        table = reader(path, limit)
    else:
        require(
            not path.is_file(),
            f"{setting}.source {path} ends in '{path.suffix}', but known files end in"
            f" {', '.join(READERS)}; convert it",
        )
        table = _read_hub(source, subset, split, limit, setting)
    require(
        bool(table.rows), f"{setting}.source {source} is empty; set it to one with at least one row"
    )
    return table


def _read_hub(name: str, subset: str, split: str, limit: int | None, setting: str) -> Table:
    """A data set that `datasets` knows: on the hub, in its cache, or a local folder."""
    state = "online" if Path(name).is_dir() else hub_state()
    unknown = (
        f"{setting}.source '{name}' is neither a file of this machine ({', '.join(READERS)}) nor"
        " was it downloaded,"
    )
    require(state != "unreachable", f"{unknown} {why_absent(name)}")
    import datasets

    try:
        data = datasets.load_dataset(name, subset or None, split=split)
    except Exception as error:  # the library raises a dozen kinds
        said = " ".join(str(error).split())[:500]
        if isinstance(error, ValueError) and "split" in said.lower():
            raise ValueError(
                f"{setting}.split '{split}' of '{name}' cannot be had: {said}"
            ) from error
        raise ValueError(
            f"{unknown} {why_absent(name)} ({type(error).__name__}: {said})"
        ) from error
    return Table(f"{name}[{split}]", [dict(row) for row in itertools.islice(data, limit)])


def _text(path: Path) -> str:
    """The text of a UTF-8 file, its byte-order mark removed."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 (byte {error.start}: {error.reason}); convert it"
        ) from None


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "null"}.get(
        type(value), f"{value!r}"
    )


def column(row: Row, name: str, *, place: str, setting: str) -> Any:
    """The value of column `name`, where dots reach into nested columns; raises `ValueError` listing
    those there are.
    """
    if name in row:
        value = row[name]
    else:
        value, so_far = row, ""
        for part in name.split("."):
            there = ", ".join(f"{so_far}{key}" for key in value) if isinstance(value, dict) else ""
            require(
                isinstance(value, dict) and part in value,
                f"{place}: no column '{name}'; set {setting} to one of:"
                f" {there or f'{so_far[:-1]} (it has no columns inside)'}",
            )
            value, so_far = value[part], f"{so_far}{part}."
    require(
        value is not None,
        f"{place}: column '{name}' is null; fill it, drop the row, or set {setting} to another"
        " column",
    )
    return value


def text_of(value: Any, *, what: str, place: str) -> str:
    """A text or a number as a text; raises `ValueError` for anything else."""
    if isinstance(value, str):
        return value
    require(
        isinstance(value, int | float),
        f"{place}: {what} is {_kind(value)}, not a text; set its column to one that holds texts"
        " (dots reach inside)",
    )
    return str(value)


def render(
    value: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: Literal["none", "chat"],
    system: str = "",
    instruction: str = "",
    place: str,
    setting: str,
) -> str:
    """The text the model sees of a prompt column (a text, or a chat as a list of {role, content}),
    up to the reply.
    """
    if template == "none":
        require(
            not isinstance(value, list),
            f"{place}: the prompt is a chat, but {setting}.template is 'none'; set it to 'chat'",
        )
        text = text_of(value, what="the prompt", place=place)
        return f"{text}\n{instruction}" if instruction else text
    chat = [{"role": "user", "content": value}] if isinstance(value, str) else value
    whole = isinstance(chat, list) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in chat
    )
    require(
        whole and len(chat) > 0,
        f"{place}: the prompt is neither a text nor a chat (a list of objects with the texts role"
        f" and content); set {setting}.prompt_column to one that is",
    )
    chat = [{"role": turn["role"], "content": turn["content"]} for turn in chat]
    if instruction:
        asked = [number for number, turn in enumerate(chat) if turn["role"] == "user"]
        require(
            bool(asked),
            f"{place}: the chat has no user message to append {setting}.instruction to; remove the"
            " instruction",
        )
        chat[asked[-1]]["content"] += f"\n{instruction}"
    if system:
        require(
            chat[0]["role"] != "system",
            f"{place}: the chat has a system message of its own; remove {setting}.system",
        )
        chat.insert(0, {"role": "system", "content": system})
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates raise what they like, jinja2's errors among them
        raise ValueError(
            f"{place}: the chat template refuses this chat: {error}; mend the chat or the template"
        ) from error


def check_template(
    tokenizer: PreTrainedTokenizerBase, template: Literal["none", "chat"], setting: str
) -> None:
    """Raise `ValueError` where `template` is 'chat' and the tokenizer has no chat template."""
    require(
        template == "none" or bool(getattr(tokenizer, "chat_template", None)),
        f"{setting}.template is 'chat', but the tokenizer has no chat template; set"
        f" {setting}.template to 'none', use an instruction-tuned model, or put a"
        " chat_template.jinja beside the tokenizer",
    )


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """[N][T] ids of each text."""
    ids_only: dict[str, Any] = {
        "return_attention_mask": False,
        "return_token_type_ids": False,
    }  # half the time
    return tokenizer(list(texts), add_special_tokens=add_special_tokens, **ids_only).input_ids


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], template: Literal["none", "chat"]
) -> list[list[int]]:
    """[N][P] ids: a rendered chat has its special tokens in the text; a plain text gets what the
    tokenizer puts before it.

    What the tokenizer puts *after* a text is an end of sequence, and a prompt that has ended cannot
    be answered.
    """
    rows = encode(tokenizer, texts, add_special_tokens=template == "none")
    eos, end = tokenizer.eos_token, tokenizer.eos_token_id
    if template == "none" and eos is not None:
        for text, ids in zip(texts, rows, strict=True):
            while ids and ids[-1] == end and not text.endswith(str(eos)):
                ids.pop()
    return rows


class Order:
    """In which order rows are used, a pure function of (seed, ordinal): epochs follow each other,
    each shuffled anew.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        self._num_rows, self._seed, self._shuffle = num_rows, seed, shuffle
        self._epochs: dict[int, list[int]] = {}

    def row(self, ordinal: int) -> int:
        """The row used as number `ordinal`, from 0."""
        require(ordinal >= 0, f"ordinal is {ordinal}; ordinals count from 0")
        epoch, position = divmod(ordinal, self._num_rows)
        return self._permutation(epoch)[position] if self._shuffle else position

    def _permutation(self, epoch: int) -> list[int]:
        found = self._epochs.get(epoch)
        if found is None:
            # Sorted by hash, not `random.shuffle`: the same on every version of every library.
            def key(row: int) -> bytes:
                return hashlib.blake2b(
                    f"{self._seed}/{epoch}/{row}".encode(), digest_size=16
                ).digest()

            found = sorted(range(self._num_rows), key=key)
            while len(self._epochs) >= 2:  # where one epoch runs into the next, both are in use
                self._epochs.pop(next(iter(self._epochs)), None)
            self._epochs[epoch] = found
        return found
