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
from safetensors import SafetensorError, safe_open

from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import Owned
from megarl.parallel.reshard.owned import whole_owned
from megarl.parallel.reshard.plan import Copy, make_plan

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Of weights, by safetensors' names."""

FORMAT = 1
LAYOUT = "layout.json"


class Store:
    """The tensors of some safetensors files, mapped."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises `ValueError` for a file that is not whole, and for a name that two files have."""
        self.paths: dict[str, Path] = {}
        """Tensor -> its file."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._files: dict[Path, Any] = {}
        for path in paths:
            try:
                file = self._files[path] = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"{path} cannot be read ({error}): it is truncated or not safetensors; fetch it"
                    " again"
                ) from None
            for name in file.keys():  # noqa: SIM118  (it is no dict)
                if name in self.paths:
                    raise ValueError(
                        f"{name} is in {self.paths[name]} and in {path}; remove the file that does"
                        " not belong to the checkpoint"
                    )
                part = file.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise ValueError(
                        f"{name} in {path} is of dtype {part.get_dtype()}; weights are of"
                        f" {', '.join(DTYPES)}"
                    )
                self.paths[name], self.shapes[name] = path, tuple(part.get_shape())
                self.dtypes[name] = DTYPES[part.get_dtype()]

    def flat(self, name: str) -> torch.Tensor:
        """A tensor in its file, flat; memory is used for what is read of it only."""
        return self._files[self.paths[name]].get_tensor(name).reshape(-1)

    def bytes_of(self, name: str) -> torch.Tensor:
        """The same, as bytes: two tensors are equal bit by bit, or not."""
        return self.flat(name).view(torch.uint8)


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
    with open(output.path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for buffer in buffers:
            file.write(buffer.view(torch.uint8).numpy().data)
        assert file.tell() == 8 + len(text) + filled
    return 8 + len(text) + filled


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

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_whole(folder: Path) -> Store:
    """A Hugging Face checkpoint's weights: one file, or those of its index. Raises `ValueError`
    where they are not there.
    """
    whole, index = folder / WHOLE, folder / INDEX
    if whole.exists() and index.exists():
        raise ValueError(
            f"{folder} has both {WHOLE} and {INDEX}; remove the one that does not belong to the"
            " checkpoint"
        )
    if whole.exists():
        return Store([whole])
    if not index.exists():
        raise ValueError(
            f"{folder} has neither {WHOLE} nor {INDEX}; name the folder of a model saved as"
            " safetensors"
        )
    try:
        where = json.loads(index.read_text())["weight_map"]
        names = sorted(set(where.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} cannot be read ({error!r}); fetch it again") from None
    missing = [
        name for name in names if os.path.basename(name) != name or not (folder / name).is_file()
    ]
    if missing:
        raise ValueError(f"{index} names {missing[0]}, which is not in the folder; fetch it again")
    store = Store([folder / name for name in names])
    for name, file in where.items():
        if name not in store.paths or store.paths[name].name != file:
            raise ValueError(
                f"{index} says that {name} is in {file}, but it is not; fetch both again"
            )
    return store


def refuse_others(
    store: Store, folder: Path, wanted: Mapping[str, tuple[int, ...]], left_out: Sequence[str]
) -> None:
    """Raise `ValueError` where a checkpoint's tensors, but for those `left_out`, are not those of
    its config; it names one.
    """
    fix = "the weights and the config are not of one model: fetch both again"
    for name, shape in wanted.items():
        if name not in store.shapes:
            raise ValueError(
                f"{folder} has no tensor {name} {shape}, which its config.json asks for; {fix}"
            )
        if store.shapes[name] != shape:
            raise ValueError(
                f"{name} in {store.paths[name]} is {store.shapes[name]}, its config.json says"
                f" {shape}; {fix}"
            )
    for name, path in store.paths.items():
        if name not in wanted and name not in left_out:
            raise ValueError(f"{name} in {path} is not in a model of its config.json; {fix}")


def refuse_untied(store: Store, folder: Path, head: str, embedding: str) -> None:
    """Raise `ValueError` where a head that the config ties to the embedding is not the same, bit by
    bit.
    """
    if store.dtypes[head] != store.dtypes.get(embedding) or not torch.equal(
        store.bytes_of(head), store.bytes_of(embedding)
    ):
        raise ValueError(
            f"{folder} has a {head} that differs from {embedding}, but its config.json ties them; "
            "set tie_word_embeddings to false there if the model is not tied, or remove the head"
        )


def write_whole(
    sources: Sequence[Owned],
    stores: Sequence[Store],
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    limit_bytes: int,
) -> int:
    """A Hugging Face checkpoint, in files of at most `limit_bytes` (or one tensor), with an index
    where they are several.
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
    if many:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    return write_outputs(sources, stores, outputs, dtypes)


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
