"""A frozen role scores the policy's batch, wherever the role is: on the policy's ranks and layout,
on the same ranks under another layout, or on ranks of its own.

    policy's ranks: samples  --rank to rank-->  role's ranks: score  --rank to rank-->  column
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megarl.parallel import balance
from megarl.parallel.collectives import gather_objects
from megarl.parallel.mesh import Axis, ProcessMesh
from megarl.parallel.redistribute import Redistribution
from megarl.trainer.role import Column, Role
from megarl.types import MicroBatch, Samples, StepBatch


class Scorer:
    """Computes one column of each batch with a role other than the policy. All ranks of the job
    create and call it together.
    """

    def __init__(
        self,
        role: Role | None,
        *,
        policy: ProcessMesh,
        mesh: ProcessMesh,
        everyone: Axis,
        device: torch.device,
        micro_batch_tokens: int,
    ) -> None:
        """`role`: the model, on the ranks of `mesh`; None on other ranks. `policy`: mesh of the
        policy's ranks, which hold the batches. `everyone`: all ranks of the job.
        `micro_batch_tokens`: maximum number of tokens of a packed sequence for each rank.
        """
        self.role, self.policy, self.mesh, self.everyone = role, policy, mesh, everyone
        self.device, self.micro_batch_tokens = device, micro_batch_tokens

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
        if self.mesh is self.policy:
            assert self.role is not None and batch is not None
            return self.role.score(batch, packed, temperature=temperature)
        parts = batch.samples if batch is not None else []
        mine = Samples.concatenate(parts)
        ids, lengths, holders = self._describe(mine)
        if not len(ids):
            return [torch.zeros(0, device=self.device) for _ in parts]
        number_of = {int(sample_id): number for number, sample_id in enumerate(ids)}
        dealt = self._deal(lengths)
        forth = Redistribution(lengths, holders, dealt, self.everyone)
        offsets = mine.offsets
        own = {number_of[int(name)]: n for n, name in enumerate(mine.ids)}

        def column_of(values: np.ndarray) -> dict[int, torch.Tensor]:
            return {
                number: torch.from_numpy(values[offsets[n] : offsets[n + 1]])
                for number, n in own.items()
            }

        tokens = forth.move(column_of(mine.token_ids), torch.int32, self.device)
        masks = forth.move(column_of(mine.mask.astype(np.int8)), torch.int8, self.device)
        scored = self._score(tokens, masks, temperature)
        back = Redistribution(lengths, dealt, holders, self.everyone)
        found = back.move(scored, torch.float32, self.device)
        empty = torch.zeros(0, device=self.device)
        return [
            torch.cat([empty, *(found[number_of[int(name)]] for name in samples.ids)])
            for samples in parts
        ]

    def _describe(self, mine: Samples) -> tuple[np.ndarray, list[int], list[list[int]]]:
        """(ids of the step's samples, length of each, ranks that hold each), the same on every
        rank.
        """
        told = gather_objects((mine.ids, mine.lengths), self.everyone)
        ids = np.unique(np.concatenate([these for these, _ in told]))
        length_of: dict[int, int] = {}
        ranks_of: dict[int, list[int]] = {int(name): [] for name in ids}
        for rank, (these, lengths) in enumerate(told):
            for name, length in zip(these.tolist(), lengths.tolist(), strict=True):
                length_of[name] = length
                ranks_of[name].append(rank)
        names = ids.tolist()
        return ids, [length_of[name] for name in names], [ranks_of[name] for name in names]

    def _deal(self, lengths: Sequence[int]) -> list[list[int]]:
        """For each sample, the ranks that score it: all ranks of the role with the same
        data-parallel index.
        """
        layout = self.mesh.layout
        wanting: list[list[int]] = [[] for _ in lengths]
        for data, samples in enumerate(balance.split(lengths, layout.data)):
            ranks = [
                rank
                for place, rank in enumerate(self.mesh.ranks)
                if layout.coordinates(place)["data"] == data
            ]
            for sample in samples:
                wanting[sample] = ranks
        return wanting

    def _score(
        self,
        tokens: dict[int, torch.Tensor],
        masks: dict[int, torch.Tensor],
        temperature: float,
    ) -> dict[int, torch.Tensor]:
        """{sample number: scores [length]} of the samples that were sent to this rank."""
        if self.role is None:
            return {}
        order = sorted(tokens)
        samples = Samples.concatenate(
            [
                Samples.one(
                    number, tokens[number].cpu().numpy(), mask=masks[number].cpu().numpy() > 0
                )
                for number in order
            ]
        )
        told = gather_objects(samples.lengths.tolist(), self.mesh.data)
        budget = self.micro_batch_tokens * self.mesh.sequence.size
        rows = balance.rows_in_step(told, budget)[self.mesh.data.rank]
        batch = StepBatch(
            step=0,
            samples=[samples],
            micro_batches=[rows],
            rewards=np.zeros(0),
            groups=np.zeros(0, np.int64),
            response_tokens=np.zeros(0, np.int64),
            mini_batch_of=np.zeros(0, np.int64),
            metrics={},
        )
        packed = self.role.pack_step(batch)
        (column,) = self.role.score(batch, packed, temperature=temperature)
        return dict(zip(order, column.split(samples.lengths.tolist()), strict=True))
