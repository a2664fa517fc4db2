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
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from megarl.checkpoints.adapter_files import SCORE
from megarl.checkpoints.export import GENERATION
from megarl.parallel.reshard.boxes import Owned, matrix
from megarl.parallel.reshard.owned import shard_box
from megarl.parallel.tensor import Shard, whole_shapes
from megarl.settings.schema import require
from megarl.settings.training import ModelConfig
from megarl.system.third_party import opening
from megarl.trainer.attention import ATTENTION, refuse_unsupported
from megarl.trainer.heads import SCORING, HeadName, refuse_head, use_score_head
from megarl.trainer.model_config import load_model_config
from megarl.trainer.weights import (
    CheckpointWeights,
    OtherTensors,
    RandomWeights,
    Weights,
    init_buffers,
    is_downloaded,
    shape_of,
)


def without_dropout(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """Set every dropout probability of a model configuration to 0, in place, and return it: with
    dropout the trainer's log-probs would differ from those of the inference engine.
    """
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def empty_model(config: ModelConfig) -> PreTrainedModel:
    """Create the causal language model that `config.path` names on the meta device: parameter names
    and shapes without memory for weights, without dropout, and with megarl's attention. Raises
    `ValueError` if config.json cannot be read or no model be built from it.
    """
    hf = without_dropout(load_model_config(config))
    fix = "set model.path to another model, or correct its config.json"
    what = f"model type {hf.model_type} of {config.path!r} cannot be built"
    with opening(what, fix=fix), torch.device("meta"):
        try:
            # float32 whatever config.json says: buffers such as rotary frequencies are not rounded.
            model = AutoModelForCausalLM.from_config(
                hf,
                dtype=torch.float32,
                attn_implementation=ATTENTION,
                trust_remote_code=config.trust_remote_code,
            )
        except KeyError as error:
            if error.args != (ATTENTION,):
                raise
            # Falcon, GPT-J, GPT-Neo have a class of layers for each of a few names.
            raise ValueError("training cannot take the place of its attention") from None
    model.name_or_path = config.path
    return model


def check_weights(
    config: ModelConfig, head: HeadName = "logprobs", *, needs_score: bool = False
) -> None:
    """Raise `ValueError`, naming the tensor or file, unless the checkpoint of `config` has exactly
    the tensors that its config.json asks for. `head`: what the model is to compute. With "value" (a
    number for each token) and "scalar" (one for each sample) the checkpoint may have a score head,
    and must have one if `needs_score`.

    Also raised for a buffer that neither the checkpoint has nor the model computes. Only the
    headers of the safetensors files are read. Nothing is checked for a hub name whose weights are
    not downloaded yet.
    """
    if config.from_scratch or Path(config.path).is_dir() or is_downloaded(config.path):
        weights = open_weights(config, seed=0, head=head, needs_score=needs_score)
        init_buffers(empty_model(config), weights, torch.device("cpu"))


def open_weights(
    config: ModelConfig, *, seed: int, head: HeadName = "logprobs", needs_score: bool = False
) -> Weights:
    """An object that gives the model's whole tensors by name, from the checkpoint of `config`
    (downloaded first for a hub name), or with `from_scratch` drawn from `seed`. `head`: what the
    model is to compute. With "value" (a number for each token) and "scalar" (one for each sample)
    the checkpoint may be a sequence classifier with one label, whose `score` is used; for other
    models the score head is 0. Raises `ValueError` if the checkpoint lacks tensors, has others, is
    of a kind that megarl does not train, or, with `needs_score`, has no score head.
    """
    whole = empty_model(config)
    refuse_unsupported(whole.config)
    if head not in SCORING:
        refuse_head(whole)
    if not config.from_scratch:
        shape = shape_of(config.path, SCORE)
        classifies = shape is not None
        require(
            shape is None or shape[0] == 1,
            f"model.path {config.path!r} is a classifier with {(shape or (0,))[0]} labels, but a"
            " reward model has one, its score; set another model",
        )
        require(
            classifies or not needs_score,
            f"model.path {config.path!r} has no {SCORE}: it is no sequence classifier with one"
            " label; set it to one, such as task: reward_model trains",
        )
        require(
            head in SCORING or not classifies,
            f"model.path {config.path!r} is a sequence classifier, such as a reward model (it has a"
            f" {SCORE}), and cannot write text; set it to a language model",
        )
        if classifies:
            use_score_head(whole)
        found: Weights = CheckpointWeights(config.path, whole)
        if classifies:
            return found
    else:
        found = RandomWeights(whole, seed)
    if head not in SCORING:
        return found
    new_score = torch.zeros(whole.config.get_text_config().hidden_size)
    return OtherTensors(found, {SCORE: new_score}.get)


@dataclass(frozen=True)
class Part:
    """Which part of every parameter one trainer rank keeps, by default the whole: its
    tensor-parallel shard (`shards`, `tensor_rank`) and, under ZeRO 3, slice number `slice` of that
    shard, one of `slices` equal ones. `read` reads this part of a tensor.
    """

    shards: Mapping[str, Shard] = field(default_factory=dict)
    """{parameter name: tensor-parallel shard}; parameters without an entry are not sharded."""
    tensor_rank: int = 0
    slice: int = 0
    """Under ZeRO 3: index of this rank among the `slices` ranks that share its tensor-parallel
    shard."""
    slices: int = 1

    def owned(self, name: str, shape: tuple[int, ...]) -> Owned:
        """Which rectangles of tensor `name`, whose whole shape is `shape`, this rank keeps, and
        where each lies, in elements, in this rank's flat part as `read` returns it; the `Owned`
        calls this buffer `name`. Rows are the tensor's first dimension and columns all others,
        flattened; a vector has one column.
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
        """Read this rank's part of tensor `name`, whose whole shape is `shape`, from `weights`: a
        new flat tensor of `dtype` on `device`. Under ZeRO 3 a slice is padded with zeros to the
        length of the longest slice.
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
"""(this rank's flat part, shape of the whole tensor-parallel shard, requires_grad) -> a parameter:
how `load_weights` makes parameters of what it has read."""


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
    """Give every parameter and buffer of `model` its values on `device`, in place. The model is on
    the meta device, and its parameters have the shapes of this rank's tensor-parallel shards.

    `weights`: gives whole tensors by name. `part`: what of each tensor this rank keeps; nothing
    else is allocated. Parameters are converted to `dtype`. Buffers keep the model's own dtype,
    since rotary frequencies must not be rounded. Tied parameters stay tied; hooks and attributes of
    parameters are kept. `make(flat part, shape of the shard, requires_grad)` creates each
    parameter; under ZeRO 3 it is a `megarl.trainer.build.Partitioner`. Raises `ValueError` for a
    buffer that has no value.
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
    """Copy attributes and gradient hooks of the parameter `empty` to the parameter `made`; returns
    `made`.
    """
    for name, value in vars(empty).items():
        setattr(made, name, value)
    if made.requires_grad:  # a frozen parameter has no gradient to hook into
        for hook in (empty._backward_hooks or {}).values():
            made.register_hook(hook)
    return made


def output_rows(
    config: ModelConfig, rows: slice, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Rows `rows` of a model's output head (unembedding), which are token ids of its vocabulary: a
    new tensor [R, H] in `dtype` on `device`, read from the checkpoint of `config`.
    """
    whole = empty_model(config)
    output: Any = whole.get_output_embeddings()
    name = next(name for name, value in whole.named_parameters() if value is output.weight)
    weight = open_weights(config, seed=0).flat(name).view(output.weight.shape)
    # A copy: a slice would keep the whole tensor alive.
    return weight[rows].to(device, dtype, copy=True)


def generation_config(config: ModelConfig) -> bytes | None:
    """The bytes of the model's generation_config.json, which saved models get too; None if the
    model has no such file, or with `from_scratch`.
    """
    if config.from_scratch:
        return None
    with contextlib.suppress(OSError):  # some old models have none
        found = cached_file(config.path, GENERATION)
        return Path(found).read_bytes() if found else None


def load_model(
    config: ModelConfig, *, dtype: torch.dtype, seed: int, head: HeadName = "logprobs"
) -> PreTrainedModel:
    """Load a whole causal language model on this process's CPU in `dtype`, or with the heads
    "value" and "scalar" a model with a score head in place of the output head; with `from_scratch`
    its weights are drawn from `seed`. Used by single-process tools, and for DeepSpeed AutoTP, which
    shards loaded weights. Raises `ValueError` if the checkpoint does not fit its config.json.
    """
    weights, model = open_weights(config, seed=seed, head=head), empty_model(config)
    if head in SCORING:
        use_score_head(model)
    load_weights(model, weights, Part(), dtype=dtype, device=torch.device("cpu"))
    return model
