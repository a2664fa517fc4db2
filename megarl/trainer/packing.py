"""Samples become packed rows: no padding, labels shifted once, every position knows its sample;
sequence ranks share a row.

Samples  ->  MicroBatch of T = sum of their lengths  ->  this rank's tokens of it
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megarl.parallel.collectives import all_reduce, sum_both
from megarl.parallel.mesh import Axis
from megarl.parallel.sequence import cut
from megarl.types import MicroBatch, Samples


def padding(length: int) -> Samples:
    """A sample of `length` tokens that trains nothing."""
    return Samples.one(0, np.zeros(length, np.int32), mask=np.zeros(length, bool))


def pack(samples: Samples, device: torch.device) -> MicroBatch:
    """All `samples` behind each other, labels shifted. Without samples: two tokens that train
    nothing, so that ranks without work still take part in collectives.
    """
    if not len(samples):
        samples = padding(2)
    offsets, lengths = samples.offsets, samples.lengths
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)

    def of_target(column: np.ndarray) -> np.ndarray:
        """Position t predicts token t + 1; the last position of a document predicts nothing."""
        shifted = np.empty_like(column)
        shifted[:-1] = column[1:]
        shifted[offsets[1:] - 1] = 0
        return shifted

    def tensor(column: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).to(device, dtype)

    return MicroBatch(
        token_ids=tensor(samples.token_ids, torch.int64),
        position_ids=tensor(positions, torch.int64),
        targets=tensor(of_target(samples.token_ids), torch.int64),
        mask=tensor(of_target(samples.mask), torch.bool),
        starts=tensor(offsets, torch.int32),
        sample_ids=tensor(np.repeat(samples.ids, lengths), torch.int64),
        engine_logprobs=tensor(of_target(samples.engine_logprobs), torch.float32),
        rewards=tensor(of_target(samples.rewards), torch.float32),
        members=tensor(np.unique(samples.ids), torch.int64),
    )


def pack_shared(
    samples: Samples, device: torch.device, axis: Axis, how: str = "auto"
) -> MicroBatch:
    """`pack`, of which each rank of the sequence axis keeps its tokens; labels have been shifted
    before. All ranks give the same.

    Where that leaves a rank without tokens, the row gets a document of nothing, two tokens a rank.
    """
    if axis.size == 1:
        return pack(samples, device)
    whole = pack(samples, device)
    indices = cut(whole.starts.tolist(), axis.size, how)
    if not all(len(index) for index in indices):
        whole = pack(Samples.concatenate([samples, padding(2 * axis.size)]), device)
        indices = cut(whole.starts.tolist(), axis.size, how)
    mine = indices[axis.rank].to(device)
    per_token = (
        "token_ids",
        "position_ids",
        "targets",
        "mask",
        "sample_ids",
        "engine_logprobs",
        "rewards",
    )
    return replace(
        whole, indices=tuple(indices), **{name: getattr(whole, name)[mine] for name in per_token}
    )


class SequenceMean:
    """Mean of a per-token quantity over the response tokens of each sample, given back to every
    token; differentiable.

    `rows` [M] are the samples of this rank's response tokens, `members` those of the whole row (see
    `MicroBatch`).
    """

    def __init__(self, rows: torch.Tensor, members: torch.Tensor, axis: Axis) -> None:
        self._axis, self._index = axis, torch.searchsorted(members, rows)
        self._counts = all_reduce(
            torch.bincount(self._index, minlength=len(members)), axis
        ).clamp_min(1)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """[M] -> [M]; every rank of the axis calls it, with tokens or without."""
        sums = torch.zeros(len(self._counts), dtype=values.dtype, device=values.device).index_add(
            0, self._index, values
        )
        return (sum_both(sums, self._axis) / self._counts.to(values.dtype))[self._index]
