"""Loading a Hugging Face model, sharded: each rank reads only the weights that it will own.

    empty_model(config)                 names and shapes on the meta device, no weights
    RoleModel(model, mesh, training)  the same, tensor-sharded
    load_weights(model, ...)            parameters and buffers with values, in place of empty ones

`load_weights` reads regions of mapped safetensors files. Under a tensor shard a rank reads that
shard, under ZeRO 3 its slice of the shard; no rank holds more than its own part in memory. With
`model.from_scratch` the values are drawn instead, one module at a time, and depend on the seed and
the module's name alone, so that every layout draws the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from megarl.parallel.reshard.boxes import Owned, matrix
from megarl.parallel.reshard.owned import shard_box
from megarl.parallel.tensor import Shard, whole_shapes
from megarl.trainer.attention import ATTENTION, refuse_unsupported
from megarl.trainer.config import ModelConfig
from megarl.trainer.weights import CheckpointWeights, RandomWeights, Weights, init_buffers


def load_model_config(config: ModelConfig) -> transformers.PretrainedConfig:
    """The model's config.json, or a `ValueError` that says what to set."""
    try:
        return AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        hint = (
            ""
            if Path(config.path).exists()
            else " (no such folder here; as a hub name it needs a network)"
        )
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model.path {config.path!r} cannot be loaded{hint}: {first}; set it to a model folder"
            " or hub name"
        ) from None


def without_dropout(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """The same model, deterministic: with dropout no log-prob of the trainer would be that of the
    engine.
    """
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def empty_model(config: ModelConfig) -> PreTrainedModel:
    """The model without weights, on the meta device: names and shapes only, in a moment."""
    hf = without_dropout(load_model_config(config))
    try:
        with torch.device("meta"):
            # float32 whatever config.json says: buffers such as rotary frequencies are not rounded.
            model = AutoModelForCausalLM.from_config(
                hf,
                dtype=torch.float32,
                attn_implementation=ATTENTION,
                trust_remote_code=config.trust_remote_code,
            )
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"model type {hf.model_type} cannot be built: {str(error).splitlines()[0]}; choose"
            " another model"
        ) from None
    model.name_or_path = config.path
    return model


def check_weights(config: ModelConfig) -> None:
    """Raise `ValueError`, which names the tensor or file, unless the checkpoint has exactly the
    tensors of the model.

    Reads the headers of the safetensors files only; does nothing with `from_scratch`, or for a hub
    name, whose files may not be on this machine yet.
    """
    if not config.from_scratch and Path(config.path).is_dir():
        CheckpointWeights(config.path, empty_model(config))


def open_weights(config: ModelConfig, *, seed: int) -> Weights:
    """Where the model's whole tensors come from: its checkpoint, or with `from_scratch` the
    seed.
    """
    whole = empty_model(config)
    refuse_unsupported(whole.config)
    if config.from_scratch:
        return RandomWeights(whole, seed)
    return CheckpointWeights(config.path, whole)


@dataclass(frozen=True)
class Part:
    """The part of every parameter that one rank owns. The default: all of it."""

    shards: Mapping[str, Shard] = field(default_factory=dict)
    """How the tensor axis cuts parameters; those not named are whole."""
    tensor_rank: int = 0
    slice: int = 0
    """Under ZeRO 3: the rank's place among `slices` ranks that share its tensor shard."""
    slices: int = 1

    def owned(self, name: str, shape: tuple[int, ...]) -> Owned:
        """Boxes of the whole tensor `name` of shape `shape`, and their places in one flat
        buffer.
        """
        owned = Owned()
        owned.add(name, shard_box(name, shape, self.shards.get(name), self.tensor_rank), name)
        return owned.slice(self.slice, self.slices) if self.slices > 1 else owned

    def read(
        self,
        weights: Weights,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """This rank's part of tensor `name`, flat, in `dtype` on `device`; ZeRO 3 slices are padded
        with zeros to equal lengths.
        """
        owned, whole = self.owned(name, shape), matrix(shape)
        size = owned.sizes[name]
        if self.slices > 1:
            box = shard_box(name, shape, self.shards.get(name), self.tensor_rank)
            size = -(-box.area // self.slices)
        part = torch.zeros(size, dtype=dtype, device=device)
        tensor = weights.flat(name).view(whole.rows, whole.columns)
        for piece in owned.pieces:
            box = piece.box
            piece.view(part).copy_(tensor[box.top : box.bottom, box.left : box.right])
        return part


MakeParameter = Callable[[torch.Tensor, torch.Size, bool], nn.Parameter]
"""(this rank's flat part, shape of its tensor shard, requires_grad) -> a parameter."""


def _plain(part: torch.Tensor, shape: torch.Size, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(part.view(shape), requires_grad=requires_grad)


@torch.no_grad()
def load_weights(
    model: PreTrainedModel,
    weights: Weights,
    part: Part,
    *,
    dtype: torch.dtype,
    device: torch.device,
    make: MakeParameter = _plain,
) -> None:
    """Give every parameter and buffer of `model`, which is on the meta device and tensor-sharded as
    `part` says, its value on `device`.

    Parameters become `dtype`; buffers stay as the model makes them: rounded rotary frequencies
    would be other positions. Tied parameters stay one. Hooks and attributes of parameters are kept.
    `make` builds the parameters; under ZeRO 3 it is `megarl.trainer.partition.Partitioner`.
    """
    init_buffers(model, weights, device)
    shapes, made = whole_shapes(model, dict(part.shards)), {}
    for name, empty in model.named_parameters():
        assert empty.is_meta, f"{name} has a value already"
        values = part.read(weights, name, shapes[name], dtype=dtype, device=device)
        made[empty] = _like(make(values, empty.shape, empty.requires_grad), empty)
    for module in model.modules():
        for name, empty in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, made[empty])
    model.config.dtype = dtype


def _like(made: nn.Parameter, empty: nn.Parameter) -> nn.Parameter:
    """`made` with the attributes and gradient hooks that `empty` was given while it was sharded."""
    for name, value in vars(empty).items():
        setattr(made, name, value)
    for hook in (empty._backward_hooks or {}).values():
        made.register_hook(hook)
    return made


def use_generation_config(model: PreTrainedModel, config: ModelConfig) -> None:
    """Take over the checkpoint's generation_config.json, where there is one: exports carry it."""
    if config.from_scratch:
        return
    with contextlib.suppress(OSError):  # some old models have none
        model.generation_config = GenerationConfig.from_pretrained(config.path)


def load_model(config: ModelConfig, *, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The whole causal language model on this rank's CPU in `dtype`; with `from_scratch`, random
    weights that only `seed` decides. For one process, and for AutoTP, which cuts what is loaded.
    """
    weights, model = open_weights(config, seed=seed), empty_model(config)
    load_weights(model, weights, Part(), dtype=dtype, device=torch.device("cpu"))
    use_generation_config(model, config)
    return model
