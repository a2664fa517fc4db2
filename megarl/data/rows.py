"""Rows of a data set, from a file or from the Hugging Face hub.

    source --read_rows--> Table: rows, and where each was found
    row --Cells.value--> value of a column --text_of--> text

To add a file format, write a function (path, most rows or None) -> Table and name its suffix in
`READERS`.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import itertools
import json
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import xxhash

from megarl import console
from megarl.data.config import DataSetConfig
from megarl.data.hub import hub_state, why_absent
from megarl.data.made import made_rows
from megarl.files import canonical_json
from megarl.schema import require
from megarl.third_party import opening, quiet
from megarl.third_party import said as in_words

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
C = TypeVar("C", bound=DataSetConfig)
MOST_WHOLE = 1e22
"""Largest power of ten that a float holds exactly; larger floats keep their exponent."""
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""{split: the words for it, which file names have between other signs than letters}"""
SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")
"""Beginning of the name of a file that is a part of a split, whatever this is called."""
SAVED = ("state.json", "dataset_dict.json")
"""Files of a folder that `datasets` has saved."""
ABOUT = ("dataset_info.json", "dataset_infos.json")
"""Files that tell of a data set and hold none of its rows."""
NOT_TEXT = {"image", "images", "video", "videos", "audio", "audios"}
"""Columns of what a model of text cannot be shown."""
MOST_FILES = 20_000
"""Largest number of files in a folder that is read as a data set."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a data set, each a dict {column: value}, in the order of their file, and where each
    row was found.
    """

    source: str
    rows: list[Row]
    places: list[str]
    """For each row where it was found, such as "a.jsonl, line 3 (row 2, counted from 0)", for
    messages."""

    @classmethod
    def of(cls, source: object, rows: list[Row], lines: Sequence[int] | None = None) -> Table:
        """A table of the rows of one file or data set, called `source` in messages. `lines`: for
        each row its line number, from 1; None if rows have none.
        """
        at = [""] * len(rows) if lines is None else [f", line {line}" for line in lines]
        places = [f"{source}{line} (row {n}, counted from 0)" for n, line in enumerate(at)]
        return cls(str(source), rows, places)


def read_json_list(path: Path, limit: int | None) -> Table:
    """Read a JSON file that holds a list of objects, its first `limit` rows or all (None), as a
    `Table` of dicts. The file is UTF-8, and may be compressed by gzip. Raises `ValueError` with
    file and line of a mistake.
    """
    text = _text(path)
    tree = _json(text, path)
    require(
        isinstance(tree, list),
        f"{path} holds {kind_of(tree)}; make it a list of objects, or name it .jsonl",
    )
    for index, row in enumerate(tree[:limit]):
        require(
            isinstance(row, dict),
            f"{path}, row {index} (from 0) is {kind_of(row)}; make every row an object",
        )
    return Table.of(path, tree[:limit])


def read_jsonl(path: Path, limit: int | None) -> Table:
    """Read a file with one JSON object on each line, the first `limit` rows or all (None), as a
    `Table` of dicts; blank lines are skipped. The file is UTF-8, and may be compressed by gzip.
    Raises `ValueError` with file and line of a mistake.
    """
    # Not splitlines(): it also cuts at characters that may stand in a JSON string.
    numbered = enumerate(_text(path).split("\n"), start=1)
    found: dict[int, Row] = {}
    for number, line in itertools.islice((one for one in numbered if one[1].strip()), limit):
        found[number] = row = _json(line, path, number)
        require(
            isinstance(row, dict),
            f"{path}, line {number} is {kind_of(row)}; make every line an object",
        )
    return Table.of(path, [*found.values()], [*found])


def _json(text: str, path: Path, line: int = 0) -> Any:
    """The value of the JSON `text`: of line `line` of a file, or 0 for all of it. Raises
    `ValueError` with the line of a mistake.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except KeyError as error:
        at, said = line or _line_of(text), f"{error.args[0]}; keep one"
    except json.JSONDecodeError as error:
        at = line or error.lineno
        said = f"not JSON: {error.msg} at column {error.colno}; mend the line"
        if error.msg == "Extra data" and not line:
            said = f"not JSON: {error.msg}; a file with one object a line must be named .jsonl"
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        at, said = line, f"{in_words(error)}; mend the {'line' if line else 'file'}"
    raise ValueError(f"{path}{f', line {at}' if at else ''}: {said}")


def read_parquet(path: Path, limit: int | None) -> Table:
    """Read a parquet file, its first `limit` rows or all (None), as a `Table` of dicts; nested
    columns become nested objects, dates and times ISO texts. Raises `ValueError` if the file is not
    parquet.
    """
    import pyarrow.parquet

    with opening(f"{path} is not parquet", fix="write it anew, or name it by what it holds"):
        table = pyarrow.parquet.read_table(path)
        rows = (table if limit is None else table.slice(0, limit)).to_pylist()
        _make_plain(rows, table.schema)
    return Table.of(path, rows)


def _make_plain(rows: list[Row], schema: pyarrow.Schema) -> None:
    """Replace values of the rows of an arrow table: see `_plain`."""
    for field in schema:
        if re.search("float|date|time", str(field.type)):  # most columns have none: time is saved
            for row in rows:
                row[field.name] = _plain(row[field.name], field.type)


def _plain(value: Any, kind: Any) -> Any:
    """A value of arrow type `kind`; a float of 16 or 32 bits as the shortest decimal that it stands
    for (1.1, which as a double is 1.100000023841858), a date or time as ISO text, also inside lists
    and objects.
    """
    from pyarrow import types

    if value is None:
        return None
    if types.is_floating(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    if types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind):
        return value.isoformat()
    if types.is_dictionary(kind):
        return _plain(value, kind.value_type)
    if types.is_struct(kind):
        return {part.name: _plain(value[part.name], part.type) for part in kind}
    if types.is_map(kind):
        return [(key, _plain(item, kind.item_type)) for key, item in value]
    if isinstance(value, list) and types.is_nested(kind):
        return [_plain(item, kind.value_type) for item in value]
    return value


def read_csv(path: Path, limit: int | None) -> Table:
    """Read a comma-separated file whose first line has the column names, its first `limit` rows or
    all (None), as a `Table` of dicts; every value is a text. The file is UTF-8, and may be
    compressed by gzip. Raises `ValueError` with file and line of a mistake.
    """
    csv.field_size_limit(2**31 - 1)  # of the process; else values of 128 KiB are refused
    # Not splitlines(): it also cuts at characters that may stand in a value, such as U+2028.
    reader = csv.reader(io.StringIO(_text(path)), strict=True)
    found: dict[int, Row] = {}
    try:
        names = next(reader, [])
        twice = repeated(names)
        require(
            twice is None,
            f"{path}, line 1: the header has the column {twice!r} twice; rename one of the two",
        )
        line = reader.line_num + 1
        for values in reader:
            if len(found) == limit:
                break
            if values:
                require(
                    len(values) == len(names),
                    f"{path}, line {line} has {len(values)} values for the {len(names)} columns"
                    f" {', '.join(names)}; mend the line (a comma inside a value needs quotes"
                    " around it)",
                )
                found[line] = dict(zip(names, values, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        said = f"{path}, line {reader.line_num}: not CSV: {error}; mend the line"
        raise ValueError(said) from None
    return Table.of(path, [*found.values()], [*found])


READERS: dict[str, Callable[[Path, int | None], Table]] = {
    ".json": read_json_list,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
    ".csv": read_csv,
}
TEXTS = (".csv", ".json", ".jsonl")
"""Formats of which these readers leave values as texts where `datasets` would read numbers, nulls
and times."""


def read_rows(
    source: str,
    split: str,
    limit: int | None,
    setting: str,
    subset: str = "",
    arguments: Mapping[str, Any] | None = None,
) -> Table:
    """Read all rows, or the first `limit`, of `source`: a file whose suffix determines the format,
    a folder, a pattern such as data/*.jsonl, or the name of a data set on the Hugging Face hub, of
    which `split` and `subset` (configuration, or "") are read. Returns a `Table`: rows as dicts
    {column: value}, and where each was found. Raises `ValueError` that names file and line, also if
    there is no row.

    `setting`: the section of the recipe ("prompts"), for messages. `arguments`: for a source that
    makes its rows, such as `reasoning_gym:NAME` (see `megarl.lookup.SOURCES`); of others empty.
    """
    made = made_rows(source, arguments, limit, setting)
    if made is not None:
        return Table.of(source, made)
    path = Path(source)
    if path.is_dir():
        files, others = _of_folder(path, split, subset, setting)
    elif not path.exists() and glob.has_magic(source):
        files, others = _of_pattern(path, setting)
    else:
        files, others = [], []
    if files:
        table = _joined(source, files, others, limit, setting)
    elif format_of(path) and not path.is_dir():
        require(
            path.is_file(), f"{setting}.source {path} does not exist; set it to a file that does"
        )
        table = READERS[format_of(path)](path, limit)
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


def format_of(path: Path) -> str:
    """Which reader of `READERS` reads the file, by its name: the key, such as ".jsonl", also for a
    file compressed by gzip (`a.jsonl.gz`); "" if none does. The file need not exist.
    """
    name = Path(path.name.lower().removesuffix(".gz"))
    found = name.suffix if name.suffix in READERS else ""
    return "" if found == ".parquet" and name.name != path.name.lower() else found


def _of_folder(path: Path, split: str, subset: str, setting: str) -> tuple[list[Path], list[str]]:
    """Choose which files of the data folder `path` are read. Returns (those files, sorted by name;
    names of all else in the folder). If file names contain names of splits, the files of `split`
    are read, otherwise all. If the folder has no data files itself, they are looked for in its
    subfolder `subset`, `split` or `data`. Returns ([], []) for a folder that the library `datasets`
    has saved and reads itself. `setting`: section of the recipe, for messages.

    Raises `ValueError` if it is not clear which files are meant.
    """
    # datasets looks at every file below, which in / or a home folder takes minutes.
    counts = (len(folders) + len(files) for _, folders, files in os.walk(path))
    require(
        all(count <= MOST_FILES for count in itertools.accumulate(counts)),
        f"{setting}.source '{path}' is a folder with more than {MOST_FILES:,} files; set it to the"
        " folder of one data set",
    )
    if any((path / name).exists() for name in SAVED):
        return [], []
    inside = sorted(one for one in path.iterdir() if not one.name.startswith("."))
    folders = {one.name: one for one in inside if one.is_dir()}
    if subset in folders:
        return _of_folder(folders[subset], split, "", setting)
    held = [one for one in inside if format_of(one) and one.is_file() and one.name not in ABOUT]
    below = next((folders[name] for name in (split, "data") if name in folders), None)
    if not held and below:
        return _of_folder(below, split, "", setting)
    if not held:
        deep = next((one for one in sorted(path.rglob("*")) if format_of(one) in TEXTS), None)
        require(
            deep is None,
            f"{setting}.source {path} holds its files in other folders, such as {deep}; set it to"
            f" one of these, or to {path}/**/*{deep and format_of(deep)}",
        )
        return [], []
    files = _of_split(held, path, split, setting)
    kinds = sorted({format_of(file) for file in files})
    require(
        len(kinds) <= 1,
        f"{setting}.source {path} is a folder of several formats"
        f" ({', '.join(file.name for file in files[:6])}); set it to one of the files, or to"
        f" {' or '.join(f'{path}/*{kind}' for kind in kinds)}",
    )
    return files, [
        f"{one.name}/" if one.is_dir() else one.name for one in inside if one not in files
    ]


def _of_split(files: list[Path], folder: Path, split: str, setting: str) -> list[Path]:
    """Those of `files` whose names tell that they hold `split`; all, where no name tells a split.
    Raises `ValueError` if there are none of `split`, or a file of its format that tells no split.
    """
    splits = {file: _split_of(file) for file in files}
    if not any(splits.values()):
        return files
    wanted = {split, _split_of(Path(split))}
    found = [file for file in files if file.name.partition(".")[0] == split]
    found = found or [file for file in files if splits[file] and splits[file] in wanted]
    require(
        bool(found),
        f"{setting}.split '{split}' of {folder} cannot be had: its files have the splits"
        f" {', '.join(sorted({*splits.values()} - {''}))}; set {setting}.split to one of these",
    )
    kind = format_of(found[0])
    unclear = next((one for one in files if not splits[one] and format_of(one) == kind), None)
    require(
        unclear is None,
        f"{setting}.source {folder} holds {found[0].name} of split '{split}', and"
        f" {unclear and unclear.name}, which names no split; set it to {folder}/*{kind}, or to a"
        " pattern of those to read",
    )
    return found


def _split_of(file: Path) -> str:
    """The split that a file's name tells; empty if it tells none."""
    shard = SHARD.match(file.name)
    if shard:
        return shard[1]
    words = re.findall("[a-z]+", file.name.lower())
    return next((name for name, known in SPLITS.items() if {*known} & {*words}), "")


def _of_pattern(path: Path, setting: str) -> tuple[list[Path], list[str]]:
    """The files that a pattern (`data/*.jsonl`) names, each once, and the names of what it fits
    besides. Raises `ValueError` for a pattern that fits no file.
    """
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    files = {one.resolve(): one for one in reversed(found) if format_of(one) and one.is_file()}
    kept = sorted(files.values())
    require(
        bool(kept),
        f"{setting}.source {path} is a pattern that no file fits that ends in {', '.join(READERS)};"
        " correct it",
    )
    others = [f"{one.name}/" if one.is_dir() else one.name for one in found if not format_of(one)]
    return kept, others if "**" not in str(path) else [one for one in others if one[-1] != "/"]


def _joined(
    source: str, files: list[Path], others: list[str], limit: int | None, setting: str
) -> Table:
    """Read the rows of `files`, one file after the other, at most `limit` rows (None: all). Prints
    which files are read and which of the `others`, found beside them, are not.
    """

    def some(names: list[str]) -> str:
        return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")

    names = some([file.name for file in files])
    beside = f"; not read: {some(others)}" if others else ""
    console.say(f"{setting}.source {source}: {len(files)} files are read: {names}{beside}")
    rows: list[Row] = []
    places: list[str] = []
    for file in files:
        left = None if limit is None else limit - len(rows)
        if left == 0:
            break
        part = READERS[format_of(file)](file, left)
        places += part.places
        rows += part.rows
    return Table(source, rows, places)


def _read_hub(name: str, subset: str, split: str, limit: int | None, setting: str) -> Table:
    """Read a data set with `datasets`: from the hub, from its cache, or from a local folder."""
    state = "online" if Path(name).is_dir() else hub_state()
    unknown = (
        f"{setting}.source '{name}' is neither a file of this machine ({', '.join(READERS)}) nor"
        " was it downloaded,"
    )
    require(state != "unreachable", f"{unknown} {why_absent(name)}")
    import datasets

    try:
        with quiet():
            if any(Path(name, file).exists() for file in SAVED):
                data: Any = datasets.load_from_disk(name)
                if not isinstance(data, datasets.DatasetDict):
                    data = {str(data.split or "train"): data}
                    split = next(iter(data)) if split == "train" else split
                require(split in data, f"it has the splits {', '.join(map(str, data))}")
                data = data[split]
            else:
                data = datasets.load_dataset(name, subset or None, split=split)
    except Exception as error:  # the library raises a dozen kinds
        said = " ".join(str(error).split())[:500]
        why = f"{unknown} {why_absent(name)} ({type(error).__name__}: {said})"
        if isinstance(error, ValueError) and "split" in said.lower():
            why = f"{setting}.split '{split}' of '{name}' cannot be had: {said}"
        raise ValueError(why) from error
    if Path(name).is_dir():
        console.say(f"{setting}.source {name}: split '{split}' is read, {len(data)} rows")
    if limit is not None:
        data = data.select(range(min(limit, len(data))))
    rows = data.to_list()
    _make_plain(rows, data.features.arrow_schema)
    return Table.of(f"{name}[{split}]", rows)


def _text(path: Path) -> str:
    """Read a UTF-8 file, which gzip may have compressed, as text without a byte-order mark."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 (byte {error.start}: {error.reason}); convert it"
        ) from None
    except (OSError, EOFError, zlib.error) as error:  # the latter two: a damaged .gz
        why = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{path} cannot be read: {why}; set another file") from None


def repeated(names: Sequence[str]) -> str | None:
    """The first name that occurs more than once; None if each occurs once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file. Raises `KeyError` for a key that occurs twice, of which Python's
    reader would take the last.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise KeyError(f"an object has the key {repeated([key for key, _ in pairs])!r} twice")
    return found


def _line_of(text: str) -> int:
    """Line, from 1, of the first row of a JSON list in which `_object` finds a key twice."""
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    start = 0
    while True:
        try:
            start = text.index("{", start)
            start = decoder.raw_decode(text, start)[1]
        except (KeyError, ValueError):  # ValueError: a brace in a text that is no row
            break
    return text.count("\n", 0, start) + 1


@dataclass(frozen=True, slots=True)
class Cells(Generic[C]):
    """One row of a data set, a dict {column: value}, together with the section of the recipe that
    names the columns to read: `value("prompt_column")` is the value in the column that the setting
    `prompt_column` names.
    """

    config: C
    setting: str
    """The section of the recipe ("prompts"), for error messages."""
    row: Row
    place: str
    """Where the row was found, for error messages."""

    def value(self, name: str) -> Any:
        """The value in the row's column that the setting `name` of the section names:
        `value("prompt_column")`. A dot in the column's name selects a key inside the column. Raises
        `ValueError`, listing the columns, if there is none, or its value is null.
        """
        key = getattr(self.config, name)
        return column(self.row, key, place=self.place, setting=f"{self.setting}.{name}")

    def require(self, condition: object, said: str) -> None:
        """Raise `ValueError` unless `condition` is true. The message is the row's file and number,
        then `said`.
        """
        require(condition, f"{self.place}: {said}")


def column(row: Row, name: str, *, place: str, setting: str) -> Any:
    """The value of column `name` in a row; `"a.b"` is key `b` of the object in column `a`, unless a
    column has that whole name. Raises `ValueError`, which begins with `place` and names the
    recipe's key `setting`, if there is no such column or its value is null.
    """
    value, so_far = row, ""
    for part in [name] if name in row else name.split("."):
        if not (isinstance(value, dict) and part in value):
            inside = [f"{so_far}{key}" for key in value] if isinstance(value, dict) else []
            there = ", ".join(inside) or f"{so_far[:-1]} (it has no columns inside)"
            raise ValueError(f"{place}: no column '{name}'; set {setting} to one of: {there}")
        value, so_far = value[part], f"{so_far}{part}."
    require(
        value is not None,
        f"{place}: column '{name}' is null; fill it, drop the row, or set {setting} to another"
        " column",
    )
    return value


def text_of(value: Any, *, what: str, place: str) -> str:
    """Convert a text or a finite number to text; raises `ValueError` for any other value, with a
    message that begins with `place` and calls the value `what`. A `Decimal` (from parquet files)
    keeps its digits, without an exponent. A whole-numbered float (72.0, which pandas makes in
    columns with gaps) becomes "72".
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
    """The type of a JSON value in words for messages: "an object", "a list", "a text" or "null"; a
    number or truth value as Python writes it.
    """
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null"}
    return names.get(type(value), f"{value!r}")


def fingerprint(settings: Iterable[Any], rows: Iterable[tuple[Any, str]]) -> str:
    """Text "N rows, xxh3-128 HEX" that identifies the content of a data set. The digest covers
    `settings` (JSON data that determine rendering and order) and, in order, each row's (prompt,
    answer or response).

    The digest is the same on every machine and Python version. It does not depend on file or column
    names.
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
    """Bytes of a text, or of the JSON of another value, prefixed by type and length, for hashing.
    The prefix makes the concatenation of several values unambiguous.
    """
    if isinstance(value, str):
        # A JSON text may hold half a surrogate pair, which plain UTF-8 refuses.
        text = value.encode("utf-8", "surrogatepass")
        return b"text %d:%b" % (len(text), text)
    text = canonical_json(value).encode()
    return b"json %d:%b" % (len(text), text)
