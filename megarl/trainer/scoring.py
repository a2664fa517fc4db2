"""A frozen role scores the policy's batch, wherever the role is: on the policy's ranks and layout,
on the same ranks under another layout, or on ranks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from megarl.trainer.role import Column
from megarl.trainer.transfer import BatchTransfer, RoleBatch
from megarl.types import MicroBatch, StepBatch


class Scorer:
    """Computes one column of each batch with a role other than the policy. All ranks of the job
    create and call it together.
    """

    def __init__(self, transfer: BatchTransfer, *, without_adapters: bool = False) -> None:
        """`transfer`: moves batches to the role and columns back; `transfer.role` is the role.
        `without_adapters`: the role is the policy, and scores as the model that its adapters
        started from.
        """
        self.transfer, self.without_adapters = transfer, without_adapters
        self.here: RoleBatch | None = None
        """The batch that was scored last, on the role's ranks; None on others."""
        self.column: Column = []
        """Its scores, on the role's ranks; empty on others."""

    def score(
        self,
        batch: StepBatch | None,
        packed: Sequence[Sequence[MicroBatch]],
        *,
        temperature: float,
    ) -> Column:
        """Compute the column of `batch`. It is returned on the policy's ranks; other ranks pass
        None as `batch` and get an empty column.
        """
        self.here, self.column = None, []
        if self.transfer.is_shared and batch is None:
            return []  # this rank has no part of the policy, and so none of the role
        self.here = self.transfer.send(batch, packed)
        role = self.transfer.role
        if role is not None and self.here is not None:
            with role.adapters_off() if self.without_adapters else nullcontext():
                self.column = role.score(self.here.batch, self.here.packed, temperature=temperature)
        return self.transfer.to_policy(self.column)
