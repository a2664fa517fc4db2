"""Moves a step's samples and columns between the policy's ranks and those of another model of the
run, which scores them (`Scorer`).

    policy's ranks: StepBatch  --send-->     other model's ranks: RoleBatch
                    column     --to_role-->                       column
                    column    <--to_policy--                      column

Where the other model shares the policy's mesh, nothing moves. Otherwise data go from rank to rank;
rank 0 is no hub.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from megarl.parallel.collectives import broadcast_object, gather_objects
from megarl.parallel.mesh import Axis, ProcessMesh
from megarl.parallel.prefix_balance import FamilyBalance
from megarl.parallel.prefix_tree import Size, chains
from megarl.parallel.redistribute import Redistribution
from megarl.settings.training import SharePrefix
from megarl.system.spans import activity
from megarl.trainer.prefixes import computed_lengths, leading_tokens, must_save, sizes_of
from megarl.trainer.role import Column, Role
from megarl.types import MicroBatch, Samples, StepBatch


@dataclass(frozen=True)
class RoleBatch:
    """A step's samples on one rank of a model beside the policy."""

    batch: StepBatch
    packed: Sequence[Sequence[MicroBatch]]
    """For each mini-batch, this rank's packed sequences."""


class _Fact(NamedTuple):
    """What a rank of the policy reports of a sample."""

    name: int
    """The sample's id."""
    length: int
    tokens: int
    """Tokens that the policy generated."""
    prompt: int
    """As `Samples.prompts`."""
    computed: int
    """Tokens that are computed for the sample alone."""
    branches: tuple[tuple[int, int], ...]
    """As `Samples.branches`, counted from the sample's first token."""
    mini_batch: int
    """Index of the mini-batch."""


@dataclass(frozen=True)
class _Plan:
    """How the samples of a step, numbered in the order of their ids, are moved."""

    facts: list[_Fact]
    """[N] samples."""
    forth: Redistribution
    """From the policy's ranks to the other model's."""
    back: Redistribution
    order: list[list[int]]
    """For each mini-batch, the numbers of this rank's samples in the policy."""

    def split(
        self, order: Sequence[Sequence[int]], columns: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """{number of a sample: [T, ...] its part of `columns`}, which are empty on ranks without
        samples. `order`: for each mini-batch, its samples' numbers.
        """
        values_of: dict[int, torch.Tensor] = {}
        for numbers, values in zip(order, columns, strict=True) if columns else ():
            parts = values.split([self.facts[n].length for n in numbers])
            values_of |= dict(zip(numbers, parts, strict=True))
        return values_of


class BatchTransfer:
    """Moves each step's samples from the policy's ranks to another model's (`send`), and per-token
    results between both. Collective over all ranks of the job: those without the model that sends
    pass None or [], those without the one that receives get these.
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
        share_prefix: SharePrefix = "off",
    ) -> None:
        """`role`: the other model, on the ranks of `mesh`. `everyone`: all ranks of the job.
        `micro_batch_tokens`: of a packed sequence, per rank.
        """
        self.role, self.policy, self.mesh, self.everyone = role, policy, mesh, everyone
        self.device, self.micro_batch_tokens = device, micro_batch_tokens
        self.share_prefix: SharePrefix = share_prefix
        self.windows: list[int | None] = []
        """Each layer's sliding window, or None, on every rank, since all plan alike. Empty where
        nothing is moved."""
        if not self.is_shared:
            windows = gather_objects(role.windows if role is not None else [], everyone)
            self.windows = max(windows, key=len)
        self._plan: _Plan | None = None
        self._here: list[list[int]] = []
        """For each mini-batch, the numbers of this rank's samples in the other model."""

    @property
    def is_shared(self) -> bool:
        """Whether the other model has the policy's ranks and layout, so that nothing is moved."""
        return self.mesh is self.policy

    def send(
        self, batch: StepBatch | None, packed: Sequence[Sequence[MicroBatch]]
    ) -> RoleBatch | None:
        """Send a step's samples, and this rank's packed sequences for each mini-batch, to the other
        model's ranks.
        """
        if self.is_shared:
            assert batch is not None
            # Experts are the policy's.
            micros = [[replace(micro, experts=None) for micro in rows] for rows in packed]
            return RoleBatch(batch, micros)
        parts = batch.samples if batch is not None else []
        plan = self._plan = self._describe(parts)
        tokens = [torch.from_numpy(samples.token_ids) for samples in parts]
        masks = [torch.from_numpy(samples.mask.astype(np.int8)) for samples in parts]
        token_of = plan.forth.move(plan.split(plan.order, tokens), torch.int32, self.device)
        mask_of = plan.forth.move(plan.split(plan.order, masks), torch.int8, self.device)
        if self.role is None:
            return None
        part_of = [fact.mini_batch for fact in plan.facts]
        count = max(part_of, default=-1) + 1
        self._here = [[n for n in sorted(token_of) if part_of[n] == p] for p in range(count)]

        def sample(n: int) -> Samples:
            fact, mask = plan.facts[n], mask_of[n].cpu().numpy() > 0
            return Samples.one(
                *(fact.name, token_of[n].cpu().numpy()),
                mask=mask,
                prompt=fact.prompt,
                branches=fact.branches,
            )

        samples = [Samples.concatenate([sample(n) for n in numbers]) for numbers in self._here]
        data, share = self.mesh.data, self.share_prefix
        rows = []
        for mini_batch in samples:
            shares = gather_objects(sizes_of(mini_batch, share), data)
            sizes = [size for sizes in shares for size in sizes]
            even = FamilyBalance(sizes, must_save(share), windows=self.windows)
            edges = np.cumsum([0, *(len(sizes) for sizes in shares)]).tolist()
            dealt = [list(range(a, b)) for a, b in itertools.pairwise(edges)]
            rows.append(even.rows_in_step(dealt, self._budget)[data.rank])
        role_batch = StepBatch(
            step=0,
            samples=samples,
            micro_batches=rows,
            rewards=np.zeros(len(part_of)),
            groups=np.zeros(len(part_of), np.int64),
            response_tokens=np.array([fact.tokens for fact in plan.facts], np.int64),
            mini_batch_of=np.array(part_of, np.int64),
            metrics={},
        )
        return RoleBatch(role_batch, self.role.pack_step(role_batch))

    def to_role(self, column: Column) -> Column:
        """Send a column over the last sent samples from the policy's ranks to the other model's,
        over those that `send` gave them.
        """
        if self.is_shared:
            return column
        plan = self._plan
        assert plan is not None, "no batch was sent"
        values_of = plan.forth.move(plan.split(plan.order, column), torch.float32, self.device)
        if self.role is None:
            return []
        nothing = torch.zeros(0, device=self.device)
        return [torch.cat([nothing, *(values_of[n] for n in numbers)]) for numbers in self._here]

    def to_policy(
        self, column: Column, *, width: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Column:
        """Bring a column of tensors [T, *width] of `dtype` back, in the order of the policy's
        samples.
        """
        if self.is_shared:
            return column
        plan = self._plan
        assert plan is not None, "no batch was sent"
        parts, deadline_s = plan.split(self._here, column), self.everyone.timeout_s
        with activity("scores", kind="wait", of=self.mesh.ranks, deadline_s=deadline_s):
            values_of = plan.back.move(parts, dtype, self.device, width)
        nothing = torch.zeros(0, *width, dtype=dtype, device=self.device)
        return [torch.cat([nothing, *(values_of[n] for n in numbers)]) for numbers in plan.order]

    @property
    def _budget(self) -> int:
        """Tokens of a packed sequence over the role's sequence-parallel ranks, the same on every
        rank: `mesh.sequence` is empty on others than the role's.
        """
        return self.micro_batch_tokens * self.mesh.layout.sequence

    def _describe(self, parts: Sequence[Samples]) -> _Plan:
        """The plan of a step's transfers, on every rank the same but for `order`."""
        facts_here: list[_Fact] = []
        for index, samples in enumerate(parts):
            columns = (samples.ids, samples.lengths, _chosen(samples), samples.prompts)
            columns = (*columns, computed_lengths(samples))
            rows = zip(*(column.tolist() for column in columns), strict=True)
            for n, (name, length, tokens, prompt, computed) in enumerate(rows):
                branches = tuple((first, last) for first, last in samples.branches_of(n).tolist())
                facts_here.append(_Fact(name, length, tokens, prompt, computed, branches, index))
        beginnings = self._beginnings(parts)
        reports = gather_objects((facts_here, bool(beginnings)), self.everyone)
        facts: dict[int, _Fact] = {}
        holders: dict[int, list[int]] = {}
        leading: dict[int, np.ndarray] = {}
        for rank, (samples, has_beginnings) in enumerate(reports):
            for fact in samples:
                facts[fact.name] = fact
                holders.setdefault(fact.name, []).append(rank)
            if has_beginnings:
                # One rank after the other: a gather needs the memory of the longest for each rank.
                for tokens, names in broadcast_object(beginnings, self.everyone, rank):
                    leading |= dict.fromkeys(names, tokens)
        chain_of = dict(zip(leading, chains(list(leading.values())), strict=True))
        ordered = [facts[name] for name in sorted(facts)]
        sizes = [Size(fact.computed, chain_of.get(fact.name, ())) for fact in ordered]
        having = [holders[fact.name] for fact in ordered]
        wanting = self._deal(sizes, np.array([fact.mini_batch for fact in ordered], np.int64))
        lengths = [fact.length for fact in ordered]
        number_of = {fact.name: number for number, fact in enumerate(ordered)}
        return _Plan(
            ordered,
            Redistribution(lengths, having, wanting, self.everyone),
            Redistribution(lengths, wanting, having, self.everyone),
            [[number_of[name] for name in samples.ids.tolist()] for samples in parts],
        )

    def _beginnings(self, parts: Sequence[Samples]) -> list[tuple[np.ndarray, list[int]]]:
        """The token ids that this rank's samples may share with others, each once, with the
        samples' ids. One of the ranks with the same samples reports them.
        """
        is_copy = self.policy.sequence.rank or self.policy.tensor.rank
        if not parts or self.share_prefix == "off" or is_copy:
            return []
        names_of: dict[bytes, tuple[np.ndarray, list[int]]] = {}
        for samples in parts:
            for name, tokens in zip(samples.ids.tolist(), leading_tokens(samples), strict=True):
                names_of.setdefault(tokens.tobytes(), (tokens, []))[1].append(name)
        return list(names_of.values())

    def _deal(self, sizes: Sequence[Size], parts: np.ndarray) -> list[list[int]]:
        """For each sample, the ranks of the role that get it: all with one data-parallel index,
        evenly.
        """
        layout = self.mesh.layout
        ranks = [
            [
                rank
                for index, rank in enumerate(self.mesh.ranks)
                if layout.coordinates(index)["data"] == data
            ]
            for data in range(layout.data)
        ]
        workers: list[list[int]] = [[] for _ in sizes]
        for mini_batch in np.unique(parts).tolist():
            numbers = np.flatnonzero(parts == mini_batch).tolist()
            even = FamilyBalance(
                [sizes[n] for n in numbers], must_save(self.share_prefix), windows=self.windows
            )
            for data, chosen in enumerate(even.split(layout.data, self._budget)):
                for index in chosen:
                    workers[numbers[index]] = ranks[data]
        return workers


def _chosen(samples: Samples) -> np.ndarray:
    """[S] tokens of each sample that the policy generated."""
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(samples.mask)])
    return np.diff(sums[samples.offsets])


class Scorer:
    """Computes a number for each token of a step's samples with a model other than the policy.
    Collective over all ranks of the job.
    """

    def __init__(
        self,
        transfer: BatchTransfer,
        *,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`within`: makes a context in which the model scores, as one without LoRA adapters."""
        self.transfer, self._within = transfer, within
        self.here: RoleBatch | None = None
        """The batch that was scored last, on the role's ranks."""
        self.column: Column = []
        """Its scores, on the role's ranks."""

    def score(
        self, batch: StepBatch | None, packed: Sequence[Sequence[MicroBatch]], *, temperature: float
    ) -> Column:
        """A column over `batch`. `packed`: for each mini-batch, this rank's packed sequences.
        `temperature`: divisor of the logits, for log-probs. Ranks outside the policy pass None and
        [] and get [].
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
