"""Weights from one layout to another: how much moves (before there are any), and the moving, bit by
bit.

    python tools/reshard.py plan CONFIG.json --source "data 8 tensor 8 zero 3" --engines 8
    python tools/reshard.py plan CONFIG.json --source "data 8 zero 3" --target "data 2 tensor 4"
    python tools/reshard.py split HF_FOLDER OUT --layout "data 2 tensor 2 zero 3"
    python tools/reshard.py convert SHARDED OUT --layout "tensor 4"
    python tools/reshard.py join SHARDED OUT

plan     dry run from a config.json: no weights, no network. What every rank holds on either side,
         the copies between them, each element counted, and the time a link of --link-gb-s would
         take where every rank sends and receives at once. `naive` is what a plan is for: all
         weights gathered on one source rank, and sent whole to every destination rank. A layout is
         of training (data, sequence, tensor, zero; what is not named is 1, zero 0); engines are
         vLLM's.
split    a Hugging Face folder (safetensors, one file or several) to what the ranks of a layout
         hold: a sharded checkpoint
convert  one of these to one of another layout
join     one of these to a Hugging Face folder that `from_pretrained` loads

A run's checkpoint is resumed under any layout as it is, and its `model/` is a Hugging Face folder.

Tensors are read where they lie; in memory is one buffer at a time, which is a tensor or a rank's
part of it. Dtypes stay.
A sharded checkpoint is checked against its digests before it is read. What is written is whole or
absent: written aside, digested, synced, renamed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reshard_files
import torch
from reshard_plan import (
    HEAD,
    RECOMPUTED,
    Degrees,
    Model,
    as_model,
    gb,
    load_model,
    parse_degrees,
    plan_of,
    show_plan,
)

from megarl.checkpoints import store
from megarl.checkpoints.export import Output, split_outputs
from megarl.checkpoints.manifest import DIGESTS, damage, seal
from megarl.checkpoints.progress import shapes_fingerprint
from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import Owned
from megarl.parallel.reshard.owned import whole_owned

# ----------------------------------------------------------------------------------- moving weights


@dataclass(frozen=True)
class Source:
    """Weights that are there: their model, who holds what, and the files it lies in."""

    model: Model
    folder: Path
    owned: list[Owned]
    stores: list[store.Store]
    left_out: list[str]
    """Tensors of the files that are no weights of their own."""

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: self.stores[0].dtypes[name] for name in self.model.shapes}


def open_hugging_face(folder: Path) -> Source:
    """A Hugging Face folder, its weights checked against what its config says."""
    model, found = load_model(folder), store.open_whole(folder)
    wanted = model.shapes
    left_out = [name for name in found.shapes if name.endswith(RECOMPUTED)]
    if HEAD in found.shapes and HEAD not in wanted:
        store.refuse_untied(found, folder, HEAD, embedding=next(iter(wanted)))
        left_out.append(HEAD)
    store.refuse_others(found, folder, wanted, left_out)
    return Source(model, folder, whole_owned(wanted), [found], left_out)


def open_sharded(folder: Path) -> Source:
    """A sharded checkpoint, all of it read once to check its digests."""
    described = reshard_files.read_description(folder)
    if wrong := damage(folder):
        raise ValueError(f"{folder}: {wrong}; fetch or write the checkpoint again")
    model = as_model(described.config, folder / reshard_files.LAYOUT)
    if shapes_fingerprint(model.shapes) != described.fingerprint:
        raise ValueError(
            f"{folder}: the names and shapes it was written for are not those that its config"
            " gives; write it again"
        )
    degrees = Degrees(described.degrees, described.zero_stage)
    owned, stores = reshard_files.open_ranks(folder, model.owned(degrees), described.files)
    return Source(model, folder, owned, stores, [])


def write_sharded(source: Source, degrees: Degrees, folder: Path) -> int:
    """Into an empty folder; returns bytes."""
    owned, names, rank_names = reshard_files.rank_files(source.model.owned(degrees))
    outputs = [Output(folder / name, one, {}) for one, name in zip(owned, names, strict=True)]
    shape = {name: getattr(degrees.layout, name) for name in Layout.AXES}
    about = (source.model.config, shapes_fingerprint(source.model.shapes))
    settings = reshard_files.FORMAT, shape, degrees.zero_stage, *about, rank_names
    reshard_files.Description(*settings).write(folder)
    return reshard_files.write_outputs(source.owned, source.stores, outputs, source.dtypes)


def write_whole(source: Source, folder: Path, limit_bytes: float) -> int:
    """A Hugging Face folder, of files of at most `limit_bytes` if no tensor is larger; returns
    bytes.
    """
    outputs, index = split_outputs(folder, source.model.shapes, source.dtypes, int(limit_bytes))
    if index is not None:
        (folder / store.INDEX).write_text(json.dumps(index, indent=2))
    return reshard_files.write_outputs(source.owned, source.stores, outputs, source.dtypes)


def move(source: Source, out: Path, fill: Callable[[Path], int]) -> dict[str, Any]:
    """Make a folder, `fill` it, and copy along what is no weights; returns what was done."""
    with reshard_files.written_aside(out, finish=seal) as aside:
        written = fill(aside)
        copied = reshard_files.copy_along(source.folder, aside, leave=(DIGESTS,))
    return {
        "out": str(out),
        "parameters": source.model.parameters,
        "tensors": len(source.model.shapes),
        "dtypes": sorted({str(dtype).removeprefix("torch.") for dtype in source.dtypes.values()}),
        "files": sorted(path.name for path in out.glob("*.safetensors")),
        "bytes": written,
        "copied": copied,
        "left_out": source.left_out,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One command, without what goes wrong."""
    if args.command == "plan":
        return plan_of(args)
    if os.path.lexists(args.out):  # what can be refused is, before all of the source is read
        raise ValueError(f"{args.out} is there already; name a folder that is not")
    if args.command == "join":
        source = open_sharded(args.folder)
        return move(source, args.out, lambda into: write_whole(source, into, args.file_gb * 1e9))
    load_model(args.folder).owned(args.layout)
    source = (open_hugging_face if args.command == "split" else open_sharded)(args.folder)
    return move(source, args.out, lambda folder: write_sharded(source, args.layout, folder))


def show_moved(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, text) lines that describe the files a command has written."""
    for name, value in found.items():
        if isinstance(value, list):
            value = ", ".join(value) or "none"
        elif not isinstance(value, str):
            value = {"bytes": gb, "seconds": "{:,.1f}".format}.get(name, "{:,}".format)(value)
        yield name.replace("_", " "), value


FOLDERS = {
    "split": ("a Hugging Face folder", "Hugging Face folder to sharded checkpoint"),
    "convert": ("a sharded checkpoint", "sharded checkpoint to one of another layout"),
    "join": ("a sharded checkpoint", "sharded checkpoint to Hugging Face folder"),
}
"""{command: (what it reads, what it does)}"""


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="dry run from a config.json")
    add = plan.add_argument
    add("model", type=Path, help="a config.json, or its folder")
    layout = {"type": parse_degrees, "help": 'training layout, as "data 8 tensor 8 zero 3"'}
    add("--source", required=True, **layout)
    target = plan.add_mutually_exclusive_group(required=True)
    target.add_argument("--target", **layout)
    target.add_argument("--engines", type=int, help="number of engines")
    add("--engine-tensor", type=int, default=1, help="tensor ranks of each engine")
    add("--colocated", action="store_true", help="source rank n and target rank n share a memory")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--link-gb-s", type=float, default=45.0, help="GB (1e9 bytes) a second of a rank, each way")
    add("--bucket-mib", type=float, default=8.0, help="size of what is sent together")
    for name, (folder, what) in FOLDERS.items():
        one = commands.add_parser(name, help=what)
        one.add_argument("folder", type=Path, help=folder)
        one.add_argument("out", type=Path, help="folder to be made")
        if name == "join":
            largest = "largest file, in GB, if no tensor is larger"
            one.add_argument("--file-gb", type=float, default=5.0, help=largest)
        else:
            one.add_argument("--layout", required=True, **layout)
    for one in commands.choices.values():
        one.add_argument("--json", action="store_true", help="print one JSON object")
    close = difflib.get_close_matches(argv[0] if argv else "", commands.choices, n=1)
    if close and close[0] != argv[0]:
        parser.error(f"there is no command {argv[0]!r}; did you mean {close[0]!r}?")
    args = parser.parse_args(argv)
    for name in ("engines", "engine_tensor", "link_gb_s", "bucket_mib", "file_gb"):
        value = getattr(args, name, None)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; set it to more than 0")
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args, started_at = arguments(sys.argv[1:] if argv is None else argv), time.perf_counter()
    try:
        found = run(args)
    except ValueError as error:
        print(f"reshard: {error}", file=sys.stderr)
        return 1
    found["seconds"] = time.perf_counter() - started_at
    show = show_plan if args.command == "plan" else show_moved
    lines = (f"{name:10} {text}" for name, text in show(found))
    print(json.dumps(found) if args.json else "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
