"""A Hugging Face causal language model on a mesh: packed sequences in, log-probs out.

MicroBatch (this rank's T tokens of a packed sequence)
    ->  log-prob and entropy of each target with mask True, [M] each
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from megarl.kernels.linear import linear
from megarl.kernels.logprobs import VocabularyShard
from megarl.kernels.packed_attention import Documents, packed_attention
from megarl.kernels.sequence_attention import AttentionPlan, sequence_attention
from megarl.parallel.collectives import all_reduce, all_reduce_max
from megarl.parallel.exchange import RingExchange
from megarl.parallel.mesh import ProcessMesh
from megarl.trainer.attention import Attend
from megarl.trainer.autotp import shard_with_autotp
from megarl.trainer.config import TrainingConfig
from megarl.trainer.heads import LogProbHead
from megarl.trainer.sharding import head_shard, shard_model
from megarl.types import MicroBatch


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

    The model is usually on the meta device, without weights (`megarl.trainer.build` then loads this
    rank's part); AutoTP needs one that is loaded.
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
