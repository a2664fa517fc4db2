"""Fuzz of what a recipe names: model folders, data files, verifiers; and of the environment."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import struct
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

from support.fuzz_case import ROWS, SECTIONS, Case, Expect

VALUES: list[Any] = [
    0, -1, 1, 3, 10**6, 10**12, 10**30, 1.5, -0.5, "text", "", None, [], {}, True, False,
    float("nan"), float("inf"), [1], {"a": 1}, "1", "\ud800", "silu",
]  # fmt: skip
RAW: list[bytes] = [
    b"", b"{", b"[]", b"3", b"null", b'"x"', b"\x00" * 64, b"\xff\xfe\x00", b"{}", b"[" * 5000,
    b"{'a': 1}", b'{"a": ' * 3000, b'{"a": 1}{"b": 2}', b"PK\x03\x04", b"version https://git-lfs",
]  # fmt: skip

NUMBERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "head_dim",
)  # fmt: skip
"""Settings of config.json that only some positive numbers can be."""
ROPES: list[Any] = [
    {"rope_type": "yarn"}, {"rope_type": "yarn", "factor": 0}, {"rope_type": "no"}, {}, [], 3,
    {"rope_type": "linear"}, {"rope_type": "linear", "factor": -1}, {"rope_type": "llama3"},
    {"rope_type": "default", "rope_theta": 0}, {"rope_type": "default", "rope_theta": "x"},
    {"rope_theta": float("nan")}, {"rope_type": None}, {"type": "yarn", "factor": float("inf")},
    {"rope_type": "dynamic", "factor": 2.0}, {"full_attention": {}}, {"rope_type": ["a"]},
]  # fmt: skip


def raw(draw: random.Random, name: str) -> tuple[str, Callable[[Path], None]]:
    """(words, change) of a file's bytes: other content, a cut, no regular file."""
    way = draw.choice(["bytes", "bytes", "cut", "folder", "loop", "nowhere"])
    content, share = draw.choice(RAW), draw.random()

    def spoil(folder: Path) -> None:
        path = folder / name
        data = path.read_bytes() if path.exists() else b"{}"
        path.unlink(missing_ok=True)
        if way == "folder":
            path.mkdir()
        elif way in ("loop", "nowhere"):
            path.symlink_to(path if way == "loop" else path.with_name("nowhere"))
        else:
            path.write_bytes(content if way == "bytes" else data[: int(len(data) * share)])

    shown = repr(content[:12]) if way == "bytes" else f"{share:.2f}" if way == "cut" else ""
    return f"{name}: {way} {shown}", spoil


def change_json(name: str, keys: list[str], value: Any, *, drop: bool = False) -> Any:
    """Set or drop a nested key of a JSON file."""

    def spoil(folder: Path) -> None:
        path = folder / name
        tree = json.loads(path.read_text()) if path.exists() else {}
        *above, last = keys
        place = reduce(lambda inner, key: inner.setdefault(key, {}), above, tree)
        place[last] = value
        if drop:
            del place[last]
        path.write_text(json.dumps(tree))

    return spoil


def model_config(draw: random.Random, case: Case, good: Path) -> Case:
    """The model's config.json."""
    case.own_model = True
    if draw.random() < 0.15:
        return case.spoiled(*raw(draw, "model/config.json"), "refuse")
    if draw.random() < 0.15:
        rope = draw.choice(ROPES)
        key = draw.choice(["rope_parameters", "rope_scaling"])
        change = change_json("model/config.json", [key], rope)
        return case.spoiled(f"config.json {key} = {rope}", change)
    tree = json.loads((good / "config.json").read_text())
    more = ["sliding_window", "rope_theta", "auto_map", "torch_dtype", "head_dim", "num_experts"]
    key = draw.choice([*tree, *NUMBERS, *more])
    found, drop = draw.choice(VALUES), draw.random() < 0.1
    bad = isinstance(found, list | dict | bool | str) or (found is not None and not 0 < found < 1e9)
    must = key in NUMBERS and key != "head_dim" and not drop and bad
    case.settings["model.from_scratch"] = draw.random() < 0.5
    what = f"config.json without {key}" if drop else f"config.json {key} = {found!r}"
    change = change_json("model/config.json", [key], found, drop=drop)
    return case.spoiled(what, change, "refuse" if must else "either")


def tokenizer(draw: random.Random, case: Case, good: Path) -> Case:
    """tokenizer.json and tokenizer_config.json."""
    case.own_model = True
    name = draw.choice(["tokenizer.json", "tokenizer_config.json"])
    if draw.random() < 0.4:
        return case.spoiled(*raw(draw, f"model/{name}"))
    tree = json.loads((good / name).read_text())
    keys = [draw.choice(list(tree))]
    inner = tree[keys[0]]
    if isinstance(inner, dict) and inner and draw.random() < 0.7:
        keys.append(draw.choice(list(inner)))
    found, drop = draw.choice(VALUES), draw.random() < 0.2
    what = f"{name} {'.'.join(keys)} " + ("dropped" if drop else f"= {found!r}")
    return case.spoiled(what, change_json(f"model/{name}", keys, found, drop=drop))


def generation_config(draw: random.Random, case: Case, good: Path) -> Case:
    """generation_config.json."""
    case.own_model = True
    name = "model/generation_config.json"
    if draw.random() < 0.5:
        return case.spoiled(*raw(draw, name))
    key = draw.choice(["eos_token_id", "eos_token_id", "temperature", "max_length", "do_sample"])
    found = draw.choice([*VALUES, [1, -1], [1, 10**9], [[1]], ["x"], [1, None], 39, 40])
    ids = found if isinstance(found, list) else [found]
    out = any(not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < 40 for one in ids)
    must = key == "eos_token_id" and found is not None and out
    what, change = f"generation_config.json {key} = {found!r}", change_json(name, [key], found)
    return case.spoiled(what, change, "refuse" if must else "either")


def weights(draw: random.Random, case: Case, good: Path) -> Case:
    """The safetensors file: bytes, header, tensors, shards and their index."""
    case.own_model = True
    way = draw.choice([header, header, tensors, tensors, shards, None])
    if way is None:
        return case.spoiled(*raw(draw, "model/model.safetensors"), "refuse")
    return case.spoiled(*way(draw))


Change = tuple[str, Callable[[Path], None], Expect]


def header(draw: random.Random) -> Change:
    """A header of the safetensors file that is not of its tensors."""
    way = draw.choice(
        ["length", "huge length", "dtype", "unknown dtype", "shape", "offsets", "negative", "text"]
    )

    def spoil(folder: Path) -> None:
        path = folder / "model/model.safetensors"
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        if way.endswith("length"):
            told = size + 7 if way == "length" else 2**62
            path.write_bytes(struct.pack("<Q", told) + data[8:])
            return
        tree = json.loads(data[8 : 8 + size])
        name = next(key for key in tree if key != "__metadata__")
        change = {
            "dtype": {"dtype": "F16"}, "unknown dtype": {"dtype": "Q7"}, "shape": {"shape": [3, 5]},
            "offsets": {"data_offsets": [0, 10**12]}, "negative": {"shape": [-1, 4]},
            "text": {"shape": "x"},
        }[way]  # fmt: skip
        tree[name] |= change
        made = json.dumps(tree).encode()
        path.write_bytes(struct.pack("<Q", len(made)) + made + data[8 + size :])

    return f"safetensors header: {way}", spoil, "refuse"


def tensors(draw: random.Random) -> Change:
    """A file whose tensors are not the model's."""
    way = draw.choice(["one missing", "renamed", "extra", "none", "transposed", "integers", "half"])

    def spoil(folder: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        path = str(folder / "model/model.safetensors")
        found = load_file(path)
        name = sorted(found)[draw_index % len(found)]
        one = found.pop(name)
        made = {
            "one missing": found, "renamed": found | {f"x.{name}": one}, "none": {},
            "extra": found | {name: one, "extra": torch.zeros(2)},
            "transposed": found | {name: one.new_zeros(*one.shape, 1)},
            "integers": found | {name: one.to(torch.int32)},
            "half": {key: tensor.half() for key, tensor in (found | {name: one}).items()},
        }  # fmt: skip
        save_file(made[way], path, metadata={"format": "pt"})

    draw_index = draw.randrange(100)
    return f"tensors: {way}", spoil, "either" if way == "half" else "refuse"


def shards(draw: random.Random) -> Change:
    """Two files and an index, right or wrong."""
    way = draw.choice(
        ["right", "missing", "both", "list", "map is a list", "elsewhere", "number", "wrong file"]
    )

    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        model = folder / "model"
        found = load_file(str(model / "model.safetensors"))
        names = sorted(found)
        files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        cut = len(names) // 2
        for file, part in zip(files, (names[:cut], names[cut:]), strict=True):
            save_file({name: found[name] for name in part}, str(model / file))
        where: Any = {name: files[number >= cut] for number, name in enumerate(names)}
        if way == "missing":
            (model / files[1]).unlink()
        wrong = {"elsewhere": "../../x.safetensors", "number": 3, "wrong file": files[1]}
        where[names[0]] = wrong.get(way, where[names[0]])
        index: Any = {"weight_map": list(where) if way == "map is a list" else where}
        content = json.dumps([] if way == "list" else index)
        (model / "model.safetensors.index.json").write_text(content)
        if way != "both":
            (model / "model.safetensors").unlink()

    return f"shards: {way}", spoil, "pass" if way == "right" else "refuse"


CELLS: list[Any] = [
    *VALUES, float("-inf"), "NaN", "1" * 400, "\0", "\n", "x" * 20000, [[]], {"a": {"b": [1]}},
    [{"role": "user", "content": "1+1="}], [{"role": 1}], -0.0, 1e300,
]  # fmt: skip


def data(draw: random.Random, case: Case, good: Path) -> Case:
    """The data file: bytes, rows, cells, another format."""
    columns = {"rl": "answer", "sft": "response", "preference": "rejected"}
    case.task = draw.choice(list(columns))
    column = draw.choice(["prompt", columns[case.task]])
    way = draw.choice(["raw", "line", "cell", "cell", "cell", "csv", "json", "parquet"])
    setting = SECTIONS.get(case.task, "prompts")
    found, row = draw.choice(CELLS), draw.randrange(len(ROWS))
    if way == "raw":
        return case.spoiled(*raw(draw, "data.jsonl"))
    if way == "line":
        line = draw.choice(LINES)
        what = f"data line {line[:30]!r}"
        return case.spoiled(what, lambda folder: _append(folder / "data.jsonl", line), "refuse")
    if way == "cell":
        what = f"data {column} of row {row} = {str(found)[:40]!r}"
        bad = found is None or isinstance(found, bool | dict) or found == []
        number = isinstance(found, float) and not math.isfinite(found)
        rows = [dict(one) for one in ROWS]
        rows[row][column] = found
        text = "".join(json.dumps(one) + "\n" for one in rows)
        expect: Expect = "refuse" if bad or number else "either"
        return case.spoiled(what, lambda folder: (folder / "data.jsonl").write_text(text), expect)
    case.settings[f"{setting}.source"] = f"{{folder}}/data.{way}"
    if way == "parquet":
        return case.spoiled("data as parquet", parquet_file(draw))
    text = draw.choice(FORMATS[way])
    return case.spoiled(f"data as {way}", lambda folder: (folder / f"data.{way}").write_text(text))


def _append(path: Path, line: str) -> None:
    path.write_text(path.read_text() + line + "\n", encoding="utf-8")


LINES = [
    "[1]", "3", "{", '{"prompt": 1e400, "answer": 1}', '{"prompt": NaN}', "\\", "null", "{}",
    '{"a": ' * 3000, "9" * 5000, f'{{"prompt": {"9" * 5000}}}', '"x"', "\ufeff{}",
]  # fmt: skip
FORMATS = {
    "csv": [
        "prompt,answer,response\n1+1=,2,2\n", "prompt,answer\n1+1=\n",
        'prompt,answer,response\n"1+1=,2,2\n', "prompt,prompt,answer,response\n1+1=,1+1=,2,2\n",
        "", "prompt,answer,response\n", "prompt,answer,response\n\0,2,2\n", ",,\n1+1=,2,2\n",
        "prompt;answer;response\n1+1=;2;2\n",
        "prompt,answer,response\n1+1=," + "9" * 200000 + ",2\n",
    ],
    "json": [
        json.dumps(ROWS), "{}", "[]", "[1]", "[{}]", '{"prompt": 1}\n{}', "[" * 5000, "NaN",
        '[{"prompt": "1+1=", "answer": NaN, "response": "2"}]', f"[{'9' * 5000}]",
        '[{"prompt": "1+1=", "answer": 1e400, "response": 1e400}]',
    ],
}  # fmt: skip


def parquet_file(draw: random.Random) -> Callable[[Path], None]:
    way = draw.choice(["right", "cut", "bytes", "binary", "dates", "nan", "none"])
    share = draw.random()

    def spoil(folder: Path) -> None:
        import datetime

        import pyarrow
        import pyarrow.parquet

        columns: dict[str, Any] = {name: [row[name] for row in ROWS] for name in ROWS[0]}
        wrong: dict[str, Any] = {"binary": b"\xff", "dates": datetime.date(2024, 1, 1)}
        wrong |= {"nan": float("nan"), "none": None}
        if way in wrong:
            others = ("answer", "response", "rejected")
            columns |= dict.fromkeys(others, [wrong[way]] * len(ROWS))
        path = folder / "data.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        if way == "cut":
            path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
        if way == "bytes":
            path.write_bytes(b"PAR1" + bytes(range(256)) + b"PAR1")

    return spoil


def environment(draw: random.Random, case: Case, good: Path) -> Case:
    """What a launcher sets."""
    good_ranks = {
        "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip
    name = draw.choice(list(good_ranks))
    found = draw.choice(
        ["", "x", "-1", "0", "1", "2", "3", "1e3", " 1", "1.5", "9" * 30, "70000", "0x1", "١"]
    )
    case.environment = (good_ranks if draw.random() < 0.8 else {}) | {name: found}
    case.task = draw.choice(["rl", "sft"])
    case.what = f"environment {case.environment}"
    digits = found.isascii() and found.isdecimal()
    if name != "MASTER_ADDR" and (not digits or len(found) > 20):
        case.expect = "refuse"
    if len(case.environment) > 1 and (
        (name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE") and found == "0")
        or (name in ("RANK", "LOCAL_RANK") and digits and int(found) > 1)
        or (name == "MASTER_PORT" and found == "70000")
    ):
        case.expect = "refuse"
    return case


PROGRAMS: list[tuple[str, Expect]] = [
    ("def score(p, r):\n    return 1.0\n", "pass"),
    ("async def score(p, r):\n    return 1.0\n", "pass"),
    ("1 / 0\n", "refuse"),
    ("import sys\nsys.exit(3)\n", "refuse"),
    ("import os\nos._exit(3)\n", "refuse"),
    ("def score(p, r:\n", "refuse"),
    ("score = 3\n", "refuse"),
    ("", "refuse"),
    ("\0", "refuse"),
    ("raise KeyboardInterrupt\n", "refuse"),
    ("def f(): f()\nf()\n", "refuse"),
    ("raise ValueError('a\\nb\\nc')\n", "refuse"),
    ("import no_such_module\n", "refuse"),
    ("print('x' * 100000)\ndef score(p, r):\n    return 1.0\n", "pass"),
    ("class score:\n    pass\n", "either"),
    ("x = 'é'.encode('ascii')\n", "refuse"),
]


def verifier(draw: random.Random, case: Case, good: Path) -> Case:
    """A user's verifier file."""
    text, expect = draw.choice(PROGRAMS)
    setting = "verifier"
    if draw.random() < 0.2:
        setting, expect = "session", "refuse"
    case.settings[f"environment.{setting}"] = "{folder}/mine.py:score"
    case.verifier, what = True, f"{setting} {text[:40]!r}"
    return case.spoiled(what, lambda folder: (folder / "mine.py").write_text(text), expect)


def run_folder(draw: random.Random, case: Case, good: Path) -> Case:
    """The run folder: files, loops, names that no system takes, folders that cannot be written."""
    case.task = draw.choice(["rl", "sft"])
    right = ["{folder}/a/b/c/d", "{folder}/é \U0001f600"]
    name = draw.choice([
        *right, "", "/proc/run", "/dev/null/run", "{folder}/loop", "{folder}/loop/run",
        "{folder}/data.jsonl", "{folder}/data.jsonl/run", "{folder}/" + "x" * 300,
        "{folder}/" + "x/" * 3000,
    ])  # fmt: skip
    return case.set("folder", name, "pass" if name in right else "refuse")


def make_loop(folder: Path) -> None:
    """A symbolic link to itself."""
    with contextlib.suppress(FileExistsError):
        os.symlink(folder / "loop", folder / "loop")
