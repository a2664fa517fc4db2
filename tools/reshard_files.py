"""The files of `tools/reshard.py`: safetensors files as the two ends of a plan, read where they lie
and written a buffer at a time.

A sharded checkpoint is a folder, what a training layout's ranks hold:

    layout.json               format, layout, ZeRO stage, the model's config, a fingerprint of names
                              and shapes, each rank's file
    rank_00000.safetensors    a rank's flat buffers, one a tensor; ranks that hold the same share
                              the first one's file
    config.json, tokenizer    copied along; and digests of all, by who writes the folder

Owned in memory: one buffer of the file that is being written. What is read is mapped, so it counts
as the system's cache.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoints.export import Output, safetensors_header
from megarl.checkpoints.store import INDEX, Store
from megarl.errors import disk_advice
from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import Owned
from megarl.parallel.reshard.plan import Copy, make_plan

FORMAT = 1
LAYOUT = "layout.json"


def write_outputs(
    sources: Sequence[Owned],
    stores: Sequence[Store],
    outputs: Sequence[Output],
    dtypes: Mapping[str, torch.dtype],
) -> int:
    """Write the files `outputs` from the tensor parts that `sources` hold; returns bytes written.
    `stores[n]` reads the buffers of `sources[n]`.

    The caller syncs the folder to disk. Raises `OSError` if a file cannot be written, and before
    any writing if the disk has too little space.
    """
    needed = sum(
        size * dtypes[name].itemsize
        for output in outputs
        for name, size in output.owned.sizes.items()
    )
    if shutil.disk_usage(outputs[0].path.parent).free < needed:
        raise OSError(f"{os.strerror(errno.ENOSPC)}: {needed / 1e9:,.3f} GB are needed")
    plan = make_plan(sources, [output.owned for output in outputs])
    copies: dict[tuple[int, str], list[Copy]] = defaultdict(list)
    for copy in plan.copies:
        copies[copy.destination, copy.put.buffer].append(copy)
    total = 0
    for number, output in enumerate(outputs):

        def buffers(number: int = number, output: Output = output) -> Iterator[torch.Tensor]:
            for name in output.order(dtypes):
                buffer = torch.empty(output.owned.sizes[name], dtype=dtypes[name])
                for copy in copies[number, name]:
                    taken = stores[copy.source].flat(copy.taken.buffer)
                    assert taken.dtype == buffer.dtype
                    copy.put.view(buffer).copy_(copy.taken.view(taken))
                yield buffer

        total += write_safetensors(output, dtypes, buffers())
    return total


def write_safetensors(
    output: Output, dtypes: Mapping[str, torch.dtype], buffers: Iterator[torch.Tensor]
) -> int:
    """Write one safetensors file from `buffers`, given in `output.order`; returns bytes written.

    Format: https://huggingface.co/docs/safetensors: length of the header, header, data without
    gaps.
    """
    header = safetensors_header(output, dtypes)
    size = sum(output.owned.sizes[name] * dtypes[name].itemsize for name in output.owned.sizes)
    with open(output.path, "wb") as file:
        file.write(header)
        for buffer in buffers:
            file.write(buffer.view(torch.uint8).numpy().data)
        assert file.tell() == len(header) + size
    return len(header) + size


@dataclass(frozen=True)
class Description:
    """Content of `layout.json` in a sharded checkpoint. Together with the model's parameter table
    it determines which part of which tensor each file holds.
    """

    format: int
    layout: dict[str, int]
    zero_stage: int
    config: dict[str, Any]
    """The model's config.json."""
    fingerprint: str
    """Digest of the names and whole shapes of the parameters."""
    files: list[str]
    """For each rank, the name of its file."""

    @property
    def degrees(self) -> Layout:
        return Layout(**self.layout)

    def write(self, folder: Path) -> None:
        (folder / LAYOUT).write_text(json.dumps(asdict(self), indent=1))


def read_description(folder: Path) -> Description:
    """Read `layout.json` of a sharded checkpoint. Raises `ValueError` if it is missing, invalid or
    of another format version.
    """
    try:
        found = json.loads((folder / LAYOUT).read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {LAYOUT}, so it is no sharded checkpoint; name one"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder / LAYOUT} cannot be read ({error}); fetch the checkpoint again"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(
            f"{folder / LAYOUT} is not of format {FORMAT}, the only one known here; write the"
            " checkpoint again"
        )
    try:
        made = Description(**found)
        assert made.degrees.size == len(made.files)
    except (TypeError, ValueError, AssertionError):
        raise ValueError(
            f"{folder / LAYOUT} does not describe ranks and their files; write the checkpoint again"
        ) from None
    return made


def rank_files(owned: Sequence[Owned]) -> tuple[list[Owned], list[str], list[str]]:
    """(what each file holds, name of each file, name of the file of each rank). `owned`: the tensor
    parts of each rank. Ranks that hold the same parts share the first one's file.
    """
    keys = [(tuple(one.sizes.items()), tuple(one.pieces)) for one in owned]
    first = dict[Any, int]()
    for rank, key in enumerate(keys):
        first.setdefault(key, rank)
    names = {key: f"rank_{rank:05d}.safetensors" for key, rank in first.items()}
    return [owned[rank] for rank in first.values()], [*names.values()], [names[key] for key in keys]


def open_ranks(
    folder: Path, owned: Sequence[Owned], files: Sequence[str]
) -> tuple[list[Owned], list[Store]]:
    """Open the files of a sharded checkpoint for reading. `owned` are the regions of tensors that
    each rank owns, `files` the names of the ranks' files in `folder`. Returns what each file holds
    and its `Store`, in one order. Raises `ValueError` if a file does not hold the regions of its
    rank.
    """
    kept, names, expected = rank_files(owned)
    if list(files) != expected:
        raise ValueError(
            f"{folder / LAYOUT} names other files than its layout has; write the checkpoint again"
        )
    stores = []
    for one, name in zip(kept, names, strict=True):
        store = Store([folder / name])
        wanted = {buffer: (size,) for buffer, size in one.sizes.items()}
        if store.shapes != wanted:
            wrong = [b for b in wanted | store.shapes if wanted.get(b) != store.shapes.get(b)]
            raise ValueError(
                f"{folder / name} does not hold the {wrong[0]} that {LAYOUT} says; fetch the"
                " checkpoint again"
            )
        stores.append(store)
    return kept, stores


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
"""Suffixes of weight files."""


def copy_along(source: Path, target: Path, leave: Sequence[str]) -> list[str]:
    """Copy the files of a checkpoint that hold no weights, such as config, tokenizer and chat
    templates; returns their names. `leave`: names of files not to copy.
    """
    copied = []
    for path in sorted([*source.iterdir(), *(source / "additional_chat_templates").glob("*")]):
        name = path.relative_to(source)
        ours = path.name in (LAYOUT, INDEX, *leave) or path.name.startswith(".")
        if path.is_file() and path.suffix not in WEIGHTS and not ours:
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target / name)
            copied.append(str(name))
    return copied


@contextlib.contextmanager
def written_aside(out: Path, finish: Callable[[Path], None]) -> Iterator[Path]:
    """A context manager that yields a temporary folder next to `out` to write into; missing folders
    above `out` are made. On success `finish` syncs the folder to disk and it is renamed to `out`;
    on an error it is removed.

    Raises `ValueError` with advice if the folder cannot be written, for example on a full disk.
    """
    if os.path.lexists(out):
        raise ValueError(f"{out} is there already; name a folder that is not")
    aside = out.parent / f".writing_{out.name}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
    except OSError as error:
        if isinstance(error, FileExistsError) and out.parent.is_dir():
            raise ValueError(
                f"{aside} is there: another process writes {out}, or one was killed; if so, remove"
                " it"
            ) from None
        raise ValueError(
            f"{out} cannot be written ({error}); name a folder within one that is yours"
        ) from None
    try:
        yield aside
        finish(aside)
        os.rename(aside, out)
    except OSError as error:
        free = shutil.disk_usage(aside).free / 1e9
        raise ValueError(
            f"{out} could not be written ({free:,.3f} GB free): {error};"
            f" {disk_advice(error)}, or name a folder on another disk"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
