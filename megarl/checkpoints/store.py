"""Reading safetensors checkpoints: tensors mapped from disk, which take only page cache."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""{name in safetensors headers: supported dtype}"""


class Store:
    """Memory-mapped tensors of several safetensors files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises `ValueError` for a truncated file, a dtype that no weights have, and a tensor name
        that occurs in two files.
        """
        self.paths: dict[str, Path] = {}
        """{tensor: its file}"""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.metadata: dict[str, str] = {}
        self._files: dict[Path, Any] = {}
        for path in paths:
            try:
                file = self._files[path] = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"{path} cannot be read ({error}): it is truncated or not safetensors; fetch it"
                    " again"
                ) from None
            self.metadata |= file.metadata() or {}
            for name in file.keys():  # noqa: SIM118  (it is no dict)
                if name in self.paths:
                    raise ValueError(
                        f"{name} is in {self.paths[name]} and in {path}; remove the file that does"
                        " not belong to the checkpoint"
                    )
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in DTYPES:
                    raise ValueError(
                        f"{name} in {path} is of dtype {tensor.get_dtype()}; weights are of"
                        f" {', '.join(DTYPES)}"
                    )
                self.paths[name], self.shapes[name] = path, tuple(tensor.get_shape())
                self.dtypes[name] = DTYPES[tensor.get_dtype()]

    def flat(self, name: str) -> torch.Tensor:
        """Flat, memory-mapped CPU tensor in its stored dtype."""
        return self._files[self.paths[name]].get_tensor(name).reshape(-1)

    def bytes_of(self, name: str) -> torch.Tensor:
        """Flat uint8 tensor, for comparison bit by bit."""
        return self.flat(name).view(torch.uint8)


SAMPLED = 512
"""Elements of each tensor that `sampled_digest` reads."""


def sampled_digest(store: Store) -> str:
    """Digest of the names, shapes and dtypes of all tensors, and of elements from the middle of
    each. Models that differ only elsewhere get the same.
    """
    hasher = xxhash.xxh3_128()
    for name in sorted(store.shapes):
        hasher.update(f"{name} {store.shapes[name]} {store.dtypes[name]}".encode())
        flat = store.flat(name)
        start = max(0, len(flat) - SAMPLED) // 2
        hasher.update(flat[start : start + SAMPLED].view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_whole(folder: Path) -> Store:
    """The weights of a Hugging Face checkpoint. Raises `ValueError` if files are missing or do not
    match the index.
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
            f"{folder} has no weights that can be loaded, neither {WHOLE} nor {INDEX}; name the"
            " folder of a model saved as safetensors, or set model.from_scratch to true"
        )
    try:
        where = json.loads(index.read_text())["weight_map"]
        names = sorted(set(where.values()))
        missing = [
            name
            for name in names
            if os.path.basename(name) != name or not (folder / name).is_file()
        ]
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} cannot be read ({error!r}); fetch it again") from None
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
    store: Store, folder: Path, needed: Mapping[str, tuple[int, ...]], left_out: Sequence[str]
) -> None:
    """Raise `ValueError`, naming the first tensor, unless the checkpoint has exactly the tensors
    {name: shape} of `needed`, and maybe those of `left_out`.
    """
    fix = "the weights and the config are not of one model: fetch both again"
    missing = [name for name in needed if name not in store.shapes]
    extra = [name for name in store.shapes if name not in needed and name not in left_out]
    if missing:
        unknown = f", but has {extra[0]}{_others(extra)}, which it does not" if extra else ""
        raise ValueError(
            f"{folder} has no tensor {missing[0]} {needed[missing[0]]}{_others(missing)}, which its"
            f" config.json asks for{unknown}; {fix}"
        )
    misshapen = [name for name, shape in needed.items() if store.shapes[name] != shape]
    if misshapen:
        name = misshapen[0]
        raise ValueError(
            f"{name} in {store.paths[name]} is {store.shapes[name]}{_others(misshapen)}, its"
            f" config.json says {needed[name]}; {fix}"
        )
    if extra:
        raise ValueError(
            f"{extra[0]} in {store.paths[extra[0]]}{_others(extra)} is not in a model of its"
            f" config.json; {fix}"
        )


def _others(names: Sequence[str]) -> str:
    """How many names follow the first, for an error message."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def refuse_untied(store: Store, folder: Path, head: str, embedding: str) -> None:
    """Raise `ValueError` if the stored output head differs from the embedding, although config.json
    ties the two.
    """
    if store.dtypes[head] != store.dtypes.get(embedding) or not torch.equal(
        store.bytes_of(head), store.bytes_of(embedding)
    ):
        raise ValueError(
            f"{folder} has a {head} that differs from {embedding}, but its config.json ties them; "
            "set tie_word_embeddings to false there if the model is not tied, or remove the head"
        )
