"""Rows of a data set, from files, the Hugging Face hub or a program.

    source --read_rows--> Table: rows, and the place of each
    row --Cells.value--> value of a column --text_of--> text

To add a file format, write a function (path) -> iterator of (line or 0, row) and name its suffix in
`READERS`.
"""

from __future__ import annotations

import csv
import functools
import glob
import gzip
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

import xxhash

from megarl.data.hub import hub_state, why_absent
from megarl.settings.data import DataSetConfig
from megarl.settings.schema import require, shortened
from megarl.system import console
from megarl.system.files import canonical_json
from megarl.system.lookup import SOURCES, load
from megarl.system.third_party import opening, quiet

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
C = TypeVar("C", bound=DataSetConfig)
MOST_WHOLE = 1e22
"""Largest power of ten that a float holds exactly; larger floats keep their exponent."""
SAVED = ("state.json", "dataset_dict.json")
"""Files of a folder that `datasets` has saved."""
NOT_TEXT = {"image", "images", "video", "videos", "audio", "audios"}
"""Columns that a text model cannot be shown."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a data set in the order of their files."""

    source: str
    rows: list[Row]
    places: list[str]
    """Of each row its file and number, such as "a.jsonl, line 3 (row 2, counted from 0)"."""


def read_rows(
    source: str,
    split: str,
    limit: int | None,
    setting: str,
    subset: str = "",
    arguments: Mapping[str, Any] | None = None,
) -> Table:
    """Read all rows of `source`, or the first `limit`.

    Args:
        source: a file; a pattern such as data/*.jsonl; a folder or a data set of the hub, of which
            `split` and `subset` are read; or a program that makes rows, such as
            `reasoning_gym:NAME` (`megarl.system.lookup.SOURCES`).
        setting: the section of the recipe ("prompts"), for messages.
        arguments: of a program that makes rows.

    Raises `ValueError` with the file and, for texts, the line; also if there are no rows.
    """
    adapter, colon, name = source.partition(":")
    is_made = bool(colon) and adapter in SOURCES
    require(
        is_made or not arguments,
        f"{setting}.arguments is for a source that makes its rows ({':NAME, '.join(SOURCES)}:NAME),"
        f" but {setting}.source is '{source}'; leave it out",
    )
    if is_made:
        rows = load(SOURCES[adapter])(name, dict(arguments or {}), limit)
        require(bool(rows), f"{setting}.arguments makes no row; set size to 1 or more")
        return Table(source, rows, _places(source, len(rows)))
    files = _files(source, split, subset, setting)
    if not files:
        rows = _read_datasets(source, subset, split, limit, setting)
        places = _places(f"{source}[{split}]", len(rows))
    else:
        rows, places = [], []
    for file in files:
        for location, row in _read_file(file, None if limit is None else limit - len(rows)):
            rows.append(row)
            places.append(location)
    require(bool(rows), f"{setting}.source {source} is empty; set it to one with at least one row")
    return Table(source, rows, places)


def _places(source: str, count: int) -> list[str]:
    return [f"{source} (row {number}, counted from 0)" for number in range(count)]


def _read_file(path: Path, limit: int | None) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) of a file's first `limit` rows."""
    pairs = itertools.islice(READERS[format_of(path)](path), limit)
    try:
        for number, (line, row) in enumerate(pairs):
            at = f", line {line}" if line else ""
            name = f"{path}{at} (row {number}, counted from 0)"
            require(isinstance(row, dict), f"{name} is {kind_of(row)}; make every row an object")
            yield name, row
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; mend it (texts are UTF-8), or set another file"
        ) from None


def _opened(path: Path) -> IO[str]:
    """A UTF-8 file, plain or gzip, without its byte-order mark."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig", newline="")  # pyright: ignore[reportReturnType]


def _json(text: str, path: Path, line: int = 0) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also thousands of digits, or of brackets
        at = line or getattr(error, "lineno", 1)
        raise ValueError(
            f"{path}, line {at}: not JSON: {getattr(error, 'msg', error)}; mend it (a file with one"
            " object a line must be named .jsonl)"
        ) from None


def _read_json_list(path: Path) -> Iterator[tuple[int, Any]]:
    with _opened(path) as file:
        tree = _json(file.read(), path)
    require(
        isinstance(tree, list),
        f"{path} holds {kind_of(tree)}; make it a list of objects, or name it .jsonl",
    )
    return ((0, row) for row in tree)


def _read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _json(line, path, number)


def _read_csv(path: Path, comma: str = ",") -> Iterator[tuple[int, Row]]:
    """Lines and rows of a file with a header; every value is a text."""
    csv.field_size_limit(2**31 - 1)  # of the process; else values of 128 KiB are refused
    with _opened(path) as file:
        reader = csv.DictReader(file, delimiter=comma, strict=True)
        names = list(reader.fieldnames or ())
        require(len({*names}) == len(names), f"{path}: the header has a column twice; rename one")
        for row in reader:
            require(
                None not in row and None not in row.values(),
                f"{path}, line {reader.line_num} has not one value for each of the columns"
                f" {', '.join(names)}; mend the line (a comma inside a value needs quotes)",
            )
            yield reader.line_num, row


def _read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow.parquet

    with opening(f"{path} is not parquet", fix="write it anew, or name it by what it holds"):
        table = pyarrow.parquet.read_table(path)
        return ((0, row) for row in _plain_rows(table.to_pylist(), table.schema))


OF_CHATS = {"role", "from", "function"}
"""Keys of which each message of a chat, and each tool, has one."""


def _plain_rows(rows: list[Row], schema: pyarrow.Schema) -> list[Row]:
    """Change rows of an Arrow table, in place, to values that JSON has: see `_plain`."""
    for field in schema:
        if re.search("float|date|time|struct", str(field.type)):  # most columns have none
            for row in rows:
                row[field.name] = _plain(row[field.name], field.type)
    return rows


def _plain(value: Any, arrow: Any) -> Any:
    """A value of Arrow type `kind` for JSON: a float of 16 or 32 bits as its shortest decimal (1.1,
    not 1.100000023841858), a date or time as ISO text. Messages and tools lose the keys with null,
    since Arrow gives all of a list the same keys.
    """
    from pyarrow import types

    if value is None:
        return None
    if types.is_floating(arrow):
        return float(str(arrow.to_pandas_dtype()(value)))
    if types.is_date(arrow) or types.is_time(arrow) or types.is_timestamp(arrow):
        return value.isoformat()
    if types.is_dictionary(arrow):
        return _plain(value, arrow.value_type)
    if types.is_struct(arrow):
        return {field.name: _plain(value[field.name], field.type) for field in arrow}
    if types.is_map(arrow):
        return [(key, _plain(item, arrow.item_type)) for key, item in value]
    if isinstance(value, list) and types.is_nested(arrow):
        items = [_plain(item, arrow.value_type) for item in value]
        is_chat = all(isinstance(item, dict) and OF_CHATS & item.keys() for item in items)
        return [_without_nulls(item) for item in items] if is_chat else items
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json_list,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": functools.partial(_read_csv, comma="\t"),
}


def format_of(path: Path) -> str:
    """Key of `READERS` for a file name, such as ".jsonl", also of `a.jsonl.gz`; "" if there is
    none.
    """
    name = Path(path.name.lower().removesuffix(".gz"))
    return name.suffix if name.suffix in READERS else ""


def _files(source: str, split: str, subset: str, setting: str) -> list[Path]:
    """The files of a path, pattern or folder, sorted by name. Empty for what `datasets` reads
    itself: the hub, or a folder of other formats.
    """
    path = Path(source)
    if path.is_dir():
        return _files_of_folder(path, split, subset, setting)
    if not path.exists() and glob.has_magic(source):
        files = [Path(name) for name in sorted(glob.glob(source, recursive=True))]
        files = [file for file in files if format_of(file) and file.is_file()]
        require(
            bool(files),
            f"{setting}.source {path} is a pattern that no file fits that ends in"
            f" {', '.join(READERS)}; correct it",
        )
        _say_files(source, files, setting)
        return files
    if format_of(path):
        require(
            path.is_file(), f"{setting}.source {path} does not exist; set it to a file that does"
        )
        return [path]
    require(
        not path.is_file(),
        f"{setting}.source {path} ends in '{path.suffix}', but known files end in"
        f" {', '.join(READERS)}; convert it",
    )
    return []


def _files_of_folder(path: Path, split: str, subset: str, setting: str) -> list[Path]:
    """The files of `split`, as `datasets` finds them by name, in the folder or its subfolder
    `subset`.
    """
    if any((path / name).exists() for name in SAVED):
        return []
    import datasets

    folder, name = (path / subset, None) if (path / subset).is_dir() else (path, subset)
    with opening(f"{setting}.source {folder} cannot be read", fix="set it to files or a pattern"):
        builder = datasets.load_dataset_builder(str(folder), name)
    splits: Mapping[str, list[str]] = builder.config.data_files or {}
    require(
        split in splits,
        f"{setting}.split '{split}' of {folder} cannot be had: its files have the splits"
        f" {', '.join(map(str, splits))}; set {setting}.split to one of these",
    )
    files = sorted(file for file in map(Path, splits[split]) if format_of(file))
    others = [Path(file).name for file in splits[split] if Path(file) not in files]
    if files:
        require(
            not others,
            f"{setting}.source {folder} has files of several formats for split '{split}',"
            f" {files[0].name} and {', '.join(others[:4])}; set it to files or a pattern",
        )
        _say_files(str(path), files, setting)
    return files


def _say_files(source: str, files: list[Path], setting: str) -> None:
    names = ", ".join(file.name for file in files[:4]) + (", ..." if len(files) > 4 else "")
    console.say(f"{setting}.source {source}: {len(files)} files are read: {names}")


def _read_datasets(
    name: str, subset: str, split: str, limit: int | None, setting: str
) -> list[Row]:
    """Read a data set with `datasets`: from the hub, its cache or a local folder."""
    unknown = (
        f"{setting}.source '{name}' is neither a file of this machine ({', '.join(READERS)}) nor"
        " was it downloaded,"
    )
    is_folder = Path(name).is_dir()
    require(is_folder or hub_state() != "unreachable", f"{unknown} {why_absent(name)}")
    is_saved, reader = any(Path(name, file).exists() for file in SAVED), ""
    require(
        not (is_saved and subset),
        f"{setting}.subset is '{subset}', but {setting}.source {name} was saved by `datasets`, and"
        " has none; leave it out",
    )
    import datasets

    try:
        with quiet():
            if is_saved:
                data: Any = datasets.load_from_disk(name)
                if not isinstance(data, datasets.DatasetDict):
                    data = {str(data.split or "train"): data}
                    split = next(iter(data)) if split == "train" else split
                require(split in data, f"it has the splits {', '.join(map(str, data))}")
                data = data[split]
            else:
                reader = datasets.load_dataset_builder(name, subset or None).info.builder_name
                data = datasets.load_dataset(name, subset or None, split=split)
                if reader == "csv":  # again, as texts: 007 would be a number, and NA missing
                    texts = {column: datasets.Value("string") for column in data.column_names}
                    more: Any = {"features": datasets.Features(texts), "keep_default_na": False}
                    data = datasets.load_dataset(name, subset or None, split=split, **more)
    except Exception as error:  # the library raises a dozen kinds
        reason = shortened(str(error), 500)
        why = f"{setting}.source {name} cannot be read: {reason}; set it to files or a pattern"
        if not is_folder:
            why = f"{unknown} {why_absent(name)} ({type(error).__name__}: {reason})"
        if isinstance(error, ValueError) and "split" in reason.lower():
            why = f"{setting}.split '{split}' of '{name}' cannot be had: {reason}"
        raise ValueError(why) from error
    schema = data.features.arrow_schema
    times = [field.name for field in schema if "timestamp" in str(field.type)]
    require(
        not (reader == "json" and times),
        f"{setting}.source {name}: `datasets` reads texts of {', '.join(times)} as times, which"
        " changes them; name .jsonl files instead",
    )
    if is_folder:
        console.say(f"{setting}.source {name}: split '{split}' is read, {len(data)} rows")
    if limit is not None:
        data = data.select(range(min(limit, len(data))))
    return _plain_rows(data.to_list(), schema)


@dataclass(frozen=True, slots=True)
class Cells(Generic[C]):
    """One row, with the section of the recipe that names the columns to read."""

    config: C
    setting: str
    """The section of the recipe ("prompts"), for messages."""
    row: Row
    place: str
    """File and number of the row, for messages."""

    def value(self, name: str) -> Any:
        """The value in the column that the setting `name` names; a dot in the column's name selects
        a key inside. Raises `ValueError`, listing the columns, if there is none or its value is
        null.
        """
        key = getattr(self.config, name)
        return column(self.row, key, place=self.place, setting=f"{self.setting}.{name}")

    def require(self, condition: object, reason: str) -> None:
        """Raise `ValueError` unless `condition` is true: the row's place, then `reason`."""
        require(condition, f"{self.place}: {reason}")


def column(row: Row, name: str, *, place: str, setting: str) -> Any:
    """The value of column `name` in a row; `"a.b"` is key `b` of the object in column `a`, unless a
    column has that whole name. Raises `ValueError`, which begins with `place` and names the
    recipe's key `setting`, if there is none or its value is null.
    """
    value, so_far = row, ""
    for segment in [name] if name in row else name.split("."):
        if not (isinstance(value, dict) and segment in value):
            inside = [f"{so_far}{key}" for key in value] if isinstance(value, dict) else []
            there = ", ".join(inside) or f"{so_far[:-1]} (it has no columns inside)"
            raise ValueError(f"{place}: no column '{name}'; set {setting} to one of: {there}")
        value, so_far = value[segment], f"{so_far}{segment}."
    require(
        value is not None,
        f"{place}: column '{name}' is null; fill it, drop the row, or set {setting} to another"
        " column",
    )
    return value


def text_of(value: Any, *, what: str, place: str) -> str:
    """A text or a finite number as text; raises `ValueError` for other values, which begins with
    `place` and calls the value `what`. A `Decimal` (from parquet) is written without an exponent,
    and a whole float (72.0, which pandas makes in columns with gaps) as "72".
    """
    if isinstance(value, str):
        return value
    number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    require(
        number and (isinstance(value, int) or math.isfinite(value)),
        f"{place}: {what} is {kind_of(value)}, not a text or a finite number; set its column to one"
        " that holds texts (dots reach inside)",
    )
    if isinstance(value, float) and value.is_integer() and abs(value) <= MOST_WHOLE:
        return str(int(value))
    return f"{value:f}" if isinstance(value, Decimal) else str(value)


def kind_of(value: Any) -> str:
    """The type of a JSON value in words ("an object", "null"); a number or truth value itself."""
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null"}
    return names.get(type(value), f"{value!r}")


def fingerprint(settings: Iterable[Any], rows: Iterable[tuple[Any, str]]) -> str:
    """Text "N rows, xxh3-128 HEX" that identifies a data set on every machine. The digest covers
    `settings` (JSON data that determine rendering and order) and each row's (prompt, answer or
    response), but no names of files or columns.
    """
    hasher = xxhash.xxh3_128()
    for value in settings:
        hasher.update(framed(value))
    count = 0
    for prompt, reply in rows:
        hasher.update(framed(prompt) + framed(reply))
        count += 1
    return f"{count} rows, xxh3-128 {hasher.hexdigest()}"


def framed(value: Any) -> bytes:
    """Bytes of a text, or of the JSON of another value, for hashing, prefixed by type and length:
    so concatenated values stay distinct.
    """
    if isinstance(value, str):
        # A JSON text may hold half a surrogate pair, which plain UTF-8 refuses.
        text = value.encode("utf-8", "surrogatepass")
        return b"text %d:%b" % (len(text), text)
    text = canonical_json(value).encode()
    return b"json %d:%b" % (len(text), text)
