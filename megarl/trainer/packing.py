"""Samples become packed rows: no padding, labels shifted once, every position knows its sample;
sequence ranks share a row. Common prefixes of samples may be in a row once (`prefixes.py`).

Samples  ->  MicroBatch of T = sum of their lengths, less what is shared  ->  this rank's tokens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megarl.parallel.collectives import all_reduce, sum_both
from megarl.parallel.mesh import Axis
from megarl.parallel.sequence import cut
from megarl.trainer.config import SharePrefix
from megarl.trainer.prefixes import Tree, must_save, tree_of
from megarl.types import MicroBatch, Samples


def padding(length: int) -> Samples:
    """A sample of `length` padding tokens without a training target; its sample id is -1."""
    return Samples.one(-1, np.zeros(length, np.int32), mask=np.zeros(length, bool))


def pack(
    samples: Samples,
    device: torch.device,
    places: np.ndarray | None = None,
    share: SharePrefix = "off",
) -> MicroBatch:
    """Concatenate `samples` into one packed sequence (a micro-batch) with shifted labels.

    Without samples the sequence has two padding tokens, so that the rank still takes part in
    collectives. `places` [T]: index of each token in the columns of the mini-batch, by default its
    index in `samples`. `share`: whether common prefixes are in the sequence once.
    """
    if not len(samples):
        samples, places = padding(2), None
    positions_of_targets = np.arange(samples.offsets[-1]) if places is None else places
    offsets, lengths = samples.offsets, samples.lengths
    tree = tree_of(samples, saves=must_save(share)) if share != "off" else None
    if tree is None:
        tree = Tree(np.arange(offsets[-1]), offsets, (), np.arange(len(samples)))
    positions = (np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths))[tree.places]
    ids = np.where(tree.owners < 0, -1, samples.ids[tree.owners])

    def of_target(column: np.ndarray) -> np.ndarray:
        """Shift a column by one: position t gets the value of token t + 1. The last position of a
        sample has no target.
        """
        shifted = np.empty_like(column)
        shifted[:-1] = column[1:]
        shifted[offsets[1:] - 1] = 0
        return shifted[tree.places]

    def tensor(column: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).to(device, dtype)

    return MicroBatch(
        token_ids=tensor(samples.token_ids[tree.places], torch.int64),
        position_ids=tensor(positions, torch.int64),
        targets=tensor(of_target(samples.token_ids), torch.int64),
        mask=tensor(of_target(samples.mask), torch.bool),
        starts=tensor(tree.starts, torch.int32),
        sample_ids=tensor(np.repeat(ids, np.diff(tree.starts)), torch.int64),
        engine_logprobs=tensor(of_target(samples.engine_logprobs), torch.float32),
        rewards=tensor(of_target(samples.rewards), torch.float32),
        members=tensor(np.unique(samples.ids), torch.int64),
        places=tensor(of_target(positions_of_targets), torch.int64),
        parents=tree.parents,
    )


def pack_shared(
    samples: Samples,
    device: torch.device,
    axis: Axis,
    how: str = "auto",
    places: np.ndarray | None = None,
    share: SharePrefix = "off",
    windows: Sequence[int | None] = (),
) -> MicroBatch:
    """Like `pack`, but each sequence-parallel rank keeps only its tokens. All ranks pass the same
    samples. `windows`: the sliding window of each layer of the model, or None; empty where no layer
    has one.

    Labels are shifted before the tokens are divided. If a rank would get no token, padding of two
    tokens for each rank is appended to the packed sequence.
    """
    if axis.size == 1:
        return pack(samples, device, places, share)
    whole = pack(samples, device, places, share)
    indices = _cut(whole, axis.size, how, windows)
    if not all(len(index) for index in indices):
        filler = padding(2 * axis.size)
        if places is not None:
            places = np.concatenate([places, np.zeros(filler.offsets[-1], np.int64)])
        whole = pack(Samples.concatenate([samples, filler]), device, places, share)
        indices = _cut(whole, axis.size, how, windows)
    mine = indices[axis.rank].to(device)
    return replace(
        whole,
        indices=tuple(indices),
        **{name: getattr(whole, name)[mine] for name in PER_TOKEN},
    )


def _cut(
    whole: MicroBatch, size: int, how: str, windows: Sequence[int | None]
) -> list[torch.Tensor]:
    """Each sequence-parallel rank's positions in a packed sequence. A token attends to as many keys
    as its sample has tokens up to it, or as the window of a layer holds: the mean over the layers.
    """
    seen = whole.position_ids.cpu() + 1
    if any(windows):
        layers = Counter(windows)
        most = {window: int(seen.max()) if window is None else window for window in layers}
        parts = [seen.clamp(max=most[window]) * count for window, count in layers.items()]
        seen = torch.stack(parts).sum(0) / layers.total()
    return cut(whole.starts.tolist(), size, how, seen=seen)


def pack_mini_batch(
    samples: Samples,
    micro_batches: Sequence[Sequence[int]],
    device: torch.device,
    axis: Axis,
    how: str = "auto",
    share: SharePrefix = "off",
    windows: Sequence[int | None] = (),
) -> list[MicroBatch]:
    """Pack a mini-batch into micro-batches. `micro_batches`: for each one, the indices of its
    samples. `windows`: as in `pack_shared`.
    """
    return [
        pack_shared(
            *(samples.select(chosen), device, axis, how, samples.places(chosen), share, windows)
        )
        for chosen in micro_batches
    ]


PER_TOKEN = (
    "token_ids",
    "position_ids",
    "targets",
    "mask",
    "sample_ids",
    "engine_logprobs",
    "rewards",
    "places",
)
"""Per-token fields of `MicroBatch`, which are divided over the sequence-parallel ranks."""


class SequenceMean:
    """Replaces a per-token quantity by its mean, or by its sum (`sum`), over the response tokens of
    the same sample; differentiable.

    `sample_ids` [M]: the sample of each response token on this rank. `members`: all samples of the
    packed sequence (see `MicroBatch`).
    """

    def __init__(self, sample_ids: torch.Tensor, members: torch.Tensor, axis: Axis) -> None:
        self._axis, self._index = axis, torch.searchsorted(members, sample_ids)
        self._counts = all_reduce(
            torch.bincount(self._index, minlength=len(members)), axis
        ).clamp_min(1)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """[M] per-token values -> [M] means. All ranks of the sequence axis call it, even without
        tokens.
        """
        return (self._sums(values) / self._counts.to(values.dtype))[self._index]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """[M] per-token values -> [M] sums. All ranks of the sequence axis call it, even without
        tokens.
        """
        return self._sums(values)[self._index]

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        """[M] per-token values -> [S] sums of the samples in `members`."""
        sums = torch.zeros(len(self._counts), dtype=values.dtype, device=values.device)
        return sum_both(sums.index_add(0, self._index, values), self._axis)
