"""Samples become packed rows: no padding, labels shifted once, every position knows its sample;
sequence ranks share a row.

[Sample, ...]  ->  MicroBatch of T = sum of their lengths  ->  this rank's tokens of it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megarl.parallel.collectives import all_reduce, sum_both
from megarl.parallel.mesh import Axis
from megarl.parallel.sequence import cut
from megarl.types import MicroBatch, Sample


def nothing(length: int) -> Sample:
    """Tokens that train nothing."""
    return Sample(
        row=0, token_ids=[0] * length, mask=[False] * length, engine_logprobs=[0.0] * length
    )


def pack(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """One row of all `samples`. None at all gives two tokens of nothing, so that ranks without work
    still take part.
    """
    if not samples:
        samples = [nothing(2)]
    starts, positions, tokens, targets, mask, rows, logprobs = [0], [], [], [], [], [], []
    for sample in samples:
        length = len(sample.token_ids)
        starts.append(starts[-1] + length)
        positions.extend(range(length))
        tokens.extend(sample.token_ids)
        # Position t predicts token t + 1; the last position of a document predicts nothing.
        targets.extend(sample.token_ids[1:])
        targets.append(0)
        mask.extend(sample.mask[1:])
        mask.append(False)
        logprobs.extend(sample.engine_logprobs[1:])
        logprobs.append(0.0)
        rows.extend([sample.row] * length)
    return MicroBatch(
        token_ids=torch.tensor(tokens, device=device),
        position_ids=torch.tensor(positions, device=device),
        targets=torch.tensor(targets, device=device),
        mask=torch.tensor(mask, device=device),
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        rows=torch.tensor(rows, device=device),
        engine_logprobs=torch.tensor(logprobs, dtype=torch.float32, device=device),
        members=torch.tensor(sorted(set(rows)), device=device),
    )


def pack_shared(
    samples: Sequence[Sample], device: torch.device, axis: Axis, how: str = "auto"
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
        whole = pack([*samples, nothing(2 * axis.size)], device)
        indices = cut(whole.starts.tolist(), axis.size, how)
    mine = indices[axis.rank].to(device)
    per_token = ("token_ids", "position_ids", "targets", "mask", "rows", "engine_logprobs")
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
