"""The teacher of distillation: a frozen model whose next-token distributions the policy learns.

The teacher computes hidden states only, and each rank of the policy has the rows of the teacher's
head for its own shard of the vocabulary; `megarl.kernels.divergence` makes logits of both, chunk by
chunk. On the policy's ranks and layout a micro-batch's states are computed when it is trained on;
elsewhere the whole step's are computed first and sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.kernels.divergence import Divergence
from megarl.settings.training import ModelConfig
from megarl.trainer.build import DTYPES
from megarl.trainer.heads import SoftTargets
from megarl.trainer.loading import output_rows
from megarl.trainer.model_config import load_model_config
from megarl.trainer.role import Column, Role
from megarl.trainer.sharding import head_shard
from megarl.trainer.transfer import BatchTransfer
from megarl.types import MicroBatch, StepBatch


class Teacher:
    """The frozen teacher: in each step `read`, then `soft_targets` for each micro-batch, then
    `forget`. Collective over all ranks of the job.
    """

    def __init__(
        self,
        transfer: BatchTransfer,
        model: ModelConfig,
        policy: Role | None,
        divergence: Divergence,
        *,
        precision: str,
    ) -> None:
        """`transfer.role` is the teacher, with the head `states`. `policy`: the student, on its
        ranks. `precision`: dtype of both.
        """
        self.transfer, self.divergence = transfer, divergence
        self.width = load_model_config(model).get_text_config().hidden_size
        self.dtype = DTYPES[precision]
        self.weight: torch.Tensor | None = None
        """[V, G] rows of the teacher's output head, on ranks of the policy."""
        if policy is not None:
            rows = vocabulary_rows(policy)
            self.weight = output_rows(model, rows, dtype=self.dtype, device=policy.device)
        self._column: Column = []

    def read(self, batch: StepBatch | None, packed: Sequence[Sequence[MicroBatch]]) -> None:
        """Compute a step's hidden states, if the teacher has ranks of its own. Ranks outside the
        policy pass None and [].
        """
        self._column = []
        if self.transfer.is_shared:
            return
        sent, role = self.transfer.send(batch, packed), self.transfer.role
        column = [] if role is None or sent is None else role.score(sent.batch, sent.packed)
        self._column = self.transfer.to_policy(column, width=(self.width,), dtype=self.dtype)

    def soft_targets(self, number: int, micro: MicroBatch) -> SoftTargets:
        """The distributions at the trained tokens of `micro`, of mini-batch `number`. Collective
        over the policy's ranks that share the packed sequence.
        """
        assert self.weight is not None, "this rank has no part of the policy"
        if self.transfer.is_shared:
            assert self.transfer.role is not None
            states = self.transfer.role.engine(micro, 1.0)
        else:
            states = self._column[number][micro.places[micro.mask]]
        return SoftTargets(states, self.weight, self.divergence)

    def forget(self) -> None:
        """Free the step's hidden states."""
        self._column = []


def vocabulary_rows(policy: Role) -> slice:
    """The token ids whose rows of the policy's output head this tensor-parallel rank has."""
    network = policy.engine.module
    shard = head_shard(network.model, network.shards)
    if shard is None:
        return slice(0, network.model.config.get_text_config().vocab_size)
    rank = policy.mesh.tensor.rank
    return slice(shard.edges[rank], shard.edges[rank + 1])
