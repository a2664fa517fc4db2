"""A step's samples and columns, moved between the policy's ranks and those of another model of the
run, such as the critic, which scores them (`Scorer`). A column is one float32 for each token of a
rank's samples, for each mini-batch.

    policy's ranks: StepBatch  --send-->     other model's ranks: RoleBatch
                    column     --to_role-->                       column
                    column    <--to_policy--                      column

Where the other model shares the policy's mesh, nothing moves. Otherwise data go rank to rank; rank
0 is no hub.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
    """The samples of a step on one rank of a model beside the policy, which is to score them or
    train on them: `batch`, in the same mini-batches as the policy's, and `packed`, the same samples
    as packed sequences, the input of that model.
    """

    batch: StepBatch
    packed: Sequence[Sequence[MicroBatch]]
    """For each mini-batch of `batch`, this rank's packed sequences (micro-batches)."""


class _Fact(NamedTuple):
    """What a rank of the policy tells of a sample."""

    name: int
    """The sample's id."""
    length: int
    """Number of tokens."""
    tokens: int
    """Number of tokens that the policy generated."""
    prompt: int
    """Number of tokens of the prompt, or -1; see `Samples.prompts`."""
    computed: int
    """Number of tokens that are computed for the sample alone."""
    branches: tuple[tuple[int, int], ...]
    """Where the sample branches, as `Samples.branches`, counted from its first token."""
    part: int
    """Index of the mini-batch."""


@dataclass(frozen=True)
class _Plan:
    """How the samples of a step are moved. Samples are numbered 0 .. N - 1, in the order of their
    ids.
    """

    facts: list[_Fact]
    """[N] what is told of each sample, in the order of their ids."""
    forth: Redistribution
    """From the ranks of the policy that have a sample to those of the role that get it."""
    back: Redistribution
    order: list[list[int]]
    """For each mini-batch, the numbers of this rank's samples as a rank of the policy, in the order
    of its columns."""

    def split(
        self, order: Sequence[Sequence[int]], columns: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Cut columns into the parts of single samples: {number of the sample in this plan: [T] or
        [T, ...] values of its tokens}. `order`: for each mini-batch, the numbers of its samples.
        `columns`: for each mini-batch, the values of these samples one after the other; an empty
        list on ranks without samples.
        """
        found: dict[int, torch.Tensor] = {}
        for numbers, values in zip(order, columns, strict=True) if columns else ():
            parts = values.split([self.facts[n].length for n in numbers])
            found |= dict(zip(numbers, parts, strict=True))
        return found


class BatchTransfer:
    """Moves each step's samples from the policy's ranks to those of another model of the run
    (`send`), and per-token results between both (`to_role`, `to_policy`). All ranks of the job
    create it and call its methods together, also ranks that have neither model. If the other model
    is on the policy's ranks in the same layout, nothing is moved.
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
        """`role`: the other model, on the ranks of `mesh`; None on other ranks. `policy`: mesh of
        the policy's ranks, which hold the samples. `everyone`: all ranks of the job.
        `micro_batch_tokens`: maximum number of tokens of a packed sequence for each rank.
        `share_prefix`: whether the other model computes common prefixes of samples once.
        """
        self.role, self.policy, self.mesh, self.everyone = role, policy, mesh, everyone
        self.device, self.micro_batch_tokens = device, micro_batch_tokens
        self.share_prefix: SharePrefix = share_prefix
        self.windows: list[int | None] = []
        """The sliding window of each layer of the role's model, or None, on every rank of the job:
        all plan alike. Empty where nothing is moved."""
        if not self.is_shared:
            told = gather_objects(role.windows if role is not None else [], everyone)
            self.windows = max(told, key=len)
        self._plan: _Plan | None = None
        self._here: list[list[int]] = []
        """For each mini-batch, the numbers of this rank's samples as a rank of the role."""

    @property
    def is_shared(self) -> bool:
        """Whether the other model uses the policy's ranks and layout, so that nothing has to be
        moved.
        """
        return self.mesh is self.policy

    def send(
        self, batch: StepBatch | None, packed: Sequence[Sequence[MicroBatch]]
    ) -> RoleBatch | None:
        """Send a step's samples to the other model's ranks. Returns there a `RoleBatch`: the
        samples of this rank, and their packed sequences for `Role.score`. `packed`: for each
        mini-batch of `batch`, this rank's packed sequences. Ranks outside the policy pass None and
        []; ranks outside the other model get None. All ranks of the job call it together.
        """
        if self.is_shared:
            assert batch is not None
            return RoleBatch(batch, packed)
        parts = batch.samples if batch is not None else []
        plan = self._plan = self._describe(parts)
        tokens = [torch.from_numpy(samples.token_ids) for samples in parts]
        masks = [torch.from_numpy(samples.mask.astype(np.int8)) for samples in parts]
        token_of = plan.forth.move(plan.split(plan.order, tokens), torch.int32, self.device)
        mask_of = plan.forth.move(plan.split(plan.order, masks), torch.int8, self.device)
        if self.role is None:
            return None
        part_of = [fact.part for fact in plan.facts]
        num_parts = max(part_of, default=-1) + 1
        self._here = [[n for n in sorted(token_of) if part_of[n] == p] for p in range(num_parts)]

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
        for one in samples:
            shares = gather_objects(sizes_of(one, share), data)
            sizes = [size for sizes in shares for size in sizes]
            even = FamilyBalance(sizes, must_save(share), windows=self.windows)
            edges = np.cumsum([0, *(len(sizes) for sizes in shares)]).tolist()
            dealt = [list(range(a, b)) for a, b in itertools.pairwise(edges)]
            rows.append(even.rows_in_step(dealt, self._budget)[data.rank])
        mine = StepBatch(
            step=0,
            samples=samples,
            micro_batches=rows,
            rewards=np.zeros(len(part_of)),
            groups=np.zeros(len(part_of), np.int64),
            response_tokens=np.array([fact.tokens for fact in plan.facts], np.int64),
            mini_batch_of=np.array(part_of, np.int64),
            metrics={},
        )
        return RoleBatch(mine, self.role.pack_step(mine))

    def to_role(self, column: Column) -> Column:
        """Send a column (for each mini-batch a float32 tensor [T] over the tokens of this rank's
        samples) of the step that was sent last, from the policy's ranks to the other model's. On
        ranks of the other model, returns the column over the samples that `send` gave the rank; on
        other ranks, an empty list. Ranks outside the policy pass an empty list. All ranks of the
        job call it together.
        """
        if self.is_shared:
            return column
        plan = self._plan
        assert plan is not None, "no batch was sent"
        found = plan.forth.move(plan.split(plan.order, column), torch.float32, self.device)
        if self.role is None:
            return []
        nothing = torch.zeros(0, device=self.device)
        return [torch.cat([nothing, *(found[n] for n in numbers)]) for numbers in self._here]

    def to_policy(
        self, column: Column, *, width: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Column:
        """Bring a column of the step that was sent last back to the policy's ranks. `column`: for
        each mini-batch a tensor [T, *width] of `dtype` over the tokens of the samples that `send`
        gave this rank. On ranks of the policy, returns a column of the same form over the samples
        that the rank passed to `send`; on other ranks, an empty list. Ranks outside the other model
        pass an empty list. All ranks of the job call it together.
        """
        if self.is_shared:
            return column
        plan = self._plan
        assert plan is not None, "no batch was sent"
        mine, deadline_s = plan.split(self._here, column), self.everyone.timeout_s
        with activity("scores", kind="wait", of=self.mesh.ranks, deadline_s=deadline_s):
            found = plan.back.move(mine, dtype, self.device, width)
        nothing = torch.zeros(0, *width, dtype=dtype, device=self.device)
        return [torch.cat([nothing, *(found[n] for n in numbers)]) for numbers in plan.order]

    @property
    def _budget(self) -> int:
        """Number of tokens of a packed sequence of the role, over its sequence-parallel ranks."""
        return self.micro_batch_tokens * self.mesh.sequence.size

    def _describe(self, parts: Sequence[Samples]) -> _Plan:
        """The plan of a step's transfers, from what every rank tells of its samples; all but
        `order` is the same on every rank.
        """
        mine: list[_Fact] = []
        for part, samples in enumerate(parts):
            columns = (samples.ids, samples.lengths, _chosen(samples), samples.prompts)
            columns = (*columns, computed_lengths(samples))
            rows = zip(*(column.tolist() for column in columns), strict=True)
            for n, (name, length, tokens, prompt, computed) in enumerate(rows):
                branches = tuple((first, last) for first, last in samples.branches_of(n).tolist())
                mine.append(_Fact(name, length, tokens, prompt, computed, branches, part))
        own = self._beginnings(parts)
        told = gather_objects((mine, bool(own)), self.everyone)
        facts: dict[int, _Fact] = {}
        holders: dict[int, list[int]] = {}
        leading: dict[int, np.ndarray] = {}
        for rank, (samples, has_beginnings) in enumerate(told):
            for one in samples:
                facts[one.name] = one
                holders.setdefault(one.name, []).append(rank)
            if has_beginnings:
                # One rank after the other: a gather needs the memory of the longest for each rank.
                for tokens, names in broadcast_object(own, self.everyone, rank):
                    leading |= dict.fromkeys(names, tokens)
        chain_of = dict(zip(leading, chains(list(leading.values())), strict=True))
        ordered = [facts[name] for name in sorted(facts)]
        sizes = [Size(fact.computed, chain_of.get(fact.name, ())) for fact in ordered]
        having = [holders[fact.name] for fact in ordered]
        wanting = self._deal(sizes, np.array([fact.part for fact in ordered], np.int64))
        lengths = [fact.length for fact in ordered]
        number_of = {fact.name: number for number, fact in enumerate(ordered)}
        return _Plan(
            ordered,
            Redistribution(lengths, having, wanting, self.everyone),
            Redistribution(lengths, wanting, having, self.everyone),
            [[number_of[name] for name in samples.ids.tolist()] for samples in parts],
        )

    def _beginnings(self, parts: Sequence[Samples]) -> list[tuple[np.ndarray, list[int]]]:
        """The token ids that samples of this rank may share with any others, those of other ranks
        too, each once, with the ids of these samples. Of the ranks with the same samples one tells.
        """
        is_copy = self.policy.sequence.rank or self.policy.tensor.rank
        if not parts or self.share_prefix == "off" or is_copy:
            return []
        found: dict[bytes, tuple[np.ndarray, list[int]]] = {}
        for samples in parts:
            for name, tokens in zip(samples.ids.tolist(), leading_tokens(samples), strict=True):
                found.setdefault(tokens.tobytes(), (tokens, []))[1].append(name)
        return list(found.values())

    def _deal(self, sizes: Sequence[Size], parts: np.ndarray) -> list[list[int]]:
        """For each sample, the ranks of the role that get it: all ranks with the same data-parallel
        index. Each mini-batch is dealt out evenly.
        """
        layout = self.mesh.layout
        ranks = [
            [
                rank
                for place, rank in enumerate(self.mesh.ranks)
                if layout.coordinates(place)["data"] == data
            ]
            for data in range(layout.data)
        ]
        workers: list[list[int]] = [[] for _ in sizes]
        for part in np.unique(parts).tolist():
            numbers = np.flatnonzero(parts == part).tolist()
            even = FamilyBalance(
                [sizes[n] for n in numbers], must_save(self.share_prefix), windows=self.windows
            )
            for data, chosen in enumerate(even.split(layout.data, self._budget)):
                for place in chosen:
                    workers[numbers[place]] = ranks[data]
        return workers


def _chosen(samples: Samples) -> np.ndarray:
    """[S] number of tokens of each sample that the policy generated."""
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(samples.mask)])
    return np.diff(sums[samples.offsets])


class Scorer:
    """Computes one number for each token of a step's samples with a model other than the policy,
    such as reference log-probs or values: `score` moves the samples to that model's ranks and the
    results back, by the `BatchTransfer` that the constructor takes. All ranks of the job create it
    and call `score` together.
    """

    def __init__(
        self,
        transfer: BatchTransfer,
        *,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`transfer`: moves samples to the other model and results back; `transfer.role` is that
        model. `within`: makes a context manager in which the model scores, such as one in which the
        policy computes without LoRA adapters.
        """
        self.transfer, self._within = transfer, within
        self.here: RoleBatch | None = None
        """The batch that was scored last, on the role's ranks; None on others."""
        self.column: Column = []
        """Its scores, on the role's ranks; empty on others."""

    def score(
        self, batch: StepBatch | None, packed: Sequence[Sequence[MicroBatch]], *, temperature: float
    ) -> Column:
        """Compute a number for each token of `batch` that the policy generated: for each mini-batch
        a float32 tensor [T] over the tokens of this rank's samples, 0 for all other tokens.
        `packed`: for each mini-batch, this rank's packed sequences. `temperature`: divisor of the
        logits where log-probs are computed. All ranks of the job call it together; ranks outside
        the policy pass None and [] and get an empty list.
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
