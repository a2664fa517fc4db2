"""The policy network: a Hugging Face causal language model that answers with log-probs instead of
logits.

    MicroBatch (this rank's T tokens of a packed row)  ->  log-prob and entropy of each target with
    mask True, [M] each

Attention and head are plugged in through public doors: `AttentionInterface.register` and
`set_output_embeddings`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megarl.kernels.linear import linear
from megarl.kernels.logprobs import VocabularyShard, linear_logprobs
from megarl.kernels.packed_attention import Documents, packed_attention
from megarl.kernels.sequence_attention import AttentionPlan, sequence_attention
from megarl.parallel.collectives import all_reduce, all_reduce_max
from megarl.parallel.exchange import RingExchange
from megarl.parallel.mesh import ProcessMesh
from megarl.trainer.autotp import shard_with_autotp
from megarl.trainer.config import ModelConfig, TrainingConfig
from megarl.trainer.sharding import head_shard, shard_model
from megarl.types import MicroBatch

ATTENTION = "megarl_packed"

UNSUPPORTED = ("sliding_window", "softcap", "s_aux")
"""What models ask of attention by keyword and ours does not have; `refuse_unsupported` knows most
of it at start-up.
"""

Attend = Callable[..., torch.Tensor]
"""(q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], scale=float) -> [T, Hq, D]: attention of one
micro-batch, in all layers.
"""


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    attend: Attend | None = None,
    **features: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1,
    T, Hq, D].
    """
    assert attend is not None and attention_mask is None and query.shape[0] == 1
    asked = [name for name in UNSUPPORTED if features.get(name) is not None]
    if asked:
        raise ValueError(
            f"{type(module).__name__} asks for {', '.join(asked)}, which training does not support"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, scale=scale)[None], None


AttentionInterface.register(ATTENTION, _attention)


class LogProbHead(nn.Linear):
    """The output embedding, asked for log-probs of targets. The same weight under the same name as
    the head it replaces.
    """

    shard: VocabularyShard | None = None
    """Which words `weight` is of, where a tensor axis shares them."""
    backend = "chunked"

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_logprobs(hidden, self.weight, targets, temperature, self.shard, self.backend)


class Linear(nn.Linear):
    """A linear layer on the faster of this machine's libraries; the same parameters under the same
    names.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def use_linear(model: nn.Module) -> None:
    """Put `Linear` in the place of every plain linear layer, around the parameters that are
    there.
    """
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                made = Linear(1, 1, bias=False, device="meta")
                made.in_features, made.out_features = layer.in_features, layer.out_features
                made.weight, made.bias = layer.weight, layer.bias
                setattr(parent, name, made)


class PolicyModel(nn.Module):
    """Log-probs of a packed row on a mesh; owns the Hugging Face model, cut over the tensor axis,
    as `.model`.
    """

    def __init__(self, model: PreTrainedModel, mesh: ProcessMesh, training: TrainingConfig) -> None:
        super().__init__()
        old = model.get_output_embeddings()
        if not isinstance(old, nn.Linear) or old.bias is not None:
            raise ValueError(
                f"model {model.name_or_path} has an output head other than a linear layer without"
                " bias; choose another model"
            )
        self.model, self.mesh = model, mesh
        self.sequence = training.sequence
        by_autotp = training.tensor_backend == "autotp"
        self.shards = (
            shard_with_autotp(model, mesh) if by_autotp else shard_model(model, mesh.tensor)
        )
        """Parameters of `model` of which this rank holds a part."""
        self._inner, self._outer = (
            RingExchange(mesh.ulysses),
            RingExchange(mesh.ring, mesh.ring_back),
        )
        head = LogProbHead(1, 1, bias=False, device="meta")
        head.in_features, head.out_features, head.weight = (
            old.in_features,
            old.out_features,
            old.weight,
        )
        head.backend = training.logprobs
        words, axis = head_shard(model, self.shards), mesh.tensor
        if words is not None:
            head.shard = VocabularyShard(
                first=words.edges[axis.rank],
                rows=max(words.lengths),
                reduce_max=partial(all_reduce_max, axis=axis),
                reduce_sum=partial(all_reduce, axis=axis),
            )
        model.set_output_embeddings(head)
        use_linear(model)

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [M], entropies [M]) of the M targets with `batch.mask` True, in order."""
        hidden = self.model.base_model(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            attend=self._attend(batch),
        ).last_hidden_state[0]
        chosen = batch.mask.nonzero()[:, 0]
        head: Any = self.model.get_output_embeddings()
        return head(hidden[chosen], batch.targets[chosen], temperature)

    def _attend(self, batch: MicroBatch) -> Attend:
        """Attention for this micro-batch: over the whole row here, or together with the other
        sequence ranks.
        """
        if not batch.indices:
            return partial(packed_attention, documents=Documents.of(batch.starts))
        device, block, transport = (
            batch.token_ids.device,
            self.sequence.block,
            self.sequence.transport,
        )
        if transport == "auto":
            transport = "ring" if device.type == "cuda" else "ring_lean"
        named = None if block == "auto" else block
        plan = AttentionPlan.of(
            batch.indices, batch.starts, device, ulysses=self._inner.size, block=named
        )
        return partial(
            sequence_attention, plan=plan, inner=self._inner, outer=self._outer, transport=transport
        )


def refuse_unsupported(config: transformers.PretrainedConfig) -> None:
    """Raise `ValueError` for attention features that our kernel does not have: never computed
    wrongly in silence.
    """
    text = config.get_text_config()
    found = []
    types = set(getattr(text, "layer_types", None) or [])
    window = getattr(text, "sliding_window", None)
    uses_window = getattr(text, "use_sliding_window", window is not None)
    if types - {"full_attention"} or (not types and window is not None and uses_window):
        found.append(
            f"layer types {sorted(types)}" if types else f"sliding window of {window} tokens"
        )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(text, name, None):
            found.append(f"{name} = {getattr(text, name)}")
    rope = getattr(text, "rope_parameters", None) or {}
    for kind in {
        str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)
    }:
        # These look at the longest document of a row, or of a rank's part of it: log-probs would
        # depend on the neighbours.
        if kind == "longrope" or kind.startswith("dynamic"):
            found.append(f"{kind} rotary embeddings")
    if getattr(text, "logits_scaling", 1.0) not in (None, 1.0) or getattr(
        text, "logit_scale", 1.0
    ) not in (None, 1.0):
        found.append("scaled logits")
    if config.model_type in ("gpt_oss",):
        found.append("attention sinks")
    if getattr(text, "num_local_experts", 0) or getattr(text, "num_experts", 0):
        found.append("mixture of experts")
    if found:
        raise ValueError(
            f"model type {config.model_type} uses {', '.join(found)}, which training does not"
            " support; choose another model"
        )


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
    hf = load_model_config(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                hf, attn_implementation=ATTENTION, trust_remote_code=config.trust_remote_code
            )
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"model type {hf.model_type} cannot be built: {str(error).splitlines()[0]}; choose"
            " another model"
        ) from None


def prove_attention(model: PreTrainedModel) -> None:
    """Raise `ValueError` unless every layer of `model` (on the meta device) takes its attention
    from us; no weights needed.
    """
    calls: list[tuple[int, ...]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append(tuple(q.shape))
        return torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)

    kind, layers = model.config.model_type, model.config.get_text_config().num_hidden_layers
    reason = ""
    try:
        with torch.device("meta"), torch.no_grad():
            # Embedded words: with ids some models look at their values, which there are none of
            # here.
            embedding: Any = model.get_input_embeddings()
            row, words = (
                torch.zeros(1, 4, dtype=torch.int64),
                torch.zeros(1, 4, embedding.weight.shape[1]),
            )
            model.base_model(inputs_embeds=words, position_ids=row, use_cache=False, attend=attend)
    except Exception as error:  # whatever a model's own code raises
        reason = (
            f" ({type(error).__name__}:"
            f" {str(error).splitlines()[0] if str(error) else 'no message'})"
        )
    if len(calls) != layers:
        raise ValueError(
            f"model type {kind} takes the attention of {len(calls)} of its {layers} layers from"
            f" transformers' AttentionInterface{reason}; training needs it of all, choose another"
            " model"
        )


def load_model(config: ModelConfig, *, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The causal language model on the CPU in `dtype`; with `from_scratch`, random weights that
    only `seed` decides.
    """
    hf = without_dropout(load_model_config(config))
    refuse_unsupported(hf)
    if config.from_scratch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                hf,
                dtype=torch.float32,
                attn_implementation=ATTENTION,
                trust_remote_code=config.trust_remote_code,
            )
        for parameter in (
            model.parameters()
        ):  # not the buffers: rounded rotary frequencies would be other positions
            parameter.data = parameter.data.to(dtype)
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                config.path,
                config=hf,
                dtype=dtype,
                attn_implementation=ATTENTION,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=True,
            )
        except OSError as error:
            first = str(error).strip().splitlines()[0]
            raise ValueError(
                f"model.path {config.path!r} has no weights that can be loaded: {first}; set"
                " model.from_scratch to true for random weights, or point model.path at a trained"
                " model"
            ) from None
    model.name_or_path = config.path
    return model
