"""Preferences on ranks: a step's pairs as packed sequences, and sums over whole responses.

PreferenceList --pair_batch--> PairBatch --pack_share--> MicroBatch (pairs are not separated)
MicroBatch --response_sums--> [S], one number a response
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megarl.apps.tune.supervised import chunks, pack_share
from megarl.data.preferences import PreferenceList
from megarl.parallel.collectives import broadcast_object
from megarl.parallel.mesh import ProcessMesh
from megarl.trainer.role import Role
from megarl.types import MicroBatch, Preference, Samples


@dataclass(frozen=True)
class PairBatch:
    """P preferences (a prompt with two responses each) as token sequences, the same on every rank,
    with the reference model's log-probs and the margins. Sample 2p is the first response of
    preference p, the chosen one of a pair, with its prompt; sample 2p + 1 is the second response
    with the prompt.
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
    """All preferences of rank 0's data set `rows`, in its order, on every rank, in batches of at
    least `at_once` preferences (fewer only if the data set has fewer). An empty list if rank 0 has
    no rows; other ranks pass None. `reference` [N, 2], on rank 0: the reference model's summed
    log-probs of the two responses of each row. All ranks call it together.
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


def response_sums(role: Role, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the model `role`, whose head gives log-probs ("logprobs") or scores ("scalar"), on a
    micro-batch and add up its values within each sample; differentiable. Returns (values [M], one
    for each of this rank's trained tokens; sums [S] float64, one for each sample; ids [S] of the
    samples, ascending). A sum covers this rank's tokens only: add the sums over the
    sequence-parallel ranks.
    """
    values, others = role.engine(micro, 1.0)
    sample_ids = others if role.head == "scalar" else micro.sample_ids[micro.mask]
    members = micro.members[micro.members >= 0]
    place = torch.searchsorted(members, sample_ids)
    sums = torch.zeros(len(members), dtype=torch.float64, device=values.device)
    return values, sums.index_add(0, place, values.double()), members


@torch.no_grad()
def sums_of_responses(role: Role, samples: Samples, *, together: int = 1) -> torch.Tensor:
    """Sum the model's (`role`) log-probs, or scores, over each response of `samples`, without
    gradient. Returns [N] float64, where entry i is for the sample with the id i, and N - 1 is the
    largest id. An entry is 0 where no sample has the id; each rank fills only its share, so that
    the results are to be summed over data and sequence ranks. `samples`: the same on every rank.
    `together`: how many consecutive samples are packed together, such as 2 for pairs. All ranks
    call it together.
    """
    found = torch.zeros(int(samples.ids.max()) + 1, dtype=torch.float64, device=role.device)
    for micro in pack_share(samples, role, together=together):
        _, sums, ids = response_sums(role, micro)
        found[ids] = sums
    return found
