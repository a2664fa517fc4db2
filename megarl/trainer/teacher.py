"""The teacher of distillation: a frozen model whose next-token distributions the policy learns.

A distribution over the whole vocabulary is the product of a hidden state and the output head. So
the teacher computes hidden states only, on whatever ranks it is, and each rank of the policy has
the rows of the teacher's output head that belong to its own shard of the vocabulary. Logits are
made of both, chunk by chunk, in `megarl.kernels.divergence`.

On the policy's ranks and layout the states of a micro-batch are computed when it is trained on, and
nothing is kept. Elsewhere the states of the whole step are computed first and sent to the policy's
ranks, rank to rank: [T, G] numbers of the model's dtype for the T tokens of a data rank's samples.
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
    """The frozen teacher of distillation: gives the policy's ranks the teacher's next-token
    distributions. For each step, `read` gets the samples, `soft_targets` is called for each
    micro-batch that is trained on, and `forget` frees the memory. All ranks of the job create a
    `Teacher` and call `read` together.
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
        """`transfer` moves samples to the teacher's ranks and hidden states back; `transfer.role`
        is the teacher, a frozen model with the head `states`. `model`: path of its weights.
        `policy`: the student, None on ranks outside the policy. `divergence`: the loss between
        both. `precision`: dtype of both models by name, such as "bfloat16".
        """
        self.transfer, self.divergence = transfer, divergence
        self.width = load_model_config(model).get_text_config().hidden_size
        self.dtype = DTYPES[precision]
        self.weight: torch.Tensor | None = None
        """[V, G] the teacher's output head: rows of the vocabulary's shard on this rank of the
        policy. None on other ranks."""
        if policy is not None:
            rows = vocabulary_rows(policy)
            self.weight = output_rows(model, rows, dtype=self.dtype, device=policy.device)
        self._column: Column = []

    def read(self, batch: StepBatch | None, packed: Sequence[Sequence[MicroBatch]]) -> None:
        """Compute the teacher's hidden states of a step's samples, if the teacher has ranks of its
        own; otherwise `soft_targets` computes them later. `packed`: for each mini-batch, this
        rank's packed sequences. All ranks of the job call it together; ranks outside the policy
        pass None and [].
        """
        self._column = []
        if self.transfer.is_shared:
            return
        here, role = self.transfer.send(batch, packed), self.transfer.role
        column = [] if role is None or here is None else role.score(here.batch, here.packed)
        self._column = self.transfer.to_policy(column, width=(self.width,), dtype=self.dtype)

    def soft_targets(self, number: int, micro: MicroBatch) -> SoftTargets:
        """The teacher's next-token distributions at the M trained tokens of `micro`, a packed
        sequence of mini-batch `number` of the step that was read last. They are stored as two
        factors of the logits: the teacher's hidden states [M, G], G wide, and output head [V, G],
        with V the token ids on this tensor-parallel rank of the policy. Only ranks of the policy
        call it, those that share the packed sequence together.
        """
        assert self.weight is not None, "this rank has no part of the policy"
        if self.transfer.is_shared:
            assert self.transfer.role is not None
            states = self.transfer.role.engine(micro, 1.0)
        else:
            states = self._column[number][micro.places[micro.mask]]
        return SoftTargets(states, self.weight, self.divergence)

    def forget(self) -> None:
        """Free the hidden states of the step that was read last."""
        self._column = []


def vocabulary_rows(policy: Role) -> slice:
    """The token ids, as a slice, whose rows of the policy's output head are on this tensor-parallel
    rank; all of them without tensor parallelism.
    """
    network = policy.engine.module
    shard = head_shard(network.model, network.shards)
    if shard is None:
        return slice(0, network.model.config.get_text_config().vocab_size)
    rank = policy.mesh.tensor.rank
    return slice(shard.edges[rank], shard.edges[rank + 1])
