"""Preferences on ranks: a step's pairs as packed rows, and losses of whole responses.

    PreferenceList --take_pairs--> PairBatch --pack_pairs--> MicroBatch (pairs are not separated)
    values [M] of a micro-batch --totals--> [P, 2], one number a response --slopes--> loss of [M]

A pair's loss depends on sums over whole responses, whose tokens sequence-parallel ranks share. Each
rank sums its part, the sums are added up over the ranks, and the loss is differentiated by them;
each rank then weighs its part with that derivative. No collective has to be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megarl.apps.tune.supervised import chunks
from megarl.data.preferences import PreferenceList
from megarl.parallel.collectives import all_reduce, broadcast_object
from megarl.parallel.mesh import Axis, ProcessMesh
from megarl.trainer.context import DataRows
from megarl.trainer.prefixes import balance_of
from megarl.trainer.role import Role
from megarl.types import MicroBatch, Preference, Samples


@dataclass(frozen=True)
class PairBatch:
    """P preferences, the same on every rank. Sample 2p is the first response of preference p with
    its prompt, sample 2p + 1 the second one.
    """

    samples: Samples
    """The 2P responses with their prompts; `mask` is True for response tokens."""
    reference: np.ndarray
    """[P, 2] float64 sums of the reference's log-probs over each response; 0 without a
    reference."""
    margins: np.ndarray
    """[P] float64: by how much the first response is better."""
    is_desirable: np.ndarray
    """[P] bool, for single responses (KTO); True for pairs."""

    def __len__(self) -> int:
        return len(self.margins)

    @property
    def num_tokens(self) -> np.ndarray:
        """[P, 2] int64 numbers of trained tokens of each response, at least 1."""
        trained = self.samples.mask.copy()
        trained[self.samples.offsets[:-1]] = False  # nothing predicts a sample's first token
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(trained)])
        return np.maximum(1, np.diff(sums[self.samples.offsets])).reshape(-1, 2)

    def side(self, column: int) -> Samples:
        """The first (0) or the second (1) responses, with their ids."""
        return self.samples.select(np.arange(column, 2 * len(self), 2))


def preference_rows(rows: DataRows | None) -> PreferenceList | None:
    """The rows of a run on preferences, on rank 0; None on the others."""
    assert rows is None or isinstance(rows, PreferenceList)
    return rows


def pair_batch(preferences: Sequence[Preference], reference: np.ndarray | None) -> PairBatch:
    """The batch of some preferences. `reference` [N, 2]: the log-probs of all rows of the data set;
    None without a reference.
    """
    samples = []
    for number, one in enumerate(preferences):
        for side, response in enumerate(one.responses):
            prompt = one.prompt_ids[one.cut if side else 0 :]
            mask = np.array([False] * len(prompt) + [True] * len(response))
            samples.append(Samples.one(2 * number + side, [*prompt, *response], mask=mask))
    indices = [one.index for one in preferences]
    none = np.zeros((len(indices), 2))
    return PairBatch(
        samples=Samples.concatenate(samples),
        reference=none if reference is None else reference[indices],
        margins=np.array([one.margin for one in preferences]),
        is_desirable=np.array([one.is_desirable for one in preferences], dtype=bool),
    )


def take_pairs(
    rows: PreferenceList | None,
    mesh: ProcessMesh,
    first: int,
    count: int,
    *,
    reference: np.ndarray | None = None,
    stops: bool = False,
) -> PairBatch | None:
    """The batch of `count` preferences from position `first` of training, on every rank. Rank 0,
    which alone has them and their `reference` log-probs, sends them. None on every rank if rank 0
    `stops`.
    """
    batch = None
    if rows is not None and not stops:
        batch = pair_batch([rows.at(first + number) for number in range(count)], reference)
    return broadcast_object(batch, mesh.world)


def merged(batches: Sequence[PairBatch]) -> PairBatch | None:
    """Several batches as one; None for none."""
    if not batches:
        return None
    samples = Samples.concatenate([batch.samples for batch in batches])
    return PairBatch(
        samples=replace(samples, ids=np.arange(len(samples))),
        reference=np.concatenate([batch.reference for batch in batches]),
        margins=np.concatenate([batch.margins for batch in batches]),
        is_desirable=np.concatenate([batch.is_desirable for batch in batches]),
    )


def take_all_pairs(
    rows: PreferenceList | None,
    mesh: ProcessMesh,
    at_once: int,
    reference: np.ndarray | None = None,
) -> list[PairBatch]:
    """All preferences of rank 0, in the order of the data set, on every rank, in batches of about
    `at_once`.
    """
    batches = []
    num_rows = 0 if rows is None else len(rows)
    for first, count in broadcast_object(chunks(num_rows, at_once), mesh.world):
        batch = None
        if rows is not None:
            batch = pair_batch([rows.row(first + number) for number in range(count)], reference)
        batch = broadcast_object(batch, mesh.world)
        assert batch is not None
        batches.append(batch)
    return batches


def pack_pairs(samples: Samples, role: Role, *, together: int) -> list[MicroBatch]:
    """This rank's micro-batches of `samples`, which are the same on every rank. So many consecutive
    samples stay `together` in one packed sequence; the number of samples is a multiple of it.
    """
    mesh, training = role.mesh, role.training
    even = balance_of(samples, training.share_prefix, role.windows, together=together)
    budget = training.micro_batch_tokens * mesh.sequence.size
    dealt = even.split(mesh.data.size, budget)
    packed = even.rows_in_step(dealt, budget)

    def whole(units: Sequence[int]) -> list[int]:
        return [unit * together + part for unit in units for part in range(together)]

    mine = samples.select(whole(dealt[mesh.data.rank]))
    return role.pack(mine, [whole(units) for units in packed[mesh.data.rank]])


def totals(
    values: torch.Tensor, sample_ids: torch.Tensor, micro: MicroBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up the values of each sample of a micro-batch; differentiable.

    `values` [M]: one number for each of this rank's trained tokens, such as its log-prob;
    `sample_ids` [M]: the sample that the token belongs to. Returns (sums [S], float64; ids [S] of
    the samples, ascending). A sample whose trained tokens are all on other ranks has the sum 0.
    """
    members = micro.members[micro.members >= 0]
    place = torch.searchsorted(members, sample_ids)
    sums = torch.zeros(len(members), dtype=torch.float64, device=values.device)
    return sums.index_add(0, place, values.double()), members


def by_slopes(
    own: torch.Tensor, axis: Axis, loss: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a loss of sums over the ranks of `axis`, so that each rank can run its own backward
    pass without communication.

    `own` [S]: this rank's part of each sum, with its graph. `loss`: a function of the whole sums
    [S] that returns a number. Returns (the loss; a number whose gradient on this rank is that of
    the loss): the latter is the sum over S of d loss / d sum, as a constant, times `own`.
    """
    whole = all_reduce(own.detach().clone(), axis).requires_grad_()
    found = loss(whole)
    (slope,) = torch.autograd.grad(found, whole)
    return found.detach(), (slope * own).sum()
