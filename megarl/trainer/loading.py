"""Loading a Hugging Face model, sharded: each rank reads only the weights that it will own.

    empty_model(config)                 names and shapes on the meta device, no weights
    RoleModel(model, mesh, training)    the same, tensor-sharded
    load_weights(model, ...)            parameters and buffers with values, in place of empty ones

With `model.from_scratch` values are drawn by seed and module name, alike in every layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from megarl.checkpoints.adapter_files import SCORE
from megarl.checkpoints.export import GENERATION
from megarl.parallel.mesh import Axis, ProcessMesh
from megarl.parallel.reshard.boxes import Owned, matrix
from megarl.parallel.reshard.owned import Fused, add_part
from megarl.parallel.tensor import Shard, replicas, whole_shapes
from megarl.settings.schema import require
from megarl.settings.training import ModelConfig
from megarl.system.third_party import opening
from megarl.trainer.attention import ATTENTION
from megarl.trainer.experts import EXPERTS, num_experts, refuse_experts, refuse_unusual_experts
from megarl.trainer.heads import SCORING, HeadName, use_score_head
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
from megarl.weights.published import fused_tensors


def without_dropout(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """Set every dropout probability and a router's noise to 0, in place: with them, log-probs would
    differ from the engine's.
    """
    for each in {id(each): each for each in (config, config.get_text_config())}.values():
        for name, value in vars(each).items():
            is_noise = "dropout" in name or "jitter" in name or name.endswith("pdrop")
            if is_noise and isinstance(value, float):
                setattr(each, name, 0.0)
    return config


def empty_model(config: ModelConfig) -> PreTrainedModel:
    """The causal language model that `config.path` names, on the meta device, without dropout and
    with megarl's attention. Raises `ValueError` if it cannot be built.
    """
    hf = without_dropout(load_model_config(config))
    refuse_unusual_experts(hf)
    fix = "set model.path to another model, or correct its config.json"
    failure = f"model type {hf.model_type} of {config.path!r} cannot be built"
    with opening(failure, fix=fix), torch.device("meta"):
        try:
            # float32 whatever config.json says: buffers such as rotary frequencies are not rounded.
            model = AutoModelForCausalLM.from_config(
                hf,
                dtype=torch.float32,
                attn_implementation=ATTENTION,
                **({"experts_implementation": EXPERTS} if num_experts(hf) else {}),
                trust_remote_code=config.trust_remote_code,
            )
        except KeyError as error:
            if error.args != (ATTENTION,):
                raise
            # Falcon, GPT-J, GPT-Neo have a class of layers for each of a few names.
            raise ValueError("training cannot take the place of its attention") from None
    refuse_experts(model)
    model.name_or_path = config.path
    return model


def check_weights(
    config: ModelConfig, head: HeadName = "logprobs", *, needs_score: bool = False
) -> None:
    """Raise `ValueError` as `open_weights` and `init_buffers`, from headers alone; nothing is
    checked for a hub name that is not downloaded yet.
    """
    if config.from_scratch or Path(config.path).is_dir() or is_downloaded(config.path):
        weights = open_weights(config, seed=0, head=head, needs_score=needs_score)
        init_buffers(empty_model(config), weights, torch.device("cpu"))


def open_weights(
    config: ModelConfig, *, seed: int, head: HeadName = "logprobs", needs_score: bool = False
) -> Weights:
    """The model's whole tensors, from the checkpoint of `config`, or with `from_scratch` drawn from
    `seed`. A scoring `head` takes the `score` of a sequence classifier with one label, else 0.
    Raises `ValueError` if the checkpoint has other tensors than its config.json asks for, is not
    supported, or has no score head despite `needs_score`.
    """
    whole = empty_model(config)
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
        weights: Weights = CheckpointWeights(config.path, whole)
        if classifies:
            return weights
    else:
        weights = RandomWeights(whole, seed)
    if head not in SCORING:
        return weights
    new_score = torch.zeros(whole.config.get_text_config().hidden_size)
    return OtherTensors(weights, {SCORE: new_score}.get)


@dataclass(frozen=True)
class Part:
    """Which part of every parameter a rank keeps, by default all: its shard and, with `is_sliced`
    (ZeRO 3), a slice of that.
    """

    shards: Mapping[str, Shard] = field(default_factory=dict)
    """By parameter name; the others are not sharded."""
    fused: Fused = field(default_factory=dict)
    mesh: ProcessMesh | None = None
    """None: this rank keeps everything."""
    is_sliced: bool = False

    def owned(self, name: str, shape: tuple[int, ...]) -> Owned:
        """Which rectangles of tensor `name`, of whole shape `shape`, or of the tensors that it is
        fused of, this rank keeps, and where they are in its flat part. Dimensions after the first
        are columns.
        """
        owned, shard = Owned(), self.shards.get(name)
        rank = shard.of(self.mesh).rank if shard and self.mesh else 0
        add_part(owned, name, shape, shard, rank, self.fused)
        if not self.is_sliced or self.mesh is None:
            return owned
        axis = replicas(shard, self.mesh)
        return owned.slice({name: (axis.rank, axis.size)})

    def size(self, name: str, shape: tuple[int, ...]) -> int:
        """Elements of the flat part, with the padding of a slice."""
        whole = replace(self, is_sliced=False).owned(name, shape).sizes[name]
        if not self.is_sliced or self.mesh is None:
            return whole
        return -(-whole // replicas(self.shards.get(name), self.mesh).size)

    def read(
        self,
        weights: Weights,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """This rank's part of a tensor, flat; a slice is padded with zeros to the longest."""
        owned, size = self.owned(name, shape), self.size(name, shape)
        flat, shapes = torch.zeros(size, dtype=dtype, device=device), dict(self.fused.get(name, ()))
        for piece in owned.pieces:
            box, whole = piece.box, matrix(shapes.get(piece.tensor, shape))
            tensor = weights.flat(piece.tensor).view(whole.rows, whole.columns)
            piece.view(flat).copy_(tensor[box.top : box.bottom, box.left : box.right])
        return flat


MakeParameter = Callable[[torch.Tensor, nn.Parameter, Axis], nn.Parameter]
"""(this rank's flat part, the empty shard, ranks that share it) -> parameter."""


@torch.no_grad()
def load_weights(
    model: PreTrainedModel,
    weights: Weights,
    part: Part,
    *,
    dtype: torch.dtype,
    device: torch.device,
    make: MakeParameter | None = None,
) -> None:
    """Give every parameter and buffer of `model`, on the meta device and tensor-sharded, its
    values, in place. Parameters are converted to `dtype`; buffers keep theirs, since rotary
    frequencies must not be rounded. Ties, hooks and attributes stay. `make`: under ZeRO 3 a
    `Partitioner`. Raises `ValueError` for a buffer without a value.
    """
    init_buffers(model, weights, device)
    shapes, parameters = whole_shapes(model, dict(part.shards)), {}
    for name, empty in model.named_parameters():
        assert empty.is_meta, f"{name} has a value already"
        values = part.read(weights, name, shapes[name], dtype=dtype, device=device)
        if make is None or part.mesh is None:
            new = nn.Parameter(values.view(empty.shape), requires_grad=empty.requires_grad)
        else:
            new = make(values, empty, replicas(part.shards.get(name), part.mesh))
        parameters[empty] = _like(new, empty)
    for module in model.modules():
        for name, empty in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, parameters[empty])
    model.config.dtype = dtype


def _like(parameter: nn.Parameter, empty: nn.Parameter) -> nn.Parameter:
    """Copy attributes and gradient hooks of `empty` to `parameter`, and return that."""
    for name, value in vars(empty).items():
        setattr(parameter, name, value)
    if parameter.requires_grad:  # a frozen parameter has no gradient to hook into
        for hook in (empty._backward_hooks or {}).values():
            parameter.register_hook(hook)
    return parameter


def output_rows(
    config: ModelConfig, rows: slice, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[R, H] rows of the output head (unembedding), read from the checkpoint of `config`."""
    whole = empty_model(config)
    output: Any = whole.get_output_embeddings()
    name = next(name for name, value in whole.named_parameters() if value is output.weight)
    weight = open_weights(config, seed=0).flat(name).view(output.weight.shape)
    # A copy: a slice would keep the whole tensor alive.
    return weight[rows].to(device, dtype, copy=True)


def generation_config(config: ModelConfig) -> bytes | None:
    """Content of generation_config.json at `config.path`, if there is one."""
    path = None
    with contextlib.suppress(OSError):  # some old models have none
        path = cached_file(config.path, GENERATION)
    return Path(path).read_bytes() if path else None


def load_model(
    config: ModelConfig, *, dtype: torch.dtype, seed: int, head: HeadName = "logprobs"
) -> PreTrainedModel:
    """A whole model on the CPU, for single-process tools and AutoTP. Raises `ValueError` as
    `open_weights`.
    """
    weights, model = open_weights(config, seed=seed, head=head), empty_model(config)
    if head in SCORING:
        use_score_head(model)
    part = Part(fused=fused_tensors(model))
    load_weights(model, weights, part, dtype=dtype, device=torch.device("cpu"))
    return model
