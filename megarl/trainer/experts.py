"""Mixtures of experts: transformers' hook for the experts of a layer, and its routers in float32.

    router   hidden states [T, H]  ->  K experts of each token, and their weights [T, K]
    experts  each token to its experts, on whatever rank they are; the weighted sum [T, H]

To support another router, add its class to `ROUTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from megarl.kernels.experts import (
    Backend,
    ExpertRows,
    expert_mlp,
    fitting_backend,
    take_rows,
    weighted_sum,
)
from megarl.kernels.linear import accumulator
from megarl.parallel.collectives import sum_gradient, sum_values
from megarl.parallel.experts import TokenRoute
from megarl.parallel.mesh import Axis, ProcessMesh
from megarl.parallel.tensor import Shard, parameter
from megarl.settings.schema import require
from megarl.settings.training import ExpertsConfig, TrainingConfig
from megarl.trainer.expert_balance import BIAS, ExpertLoad

EXPERTS = "megarl_experts"
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Settings of config.json that are above 0 for a mixture of experts."""

Routing = tuple[torch.Tensor, torch.Tensor]
"""(weights [T, K], experts [T, K])"""


def num_experts(config: transformers.PretrainedConfig) -> int:
    """Routed experts of a layer; 0 for a dense model."""
    text = config.get_text_config()
    return max(getattr(text, name, 0) or 0 for name in COUNTS)


def softmax_first(router: Any, logits: torch.Tensor, chosen: torch.Tensor | None) -> Routing:
    """Weights are the probabilities over all experts (Qwen3, OLMoE), or their shares (Mixtral)."""
    weights = logits.softmax(-1)
    index = weights.topk(router.top_k, -1).indices if chosen is None else chosen
    weights = weights.gather(1, index)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, index


def softmax_of_chosen(router: Any, logits: torch.Tensor, chosen: torch.Tensor | None) -> Routing:
    """Weights are the softmax over the K chosen logits (gpt-oss)."""
    index = logits.topk(router.top_k, -1).indices if chosen is None else chosen
    return logits.gather(1, index).softmax(-1), index


def sigmoid_by_groups(router: Any, logits: torch.Tensor, chosen: torch.Tensor | None) -> Routing:
    """DeepSeek-V3 (arXiv:2412.19437): experts of the best groups by score plus a bias, which the
    weights do not have.
    """
    scores = logits.sigmoid()
    if chosen is None:
        biased = (scores + router.e_score_correction_bias).view(len(scores), router.num_group, -1)
        groups = biased.topk(2, -1).values.sum(-1).topk(router.topk_group, -1).indices
        is_left = torch.zeros_like(biased[..., 0], dtype=torch.bool).scatter(1, groups, True)
        biased = biased.masked_fill(~is_left[..., None], -torch.inf).view_as(scores)
        chosen = torch.topk(biased, router.top_k, -1).indices
    weights = scores.gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor, chosen


ROUTERS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor | None], Routing]] = {
    "Qwen3MoeTopKRouter": softmax_first,
    "OlmoeTopKRouter": softmax_first,
    "MixtralTopKRouter": softmax_first,
    "GptOssTopKRouter": softmax_of_chosen,
    "Glm4MoeTopkRouter": sigmoid_by_groups,
}
"""{class in transformers: (router, logits [T, E] float32, experts [T, K] or None to choose them) ->
weights and experts}"""


@dataclass
class Routers:
    """What the routers of a model share during a pass, also when a layer is computed again."""

    chosen: Sequence[torch.Tensor] | None = None
    """By layer of experts, [T, K] int64: the experts that each token goes to, -1 where the router
    chooses; None: it chooses everywhere.
    """
    used: list[torch.Tensor] | None = None
    """By layer of the present pass, [T, K] int64: where they went; None: not recorded."""
    shape: tuple[int, int] = (0, 0)
    """(layers with experts, K)."""
    load: ExpertLoad = field(default_factory=lambda: ExpertLoad(ExpertsConfig()))
    """How many tokens each expert gets."""

    def replay(self, experts: torch.Tensor | None) -> None:
        """Take these experts, as `MicroBatch.experts`, in the passes from now on. Raises
        `ValueError` unless they are of this model.
        """
        shape = self.shape if experts is None else tuple(experts.shape[1:])
        require(
            shape == self.shape,
            f"engines report {shape[1]} experts of a token in {shape[0]} layers, but the policy has"
            f" {self.shape[1]} in {self.shape[0]}; report `TokenArrays.experts` of its layers with"
            " experts, or set algorithm.router_replay to another value",
        )
        self.chosen = None if experts is None else experts.long().unbind(1)


def _route(
    router: Any, formula: Callable[..., Routing], layer: int, shared: Routers, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits [T, E], weights [T, K], experts [T, K]); all float32, whatever the model's dtype: in
    16 bit, near ties would be decided otherwise than in the engine.
    """
    dtype = accumulator(hidden.dtype)
    bias = getattr(router, "bias", None)
    logits = F.linear(
        hidden.reshape(-1, hidden.shape[-1]).to(dtype),
        router.weight.to(dtype),
        bias if bias is None else bias.to(dtype),
    )
    chosen = None
    if shared.chosen is not None:
        unguided = formula(router, logits.detach(), None)[1]
        chosen = torch.where(shared.chosen[layer] < 0, unguided, shared.chosen[layer])
    weights, index = formula(router, logits, chosen)
    if shared.used is not None:
        shared.used.append(index)
    shared.load.add(layer, logits, index)
    return logits, weights, index


ALONE = Axis("this rank", 1, 0, (0,), None)


@dataclass(frozen=True)
class ExpertRanks:
    """Where the experts of each layer are; by default all here."""

    expert: Axis = ALONE
    experts: Axis = ALONE
    tensor: Axis = ALONE
    backend: Backend | Literal["auto"] = "auto"
    """auto: the one that fits device and dtype."""


def _experts(
    layer: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum [T, H] of each token's experts. With transformers' signature. Collective
    over the expert and tensor axes.
    """
    if hidden.is_meta:  # a trial of the model's attention
        return hidden
    ranks: ExpertRanks = getattr(layer, "ranks", ExpertRanks())
    hidden, weights = sum_gradient(hidden, ranks.tensor), sum_gradient(weights, ranks.tensor)
    route = TokenRoute.of(index, layer.num_experts, ranks.expert, ranks.experts)
    source = route.tokens, route.order
    backend = ranks.backend
    if backend == "auto":
        backend = fitting_backend(hidden.device, hidden.dtype)
    work = ExpertRows(route.counts, layer._apply_gate, backend, *(source if route.is_local else ()))
    rows = hidden if route.is_local else route.send(take_rows(hidden, *source))
    rows = expert_mlp(rows, _weight(layer, "gate_up_proj"), _weight(layer, "down_proj"), work)
    out = weighted_sum(route.back(rows), weights, route.pairs, route.order).to(hidden.dtype)
    return sum_values(out, ranks.tensor)


def _weight(layer: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight [E, N, K], bias [E, N] or None)"""
    weight = getattr(layer, name)
    if layer.is_transposed:
        weight = weight.transpose(-2, -1)
    return weight, getattr(layer, f"{name}_bias", None)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """{name: module with the fused weights of a layer's experts}"""
    return {
        name: module for name, module in model.named_modules() if hasattr(module, "is_transposed")
    }


def refuse_experts(model: PreTrainedModel) -> None:
    """Raise `ValueError` for a mixture of experts whose router or experts this code does not
    know.
    """
    count, layers = num_experts(model.config), expert_layers(model)
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("router")]
    unknown = sorted({type(m).__name__ for m in routers} - set(ROUTERS))
    if unknown or (count and (not layers or len(layers) != len(routers))):
        names = ", ".join(unknown) or "experts without transformers' hook"
        raise ValueError(
            f"model type {model.config.model_type} is a mixture of experts with {names}, which"
            f" training does not support (known: {', '.join(ROUTERS)}); choose another model"
        )


def refuse_unusual_experts(config: transformers.PretrainedConfig) -> None:
    """Raise `ValueError` for quantised weights, and a mixture that drops tokens."""
    quantised = getattr(config, "quantization_config", None)
    require(
        not quantised,
        f"model type {config.model_type} has quantised weights (quantization_config in its"
        " config.json), which are not trained; set model.path to a copy in bfloat16, such as"
        " transformers' from_pretrained with dequantize=True and save_pretrained write",
    )
    text = vars(config.get_text_config()) if num_experts(config) else {}
    limits = [name for name, value in text.items() if "capacity" in name and value]
    require(
        not limits,
        f"{', '.join(limits)} in config.json of model type {config.model_type} would drop tokens"
        " beyond an expert's capacity, which training does not; remove it",
    )


def refuse_balance(model: PreTrainedModel, training: TrainingConfig) -> None:
    """Raise `ValueError`, with the setting to change, if `training.experts` balances what a model
    lacks, or LoRA keeps.
    """
    settings = training.experts
    routers = [module for module in model.modules() if type(module).__name__ in ROUTERS]
    kind = model.config.model_type
    require(
        settings.bias_rate == 0 or all(hasattr(router, BIAS) for router in routers),
        f"training.experts.bias_rate is {settings.bias_rate:g}, but the routers of model type"
        f" {kind} have no bias for it; set it to 0",
    )
    require(
        settings.bias_rate == 0 or not training.lora.is_on,
        f"training.experts.bias_rate is {settings.bias_rate:g}, but with training.lora all but"
        " adapters stays as it is; set it to 0",
    )


def refuse_expert_layout(
    config: transformers.PretrainedConfig, expert: int, tensor: int, *, is_autotp: bool
) -> None:
    """Raise `ValueError`, with the setting to change, if a model's experts cannot be divided over
    `expert` x `tensor` ranks.
    """
    count = num_experts(config)
    if count == 0:  # a reference beside a mixture
        return
    require(
        count % (expert * tensor) == 0,
        f"training.layout.expert x tensor is {expert} x {tensor}, which does not divide the {count}"
        " experts of a layer; set them to divisors",
    )
    require(
        not is_autotp,
        "training.tensor_backend is 'autotp', which does not divide experts; set it to 'plan'",
    )


def shard_experts(
    model: PreTrainedModel,
    mesh: ProcessMesh,
    routers: Routers,
    backend: Backend | Literal["auto"] = "auto",
) -> dict[str, Shard]:
    """Divide the experts of each layer over the ranks of `mesh.experts`, in place, on any device,
    and compute its routers in float32, as `routers` says. `backend`: `training.grouped`. Returns
    {parameter: how it is split}.
    """
    shards = expert_shards(model, mesh.experts.size)
    known: list[Any] = [m for m in model.modules() if type(m).__name__ in ROUTERS]
    if known:
        routers.shape = (len(known), known[0].top_k)
    for layer, router in enumerate(known):
        formula = ROUTERS[type(router).__name__]
        router.forward = partial(_route, router, formula, layer, routers)
    routers.load.routers, routers.load.num_experts = known, num_experts(model.config)
    for owner, layer in expert_layers(model).items():
        layer.ranks = ExpertRanks(mesh.expert, mesh.experts, mesh.tensor, backend)
        # Under ZeRO 3 all ranks must call the same modules; this is called by experts with rows.
        if "act_fn" in layer._modules:
            layer.__dict__["act_fn"] = layer._modules.pop("act_fn")
        for name, whole in list(layer.named_parameters()):
            if shard := shards.get(f"{owner}.{name}"):
                weight = shard.take(whole.detach(), mesh.experts.rank)
                setattr(layer, name, parameter(weight, whole))
    return shards


def expert_shards(model: PreTrainedModel, size: int) -> dict[str, Shard]:
    """{parameter: how `size` ranks split it} of the experts of a whole model."""
    shard = Shard.even(0, num_experts(model.config), size, axis="experts")
    named = [(owner, layer.named_parameters()) for owner, layer in expert_layers(model).items()]
    return {f"{owner}.{name}": shard for owner, p in named for name, _ in p if size > 1}
