"""Weights on disk: safetensors files as the two ends of a plan, read where they lie and written a
buffer at a time.

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
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoints.store import DTYPES, INDEX, WHOLE, Store
from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import Owned
from megarl.parallel.reshard.owned import whole_owned
from megarl.parallel.reshard.plan import Copy, make_plan

FORMAT = 1
LAYOUT = "layout.json"


@dataclass(frozen=True)
class Output:
    """A file to be written: what it holds, and the shapes that its buffers have in it; flat where
    none is given.
    """

    path: Path
    owned: Owned
    shapes: Mapping[str, tuple[int, ...]]

    def shape(self, buffer: str) -> tuple[int, ...]:
        return self.shapes.get(buffer, (self.owned.sizes[buffer],))

    def order(self, dtypes: Mapping[str, torch.dtype]) -> list[str]:
        """The buffers as they lie in the file: wider elements first, so that each starts at a
        multiple of its own width.
        """
        return sorted(self.owned.sizes, key=lambda name: -dtypes[name].itemsize)


def write_outputs(
    sources: Sequence[Owned],
    stores: Sequence[Store],
    outputs: Sequence[Output],
    dtypes: Mapping[str, torch.dtype],
) -> int:
    """Bring what the sources hold (`stores[n]` has the buffers of `sources[n]`) into files; returns
    bytes written.

    Nothing is synced: the caller brings the whole folder to the disk. Raises `OSError` where a file
    cannot be written, and before any is where the disk has no room for all.
    """
    needed = sum(
        size * dtypes[name].itemsize
        for output in outputs
        for name, size in output.owned.sizes.items()
    )
    if shutil.disk_usage(outputs[0].path.parent).free < needed:
        raise OSError(f"{needed / 1e9:,.3f} GB are needed")
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
    """A safetensors file from its buffers, which come one by one in its order; returns its bytes.

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


def safetensors_header(output: Output, dtypes: Mapping[str, torch.dtype]) -> bytes:
    """What comes before the data in a safetensors file: the header's length, and the header."""
    names_of = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    filled = 0
    for name in output.order(dtypes):
        end = filled + output.owned.sizes[name] * dtypes[name].itemsize
        header[name] = {
            "dtype": names_of[dtypes[name]],
            "shape": output.shape(name),
            "data_offsets": (filled, end),
        }
        filled = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# -------------------------------------------------------------------------------------- layout.json


@dataclass(frozen=True)
class Description:
    """`layout.json`: from it and the model's parameter table follows what each file holds."""

    format: int
    layout: dict[str, int]
    zero_stage: int
    config: dict[str, Any]
    """The model's config.json."""
    fingerprint: str
    """Of names and whole shapes."""
    files: list[str]
    """Each rank's."""

    @property
    def degrees(self) -> Layout:
        return Layout(**self.layout)

    def write(self, folder: Path) -> None:
        (folder / LAYOUT).write_text(json.dumps(asdict(self), indent=1))


def read_description(folder: Path) -> Description:
    """`layout.json` of a sharded checkpoint; raises `ValueError` where it is none that can be read
    here.
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


def distinct(owned: Sequence[Owned]) -> tuple[list[Owned], list[int]]:
    """What ranks hold, each once, and which of them every rank holds: replicas need one file."""
    found: dict[tuple[Any, ...], int] = {}
    kept: list[Owned] = []
    index = []
    for one in owned:
        key = (tuple(one.sizes.items()), tuple(one.pieces))
        if key not in found:
            found[key] = len(kept)
            kept.append(one)
        index.append(found[key])
    return kept, index


def rank_files(owned: Sequence[Owned]) -> tuple[list[Owned], list[str], list[str]]:
    """(what each file holds, its name, each rank's file), for what ranks hold."""
    kept, index = distinct(owned)
    names = [f"rank_{index.index(number):05d}.safetensors" for number in range(len(kept))]
    return kept, names, [names[number] for number in index]


def open_ranks(
    folder: Path, owned: Sequence[Owned], files: Sequence[str]
) -> tuple[list[Owned], list[Store]]:
    """The files of a sharded checkpoint as sources; raises `ValueError` where one does not hold
    what its rank should.
    """
    kept, names, expected = rank_files(owned)
    if list(files) != expected:
        raise ValueError(
            f"{folder / LAYOUT} names other files than its layout has; write the checkpoint again"
        )
    stores = []
    for one, name in zip(kept, names, strict=True):
        store = Store([folder / name])
        if store.shapes != {buffer: (size,) for buffer, size in one.sizes.items()}:
            wrong = sorted(set(store.shapes) ^ set(one.sizes)) or [
                buffer for buffer, size in one.sizes.items() if store.shapes[buffer] != (size,)
            ]
            raise ValueError(
                f"{folder / name} does not hold the {wrong[0]} that {LAYOUT} says; fetch the"
                " checkpoint again"
            )
        stores.append(store)
    return kept, stores


# ------------------------------------------------------------------------- Hugging Face checkpoints


def write_whole(
    sources: Sequence[Owned],
    stores: Sequence[Store],
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    limit_bytes: int,
) -> int:
    """A Hugging Face checkpoint, in files of at most `limit_bytes` (or one tensor), with an index
    where they are several; returns bytes written.
    """
    outputs, index = split_outputs(folder, shapes, dtypes, limit_bytes)
    if index is not None:
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    return write_outputs(sources, stores, outputs, dtypes)


def split_outputs(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    limit_bytes: int,
) -> tuple[list[Output], dict[str, Any] | None]:
    """The files of a Hugging Face checkpoint in `folder`, each of at most `limit_bytes` (or one
    tensor), and the content of their index, or None where one file is enough.
    """
    sizes = {
        name: torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in shapes.items()
    }
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        if groups[-1] and filled + sizes[name] > limit_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += sizes[name]
    many = len(groups) > 1
    outputs, where = [], {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if many else WHOLE
        outputs.append(Output(folder / file, whole_owned(group)[0], group))
        where |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    return outputs, index if many else None


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
"""Endings of files that hold weights."""


def copy_along(source: Path, target: Path, leave: Sequence[str]) -> list[str]:
    """Copy a checkpoint's files that are about no weights: config, tokenizer, chat templates;
    returns their names.
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
    """A folder beside `out`, to be filled; then `finish` brings it to the disk, and it gets the
    name `out`. Else it goes.

    Raises `ValueError` where that cannot be, a full disk among the reasons, with the fix.
    """
    if os.path.lexists(out):
        raise ValueError(f"{out} is there already; name a folder that is not")
    aside = out.parent / f".writing_{out.name}"
    try:
        aside.mkdir()
    except FileExistsError:
        raise ValueError(
            f"{aside} is there: another process writes {out}, or one was killed; if so, remove it"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{out} cannot be written ({error}); name a folder within one that exists and is yours"
        ) from None
    try:
        yield aside
        finish(aside)
        os.rename(aside, out)
    except OSError as error:
        free = shutil.disk_usage(aside).free / 1e9
        raise ValueError(
            f"{out} could not be written ({free:,.3f} GB free): {error}; free some space or name a"
            " folder on another disk"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
