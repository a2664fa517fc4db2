"""Memory that a model needs on a GPU, computed from its config.json before anything is started.

    model, tensor              --sized_parameters--> its parameters on a tensor-parallel rank
    parameters, layout, ZeRO stage --role_memory--> Memory of the rank that needs most
    parameters, tensor           --engine_memory--> bytes of an engine's weights on a GPU

Bytes of one parameter, and the ZeRO stage that divides them over data x sequence ranks
(arXiv:1910.02054):

    part                            float32   16 bit     divided from ZeRO
    weights                         4         2          3
    gradients, of trained weights   4         4          2
    optimizer: master weights       4, or 0   4          1
    optimizer: AdamW's two moments  8         8          1

In float32 only ZeRO has master weights. Not counted: working memory (`working_memory.py`),
key-value caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.parallel.layout import Layout
from megarl.parallel.mesh import Axis
from megarl.parallel.tensor import Shard, whole_shapes
from megarl.settings.training import LoraConfig, ModelConfig, TrainingConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a weight."""
GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES = 4, 4, 8
SUB_GROUP_ELEMENTS = 1_000_000_000
"""Where ZeRO 3 begins a new part of the optimizer state (`sub_group_size`)."""
OUTPUT_HEAD, SCORE_HEAD = "lm_head.weight", "score.weight"


@dataclass(frozen=True)
class SizedParameter:
    """A model's parameter, its whole shape, and how ranks split it, if they do."""

    name: str
    shape: tuple[int, ...]
    shard: Shard | None = None

    @property
    def on_rank(self) -> int:
        """Most elements on a rank, before ZeRO divides them."""
        if self.shard is None:
            return math.prod(self.shape)
        return math.prod(self.shape) // self.shard.whole * max(self.shard.lengths)

    def replicas(self, layout: Layout) -> int:
        """Ranks with the same part, over which ZeRO divides it."""
        is_expert = self.shard is not None and self.shard.axis == "experts"
        return layout.replicas // (layout.expert if is_expert else 1)


def sized_parameters(config: ModelConfig, tensor: int, expert: int = 1) -> list[SizedParameter]:
    """The parameters of `config.path` as `tensor` x `expert` parallel ranks split them. Raises
    `ValueError` if the model cannot be built or split.
    """
    # Imported here: the modules of transformers take seconds.
    from megarl.trainer.experts import expert_shards
    from megarl.trainer.loading import empty_model
    from megarl.trainer.sharding import refuse_tensor, shard_model

    model = empty_model(config)
    refuse_tensor(model.config, tensor)
    shards = shard_model(model, Axis("tensor", tensor, 0, tuple(range(tensor)), None))
    shapes = whole_shapes(model, shards)
    shards |= expert_shards(model, expert * tensor)
    return [SizedParameter(name, shape, shards.get(name)) for name, shape in shapes.items()]


@dataclass(frozen=True)
class Memory:
    """Bytes that a model takes on one rank: on the GPU, and on the host."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    """Master weights and AdamW's moments."""
    host: int = 0
    """Of `training.offload_optimizer`."""

    @property
    def total(self) -> int:
        """Bytes on the GPU."""
        return self.weights + self.gradients + self.optimizer


def with_head(parameters: Sequence[SizedParameter], head: str) -> list[SizedParameter]:
    """The parameters of a model with `head`, from those of a language model."""
    if head == "logprobs":
        return [*parameters]
    kept = [parameter for parameter in parameters if parameter.name != OUTPUT_HEAD]
    if head in ("value", "scalar"):
        kept.append(SizedParameter(SCORE_HEAD, (1, parameters[0].shape[-1])))
    return kept


def role_memory(
    parameters: Sequence[SizedParameter], layout: Layout, training: TrainingConfig, *, trains: bool
) -> Memory:
    """Bytes on the rank that needs most. A frozen model has weights only, with LoRA only if
    `training.lora.adapter` names an adapter.
    """
    stage = training.zero_stage
    lora = training.lora if trains or training.lora.adapter else LoraConfig()
    weights = [(parameter.on_rank, parameter.replicas(layout)) for parameter in parameters]
    adapters = [(size, layout.replicas) for p in parameters for size in _adapter(p, lora)]
    trained = trained_elements(parameters, training, layout) if trains else []

    def bytes_of(sizes: Sequence[tuple[int, int]], each: int, divided_from: int) -> int:
        is_divided = stage >= divided_from
        return each * sum(-(-size // (ranks if is_divided else 1)) for size, ranks in sizes)

    weight_bytes = BYTES[training.dtype]
    master = MASTER_BYTES if stage > 0 or training.dtype != "float32" else 0
    on_gpu = Memory(
        bytes_of(weights + adapters, weight_bytes, 3),
        bytes_of(trained, GRADIENT_BYTES, 2),
        bytes_of(trained, master + MOMENT_BYTES, 1),
    )
    if not (trains and training.offload_optimizer):
        return on_gpu
    sums = on_gpu.gradients if training.offload_gradients == "step" else 0
    return Memory(on_gpu.weights, sums, host=host_memory(trained, layout, training))


def trained_elements(
    parameters: Sequence[SizedParameter], training: TrainingConfig, layout: Layout
) -> list[tuple[int, int]]:
    """(elements on a rank, ranks over which ZeRO divides them) of each trained parameter."""
    if not training.lora.is_on:
        return [(parameter.on_rank, parameter.replicas(layout)) for parameter in parameters]
    adapters = [size for parameter in parameters for size in _adapter(parameter, training.lora)]
    heads = [parameter.on_rank for parameter in parameters if parameter.name == SCORE_HEAD]
    return [(size, layout.replicas) for size in adapters + heads]


def host_memory(
    trained: Sequence[tuple[int, int]], layout: Layout, training: TrainingConfig
) -> int:
    """Bytes in a rank's host memory with `training.offload_optimizer`; `trained`:
    `trained_elements`.

    Counted are master weights, moments and the gradients that the optimizer takes; under ZeRO 1 and
    2 also updated weights and a buffer for the largest parameter. torch rounds pinned memory up to
    a power of two: all but the moments and, under ZeRO 3, the master weights.
    """
    parts = [-(-size // ranks) for size, ranks in trained]
    if training.zero_stage == 3:
        pinned = [size * GRADIENT_BYTES for size in sub_groups(parts)]
        if training.offload_gradients == "micro_batch":
            pinned.append(sum(parts) * GRADIENT_BYTES)
        return sum(parts) * (MASTER_BYTES + MOMENT_BYTES) + sum(map(power_of_two, pinned))
    each = BYTES[training.dtype]
    pinned = [sum(parts) * size for size in (MASTER_BYTES, GRADIENT_BYTES, each)]
    pinned.append(max((size for size, _ in trained), default=0) * each)
    return sum(parts) * MOMENT_BYTES + sum(map(power_of_two, pinned))


def sub_groups(parts: Sequence[int]) -> list[int]:
    """Elements of each of ZeRO 3's groups of parameters."""
    groups = [0]
    for size in parts:
        if groups[-1] >= SUB_GROUP_ELEMENTS:
            groups.append(0)
        groups[-1] += size
    return groups


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0


def engine_memory(parameters: Sequence[SizedParameter], tensor: int, dtype: str) -> int:
    """About the bytes of weights on each of an engine's `tensor` GPUs."""
    sizes = [
        math.prod(parameter.shape) / (tensor if len(parameter.shape) > 1 else 1)
        for parameter in parameters
    ]
    return math.ceil(BYTES[dtype] * sum(sizes))


def _adapter(parameter: SizedParameter, lora: LoraConfig) -> list[int]:
    """Elements of A and B of a parameter's LoRA adapter on one rank."""
    layer = parameter.name.removesuffix(".weight").rpartition(".")[2]
    is_linear = (
        len(parameter.shape) == 2
        and ".layers." in parameter.name
        and ".experts." not in parameter.name
    )
    if not lora.is_on or not is_linear or (lora.targets and layer not in lora.targets):
        return []
    # A is split with the weight's inputs, B with its outputs; the other one is whole.
    outputs, inputs = parameter.shape
    if parameter.shard is not None:
        most = max(parameter.shard.lengths)
        outputs, inputs = (outputs, most) if parameter.shard.dim == 1 else (most, inputs)
    return [lora.rank * inputs, lora.rank * outputs]
