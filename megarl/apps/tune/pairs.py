"""Preferences on ranks: a step's pairs as packed sequences, and losses of whole responses.

    PreferenceList --take_pairs--> PairBatch --pack_pairs--> MicroBatch (pairs are not separated)
    values [M] of a micro-batch --totals--> [S], one number a response --by_slopes--> loss

A pair's loss depends on sums over whole responses, whose tokens are divided among the
sequence-parallel ranks. Each rank sums the values of its own tokens, the sums are added up over the
ranks, and the loss is differentiated by these sums; each rank then weighs its own sum with that
derivative. No collective has to be differentiated.
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
    """P preferences (a prompt with two responses each) as token sequences, the same on every rank.
    Sample 2p is the first response of preference p with its prompt, sample 2p + 1 the second
    response with the prompt.
    """

    samples: Samples
    """The 2P token sequences, prompt and response each; `mask` is True for response tokens."""
    reference: np.ndarray
    """[P, 2] float64 sums of the reference model's log-probs over each response; 0 without a
    reference model."""
    margins: np.ndarray
    """[P] float64: by how much the first response is better, as the data set says; 0 if it does
    not."""
    is_desirable: np.ndarray
    """[P] bool: for single responses (KTO), whether the first response is good; True for pairs."""

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
        """The P samples of the first (`column` 0) or the second (1) responses, which keep their ids
        in the batch.
        """
        return self.samples.select(np.arange(column, 2 * len(self), 2))


def preference_rows(rows: DataRows | None) -> PreferenceList | None:
    """Narrow the type of a run's data set: returns `rows` itself if it is a list of tokenised
    preferences (a prompt with two responses each), or None if it is None, as on all ranks but rank
    0, which alone reads the data. Raises `AssertionError` for other data.
    """
    assert rows is None or isinstance(rows, PreferenceList)
    return rows


def pair_batch(preferences: Sequence[Preference], reference: np.ndarray | None) -> PairBatch:
    """Make token sequences of tokenised preferences (a prompt with two responses each), two of each
    preference. `reference` [N, 2] float64: the reference model's summed log-probs of the two
    responses of all N rows of the data set, from which those of `preferences` are taken; None
    without a reference model.
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
    """The batch of `count` preferences, as token sequences, from position `first` of the training
    order, on every rank. Rank 0, which alone has `rows` and their `reference` log-probs [N, 2],
    makes and sends the batch. None on every rank if rank 0 passes `stops`, to end the run. All
    ranks call it together.
    """
    batch = None
    if rows is not None and not stops:
        batch = pair_batch([rows.at(first + number) for number in range(count)], reference)
    return broadcast_object(batch, mesh.world)


def merged(batches: Sequence[PairBatch]) -> PairBatch | None:
    """Concatenate several batches of preferences to one, with its samples numbered anew from 0;
    None for no batches.
    """
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
    """All preferences of rank 0's `rows`, in the order of the data set, on every rank, in batches
    of about `at_once`; an empty list without rows. `reference` [N, 2]: their reference log-probs,
    on rank 0. All ranks call it together.
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
    """Divide `samples`, token sequences that are the same on every rank, among the data ranks and
    return this rank's micro-batches (packed sequences). `role`: the model, whose mesh and token
    budget of a micro-batch are used. Each `together` consecutive samples, such as the two of a
    pair, stay in one packed sequence; the number of samples is a multiple of `together`.
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
    `sample_ids` [M]: id of the sample that each token belongs to. Returns (sums [S], float64; ids
    [S] of the samples, ascending). A sample whose trained tokens are all on other sequence-parallel
    ranks has the sum 0.
    """
    members = micro.members[micro.members >= 0]
    place = torch.searchsorted(members, sample_ids)
    sums = torch.zeros(len(members), dtype=torch.float64, device=values.device)
    return sums.index_add(0, place, values.double()), members


def by_slopes(
    own: torch.Tensor, axis: Axis, loss: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a loss that depends on sums over the ranks of `axis`, so that each rank can run its
    own backward pass without communication. All ranks of `axis` call it together.

    `own` [S]: this rank's part of each sum, with its graph. `loss`: a function of the whole sums
    [S] that returns a scalar. Returns (the loss, detached; a scalar whose gradient on this rank is
    that of the loss): the latter is the sum over S of d loss / d sum, as a constant, times `own`.
    """
    whole = all_reduce(own.detach().clone(), axis).requires_grad_()
    found = loss(whole)
    (slope,) = torch.autograd.grad(found, whole)
    return found.detach(), (slope * own).sum()
