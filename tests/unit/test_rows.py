"""Which files a source means, and the values that their rows get."""

from __future__ import annotations

import gzip
import lzma
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megarl.data.rows import column, read_rows, text_of


def rows(source: object, split: str = "train", **changes: Any) -> list[dict[str, Any]]:
    given = {"limit": None, "setting": "prompts", **changes}
    return read_rows(str(source), split=split, **given).rows


def lay(folder: Path, *names: str) -> Path:
    """`folder` with files of one row each, whose `a` is the file's name."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        text = f'{{"a": "{name}"}}\n' if ".jsonl" in name.lower() else f"a\n{name}\n"
        file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return folder


def read(source: object, split: str = "train", **changes: Any) -> list[str]:
    return [row["a"] for row in rows(source, split, **changes)]


TRUE = {"id": "007", "na": "NA", "day": "2024-01-01", "price": "1.50"}


@pytest.mark.parametrize("name", ["train", "train-00000-of-00001", "gsm_train"])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".csv.gz", ".tsv", ".ndjson"])
@pytest.mark.parametrize("below", ["", "data"])
def test_values_of_a_folder_by_split_stay(
    name: str, suffix: str, below: str, tmp_path: Path
) -> None:
    """A reader that guesses types makes 7 of 007, null of NA, and a time of a date."""
    lay(tmp_path / below, f"{name}{suffix}", f"test{suffix}")
    comma = "\t" if suffix == ".tsv" else ","
    text = comma.join(TRUE) + "\n" + comma.join(TRUE.values()) + "\n"
    if "json" in suffix:
        text = str(TRUE).replace("'", '"') + "\n"
    data = gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode()
    (tmp_path / below / f"{name}{suffix}").write_bytes(data)
    assert rows(tmp_path) == [TRUE]


def test_files_of_a_split(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`datasets` finds them; what is read is said."""
    folder = lay(tmp_path / "a", "train.jsonl", "dev.jsonl", "test_b.jsonl", "test-a.jsonl.gz")
    assert read(folder) == ["train.jsonl"] and read(folder, "validation") == ["dev.jsonl"]
    assert read(folder, "test") == ["test-a.jsonl.gz", "test_b.jsonl"]
    assert "2 files are read: test-a.jsonl.gz, test_b.jsonl" in capfd.readouterr().err
    assert read(folder, "test", limit=1) == ["test-a.jsonl.gz"]
    with pytest.raises(ValueError, match=r"split 'x' .*splits train, validation, test; set prom"):
        rows(folder, "x")
    chat = lay(
        tmp_path / "c/data", *(f"{n}-00000-of-00001.csv" for n in ("train_sft", "train_gen"))
    )
    assert read(chat.parent, "train_sft") == ["train_sft-00000-of-00001.csv"]
    clone = lay(tmp_path / "clone", "main/train.csv", "other/train.csv", "README.md")
    assert read(clone, subset="main") == ["main/train.csv"]
    with pytest.raises(ValueError, match=r"c/data/no cannot be read: .*; set it to files or"):
        rows(lay(tmp_path / "c/data/no", "a.md"))


def test_what_datasets_would_leave_out_or_change_is_refused(tmp_path: Path) -> None:
    import datasets

    both = lay(tmp_path / "both", "train-0.jsonl")
    (both / "train-1.jsonl.xz").write_bytes(lzma.compress(b'{"a": "1"}\n'))
    with pytest.raises(ValueError, match=r"several formats for split 'train', train-0\.jsonl and"):
        rows(both)
    (tmp_path / "day").mkdir()
    day = lzma.compress(b'{"a": "2024-05-01"}\n')
    (tmp_path / "day" / "train.jsonl.xz").write_bytes(day)
    with pytest.raises(ValueError, match=r"reads texts of a as times, .*; name \.jsonl files"):
        rows(tmp_path / "day")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.csv.xz").write_bytes(lzma.compress(b"a,b\n007,NA\n"))
    assert rows(tmp_path / "texts") == [{"a": "007", "b": "NA"}]
    datasets.Dataset.from_list([{"a": "1"}]).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"prompts\.subset is 'x', but .* saved .*; leave it out"):
        rows(tmp_path / "saved", subset="x")


def test_only_messages_and_tools_lose_their_nulls(tmp_path: Path) -> None:
    """Arrow gives all objects of a list the same keys, which chat templates would write."""
    chat = [{"role": "user", "content": "q"}, {"role": "tool", "content": "4", "name": "add"}]
    cases = [{"input": "1", "expected": None}, {"input": "2", "expected": "x"}]
    table = pyarrow.Table.from_pylist([{"chat": chat, "cases": cases}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert rows(tmp_path / "rows.parquet") == [{"chat": chat, "cases": cases}]


def test_patterns_and_damaged_files(tmp_path: Path) -> None:
    folder = lay(tmp_path / "a", "a.csv", "b.csv", "sub/c.csv", "d.md")
    (folder / "b.csv").write_text("")
    assert read(f"{folder}/*") == ["a.csv"]
    assert read(f"{folder}/**/*.csv") == ["a.csv", "sub/c.csv"]
    with pytest.raises(ValueError, match=r"pattern that no file fits"):
        rows(f"{tmp_path}/[ab]")
    with pytest.raises(ValueError, match=r"b\.csv is empty"):
        rows(folder / "b.csv")
    for data, said in ((b"a\n1\n", "[Nn]ot a gzip"), (gzip.compress(b"a\n1\n")[:-9], "ended be")):
        (folder / "a.csv.gz").write_bytes(data)
        with pytest.raises(ValueError, match=rf"a\.csv\.gz cannot be read: .*{said}"):
            rows(folder / "a.csv.gz")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_marks_and_ends_of_lines(end: str, tmp_path: Path) -> None:
    for name, lines in (("a.csv", ["a,b", "1,2"]), ("a.jsonl", ['{"a": "1", "b": "2"}'])):
        file = tmp_path / name
        file.write_bytes("".join(f"{line}{end}" for line in lines).encode("utf-8-sig"))
        assert rows(file) == [{"a": "1", "b": "2"}]


def test_narrow_floats_are_the_decimals_that_were_written(tmp_path: Path) -> None:
    f2, f4 = pyarrow.float16(), pyarrow.float32()
    kinds: dict[str, tuple[Any, Any, Any]] = {
        "single": (f4, 1.1, 1.1),
        "half": (f2, 0.1, 0.1),
        "none": (f4, None, None),
        "list": (pyarrow.list_(f4), [1.1, None], [1.1, None]),
        "struct": (pyarrow.struct({"x": f4, "y": pyarrow.list_(pyarrow.struct({"z": f4}))}),
         {"x": 0.7, "y": [{"z": 0.3}, None]}, {"x": 0.7, "y": [{"z": 0.3}, None]}),
        "map": (pyarrow.map_(pyarrow.string(), f4), {"k": 1.1}, [("k", 1.1)]),
        "truth": (pyarrow.bool_(), True, True),
        "date": (pyarrow.date32(), date(2024, 1, 2), "2024-01-02"),
        "time": (pyarrow.time64("us"), time(3, 4), "03:04:00"),
        "zone": (pyarrow.timestamp("ns", "UTC"), datetime(2024, 1, 2, 3, tzinfo=UTC),
         "2024-01-02T03:00:00+00:00"),
    }  # fmt: skip
    table = pyarrow.table(
        {name: pyarrow.array([value], kind) for name, (kind, value, _) in kinds.items()}
    )
    table = table.append_column("coded", table["single"].dictionary_encode())
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    import datasets

    datasets.Dataset(table.select(["single", "list"])).save_to_disk(str(tmp_path / "saved"))
    (row,) = rows(tmp_path / "rows.parquet")
    for name, (_, _, expected) in kinds.items():
        assert row[name] == expected and type(row[name]) is type(expected), name
    assert row["coded"] == 1.1
    assert rows(tmp_path / "saved") == [{"single": 1.1, "list": [1.1, None]}]
    for name, answer in (("single", "1.1"), ("struct.x", "0.7"), ("date", "2024-01-02")):
        value = column(row, name, place="", setting="")
        assert text_of(value, what="", place="") == answer
    with pytest.raises(ValueError, match="is True, not a text or a finite number"):
        text_of(row["truth"], what="", place="")
