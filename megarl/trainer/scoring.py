"""A frozen role scores the policy's batch, wherever the role is: on the policy's ranks and layout,
on the same ranks under another layout, or on ranks of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from megarl.trainer.role import Column
from megarl.trainer.transfer import BatchTransfer, RoleBatch
from megarl.types import MicroBatch, StepBatch


class Scorer:
    """Computes one column of each batch with a role other than the policy. All ranks of the job
    create and call it together.
    """

    def __init__(
        self,
        transfer: BatchTransfer,
        *,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`transfer`: moves batches to the role and columns back; `transfer.role` is the role.
        `within`: makes a context manager in which the role scores, such as one in which the policy
        computes without adapters.
        """
        self.transfer, self._within = transfer, within
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
            with self._within():
                self.column = role.score(self.here.batch, self.here.packed, temperature=temperature)
        return self.transfer.to_policy(self.column)
