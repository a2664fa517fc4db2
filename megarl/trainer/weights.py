"""Sources of a model's whole tensors by parameter name: a safetensors checkpoint, or a seed."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import huggingface_hub
import torch
import xxhash
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import nn
from transformers import PreTrainedModel

from megarl.checkpoints.store import (
    INDEX,
    WHOLE,
    Store,
    open_whole,
    refuse_others,
    refuse_untied,
    sampled_digest,
)
from megarl.weights.published import fused_tensors, renamed, stored_shapes

RECOMPUTED = "rotary_emb.inv_freq"
"""Suffix of a buffer that old checkpoints store and models recompute."""


class Weights(Protocol):
    """A source of a model's whole tensors by Hugging Face name."""

    def flat(self, name: str) -> torch.Tensor:
        """The whole tensor, flat on the CPU in the source's dtype, not to be changed, and valid
        until the next call.
        """
        ...

    def has(self, name: str) -> bool:
        """Whether the source stores the tensor; asked for buffers."""
        ...


class CheckpointWeights:
    """The tensors of a Hugging Face checkpoint in safetensors format, memory-mapped."""

    def __init__(self, path: str, model: PreTrainedModel) -> None:
        """`path`: a folder, or a hub name, which is downloaded. `model`: on the meta device. Raises
        `ValueError`, naming the tensor or file, unless the checkpoint has exactly its tensors.
        """
        self.folder = _folder(path)
        self.store = open_whole(self.folder)
        self._stored = _stored_names(model, self.store, self.folder)

    def flat(self, name: str) -> torch.Tensor:
        return self.store.flat(self._stored[name])

    def has(self, name: str) -> bool:
        return name in self._stored


class OtherTensors:
    """The tensors that `made(name)` returns, of any shape, or else those of `weights`."""

    def __init__(self, weights: Weights, made: Callable[[str], torch.Tensor | None]) -> None:
        self.weights, self.made = weights, made

    def flat(self, name: str) -> torch.Tensor:
        tensor = self.made(name)
        return self.weights.flat(name) if tensor is None else tensor.reshape(-1)

    def has(self, name: str) -> bool:
        return self.weights.has(name)


PATTERNS = ["model*.safetensors", INDEX]
"""Files of a hub model that hold its weights."""


def is_downloaded(name: str) -> bool:
    """Whether all safetensors files of the hub model `name` are in the local cache."""
    try:
        snapshot = huggingface_hub.snapshot_download(
            name, allow_patterns=PATTERNS, local_files_only=True
        )
        folder, files = Path(snapshot), {WHOLE}
        if (folder / INDEX).exists():
            files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        return all((folder / file).is_file() for file in files)
    except Exception:  # a damaged index, too: it is reported where the weights are opened
        return False


def _folder(path: str) -> Path:
    """The model's folder; a hub name is downloaded. Raises `ValueError` if that fails."""
    folder = Path(path)
    if not folder.is_dir():
        try:
            folder = Path(huggingface_hub.snapshot_download(path, allow_patterns=PATTERNS))
        except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
            first = str(error).strip().splitlines()[0]
            raise ValueError(
                f"model.path {path!r} has no weights that can be loaded: {first}; set"
                " model.from_scratch to true for random weights, or point model.path at a trained"
                " model"
            ) from None
    return folder


@functools.cache
def base_digest(path: str) -> str:
    """XXH3-128 digest, in hexadecimal, of the weights at `path`, a folder or hub name: of names,
    shapes, dtypes and 512 elements. A LoRA adapter is stored with its base model's.
    """
    return sampled_digest(open_whole(_folder(path)))


def shape_of(path: str, name: str) -> tuple[int, ...] | None:
    """Shape of a tensor of the checkpoint, if it has it; only headers are read."""
    return open_whole(_folder(path)).shapes.get(name)


def _stored_names(model: PreTrainedModel, store: Store, folder: Path) -> dict[str, str]:
    """{name in the model: name in the checkpoint} of parameters and persistent buffers; of tied
    parameters, one name is enough. transformers renames at loading: `embed_out` of GPT-NeoX is its
    `lm_head`, and a base model's checkpoint lacks the prefix (`model.`, `transformer.`).
    """
    shapes = stored_shapes(model)
    names = {name: name for name in shapes} | renamed(model, store.shapes, folder)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parameters = {name: value for name, value in parameters.items() if name in shapes}
    first = {id(parameter): name for name, parameter in reversed(list(parameters.items()))}
    left_out = set()
    for name, parameter in parameters.items():
        other = first[id(parameter)]
        if other == name:
            continue
        alias = names.pop(name)
        if alias not in store.shapes:
            continue
        if names[other] in store.shapes:
            refuse_untied(store, folder, alias, names[other])
            left_out.add(alias)
        else:
            names[other] = alias
    ignored = [re.escape(RECOMPUTED), *(model._keys_to_ignore_on_load_unexpected or ())]
    left_out |= {
        name
        for name in store.shapes
        if name not in names.values() and any(re.search(pattern, name) for pattern in ignored)
    }
    expected = {stored: shapes[name] for name, stored in names.items()}
    refuse_others(store, folder, expected, sorted(left_out))
    return names


class RandomWeights:
    """A model's own random initialisation, in float32, drawn one module at a time.

    Each module has its own generator, seeded by `seed` and its name, so a tensor does not depend on
    which others are drawn.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        """`model`: the whole model on the meta device, where it stays."""
        self.model, self.seed = model, seed
        self._drawn: tuple[str, dict[str, torch.Tensor]] = "", {}
        """Name and tensors of the most recently drawn module."""
        self._parts = dict[str, tuple[str, int, int]]()
        """{an expert's tensor: (fused tensor of all experts, its first element, its elements)}"""
        for fused, parts in fused_tensors(model).items():
            sizes = [math.prod(shape) for _, shape in parts]
            for (name, _), end, size in zip(parts, accumulate(sizes), sizes, strict=True):
                self._parts[name] = fused, end - size, size

    def flat(self, name: str) -> torch.Tensor:
        if name in self._parts:
            whole, first, size = self._parts[name]
            return self.flat(whole)[first : first + size]
        owner, _, parameter = name.rpartition(".")
        if parameter not in self._drawn[1] or self._drawn[0] != owner:
            self._drawn = "", {}  # freed before the next module is drawn
            self._drawn = owner, self._draw(owner)
        return self._drawn[1][parameter].view(-1)

    def has(self, name: str) -> bool:
        return False

    @torch.no_grad()
    def _draw(self, owner: str) -> dict[str, torch.Tensor]:
        module = self.model.get_submodule(owner)
        empty = dict(module.named_parameters(recurse=False))
        for name, parameter in empty.items():
            blank = torch.full(parameter.shape, torch.nan, dtype=torch.float32)
            setattr(module, name, nn.Parameter(blank, requires_grad=False))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(xxhash.xxh3_64_intdigest(f"{self.seed} {owner}".encode()) >> 1)
            initialise_module(self.model, owner)
        drawn = {}
        for name, parameter in empty.items():
            drawn[name] = getattr(module, name).detach()
            setattr(module, name, parameter)
            if drawn[name].sum().isnan():
                raise ValueError(
                    f"model type {self.model.config.model_type} does not say how {owner}.{name} is"
                    " initialised; set model.from_scratch to false, or choose another model"
                )
        return drawn


def initialise_module(model: PreTrainedModel, owner: str) -> None:
    """Run the model's `_init_weights` on the module `owner`, in place, by torch's global
    generator.
    """
    path, belongs_to = "", model
    for step in owner.split("."):
        path = f"{path}.{step}" if path else step
        module = model.get_submodule(path)
        if isinstance(module, PreTrainedModel):
            belongs_to = module
    belongs_to._init_weights(model.get_submodule(owner))


@torch.no_grad()
def init_buffers(model: PreTrainedModel, weights: Weights, device: torch.device) -> None:
    """Set the buffers of `model`, in place, on `device`: from `weights` if stored there, else by
    its own initialisation, which sets parameters too: they must be on the meta device. Raises
    `ValueError` for a buffer that neither source provides.
    """
    for owner, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        values = []
        for fill in (0, 1):  # what the model computes does not depend on what was there
            for name, buffer in buffers.items():
                setattr(module, name, torch.full(buffer.shape, fill, dtype=buffer.dtype))
            initialise_module(model, owner)
            values.append({name: getattr(module, name) for name in buffers})
        for name in buffers:
            value, full = getattr(module, name), f"{owner}.{name}" if owner else name
            if weights.has(full):
                value.view(-1).copy_(weights.flat(full))
            elif not torch.equal(value, values[0][name]):
                raise ValueError(
                    f"model type {model.config.model_type} has a buffer {full} that is neither in"
                    " the checkpoint nor computed by the model; choose another model"
                )
            setattr(module, name, value.to(device))
