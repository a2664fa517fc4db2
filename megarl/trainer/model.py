"""A Hugging Face causal language model on a mesh: packed sequences in, log-probs out.

MicroBatch (this rank's T tokens of a packed sequence)
    ->  log-prob and entropy of each target with mask True, [M] each
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from megarl.environments.user_code import function_of
from megarl.kernels.linear import linear
from megarl.kernels.logprobs import VocabularyShard
from megarl.kernels.packed_attention import Documents, PackedBackend, packed_attention
from megarl.kernels.sequence_attention import AttentionPlan, sequence_attention
from megarl.parallel.collectives import all_reduce, all_reduce_max
from megarl.parallel.exchange import RingExchange
from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.tensor import whole_shapes
from megarl.settings.schema import is_own
from megarl.settings.training import TrainingConfig
from megarl.trainer.attention import Attend, layer_windows
from megarl.trainer.autotp import shard_with_autotp
from megarl.trainer.expert_balance import ExpertLoad
from megarl.trainer.experts import Routers, shard_experts
from megarl.trainer.heads import (
    HeadName,
    LogProbHead,
    SoftTargets,
    drop_output_head,
    use_score_head,
)
from megarl.trainer.logits import logit_transform
from megarl.trainer.lora import Adapters, add_adapters, is_adapter
from megarl.trainer.norms import use_torch_norms
from megarl.trainer.sharding import head_shard, shard_model
from megarl.types import MicroBatch
from megarl.weights.published import fused_tensors, kept_buffers, published


class Linear(nn.Linear):
    """`nn.Linear` that multiplies float32 by oneDNN on CPUs with AVX-512, where that is faster."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def use_linear(model: nn.Module) -> None:
    """Replace every plain `nn.Linear` by `Linear`, in place, with the same parameters."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                new = Linear(1, 1, bias=False, device="meta")
                new.in_features, new.out_features = layer.in_features, layer.out_features
                new.weight, new.bias = layer.weight, layer.bias
                setattr(parent, name, new)


class RoleModel(nn.Module):
    """A Hugging Face model with one of megarl's heads: returns the head's output for this rank's
    tokens of a packed micro-batch. Collective.

    It is changed in place: sharded over tensor-parallel ranks, with LoRA adapters, and with
    `.score` or no head in place of its output head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: ProcessMesh,
        training: TrainingConfig,
        head: HeadName = "logprobs",
    ) -> None:
        super().__init__()
        self.model, self.mesh = model, mesh
        self.head: HeadName = head
        self.windows = layer_windows(model.config)
        """Each layer's sliding window in tokens, or None."""
        self.sequence = training.sequence
        self.attention: PackedBackend = training.attention
        if training.tensor_backend == "autotp":
            self.shards = shard_with_autotp(model, mesh)
        else:
            self.shards = shard_model(model, mesh.tensor)
        self.routers = Routers(load=ExpertLoad(training.experts))
        self.shards |= shard_experts(model, mesh, self.routers, training.grouped)
        """Of the parameters of `model` of which this rank holds a part."""
        self.fused = fused_tensors(model)
        """The published tensors of which parameters of `model` are made."""
        self._inner = RingExchange(mesh.ulysses)
        self._outer = RingExchange(mesh.ring, mesh.ring_back)
        if head == "logprobs":
            self._use_logprob_head(training)
        elif head == "states":
            drop_output_head(model)
        elif not hasattr(model, "score"):  # under AutoTP it has been loaded with its model
            use_score_head(model)
        remaining = dict(model.named_parameters())
        self.shards = {name: shard for name, shard in self.shards.items() if name in remaining}
        use_linear(model)
        if training.norms == "torch":
            use_torch_norms(model)
        if training.elementwise == "triton":
            from megarl.trainer.elementwise import use_triton_elementwise  # needs triton

            use_triton_elementwise(model)
        self.adapters: Adapters | None = None
        if training.lora.is_on:
            self.adapters = add_adapters(model, self.shards, mesh.tensor, training.lora)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{published name: shape before any split} of the weights and of buffers that
        checkpoints have, without LoRA adapters.
        """
        whole = published(whole_shapes(self.model, self.shards), self.fused)
        whole |= {name: tuple(value.shape) for name, value in kept_buffers(self.model).items()}
        return {name: shape for name, shape in whole.items() if not is_adapter(name)}

    def share_trained(self) -> str:
        """What LoRA trains, such as "1,024 parameters beside 65,536 frozen ones (1.6%)"; "" without
        it.
        """
        if self.adapters is None:
            return ""
        whole = whole_shapes(self.model, self.shards)
        count = {name: math.prod(shape) for name, shape in whole.items()}
        needed = {name for name, p in self.model.named_parameters() if p.requires_grad}
        trained, frozen = (sum(count[n] for n in count if (n in needed) == yes) for yes in (1, 0))
        return f"{trained:,} parameters beside {frozen:,} frozen ones ({trained / frozen:.1%})"

    def _use_logprob_head(self, training: TrainingConfig) -> None:
        old: Any = self.model.get_output_embeddings()
        head = LogProbHead(1, 1, bias=False, device="meta")
        head.in_features, head.out_features = old.in_features, old.out_features
        head.weight = old.weight
        head.backend = training.logprobs
        head.transform = logit_transform(self.model.config)
        vocab, axis = head_shard(self.model, self.shards), self.mesh.tensor
        if vocab is not None:
            head.shard = VocabularyShard(
                first=vocab.edges[axis.rank],
                rows=max(vocab.lengths),
                reduce_max=partial(all_reduce_max, axis=axis),
                reduce_sum=partial(all_reduce, axis=axis),
                rank=axis.rank,
                size=axis.size,
            )
        self.model.set_output_embeddings(head)

    def forward(
        self, batch: MicroBatch, temperature: float = 1.0, soft_targets: SoftTargets | None = None
    ) -> Any:
        """Run the model on this rank's tokens, M of them with `batch.mask` True; K samples end
        here. Collective over ranks that share the packed sequence. Returns, by head:

        * `logprobs`: see `LogProbHead.forward`
        * `value`: values [M], float32
        * `scalar`: (scores [K] float32, ids of their samples [K] int64)
        * `states`: last hidden states [M, H], in the model's dtype
        """
        self.routers.replay(batch.experts)
        hidden = self.model.base_model(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            attend=self._attend(batch),
        ).last_hidden_state[0]
        score: Any = getattr(self.model, "score", None)
        if self.head == "scalar":
            last = self._last_tokens(batch)
            return score(hidden[last]), batch.sample_ids[last]
        chosen = batch.mask.nonzero()[:, 0]
        if self.head == "value":
            return score(hidden[chosen])
        if self.head == "states":
            return hidden[chosen]
        output: Any = self.model.get_output_embeddings()
        return output(hidden[chosen], batch.targets[chosen], temperature, soft_targets)

    def _last_tokens(self, batch: MicroBatch) -> torch.Tensor:
        """[K] indices, among this rank's tokens, of each sample's last token, without padding."""
        positions = torch.arange(len(batch.token_ids))
        if batch.indices:
            positions = batch.indices[self.mesh.sequence.rank]
        ends = torch.isin(positions.to(batch.ends.device), batch.ends)
        return (ends & (batch.sample_ids >= 0)).nonzero()[:, 0]

    def _attend(self, batch: MicroBatch) -> Attend:
        """The attention function for this micro-batch: of documents on this rank alone, or for all
        else that `sequence_attention` can do, and all that a block of the user's computes.
        """
        device, transport = batch.token_ids.device, self.sequence.transport
        if transport == "auto":
            transport = "ring" if device.type == "cuda" else "ring_lean"
        block = self.sequence.block
        make = None if block == "auto" else block
        if is_own(block):
            make = function_of(block, {}, "training.sequence.block")
        indices = batch.indices or (torch.arange(len(batch.token_ids)),)

        @cache
        def plan() -> AttentionPlan:
            return AttentionPlan.of(
                *(indices, batch.starts, device),
                parents=batch.parents,
                begins=batch.begins,
                ulysses=self._inner.size,
                block=make,
            )

        documents = None
        if not batch.indices and not batch.parents and not is_own(block):
            documents = Documents.of(batch.starts)

        def attend(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            scale: float,
            window: int | None = None,
            cap: float | None = None,
            sinks: torch.Tensor | None = None,
        ) -> torch.Tensor:
            is_plain = cap is None and sinks is None
            if documents is not None and is_plain and (window or math.inf) >= documents.longest:
                return packed_attention(q, k, v, documents, scale, self.attention)
            layer = plan().within(window)
            return sequence_attention(
                *(q, k, v, layer, self._inner, self._outer, scale, transport), cap=cap, sinks=sinks
            )

        return attend
