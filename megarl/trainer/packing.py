"""Samples become packed rows without padding, with labels shifted once, shared by sequence-parallel
ranks. Common prefixes may be in a row once (`prefixes.py`), those of a sample's branches always are
(`branches.py`).
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
from megarl.settings.training import SharePrefix
from megarl.trainer.prefixes import multiplicity, must_save, tree_of
from megarl.types import MicroBatch, Samples, unreported_experts


def padding(length: int) -> Samples:
    """A sample of `length` untrained tokens of id 0, with sample id -1."""
    return Samples.one(-1, np.zeros(length, np.int32), mask=np.zeros(length, bool))


def pack(
    samples: Samples,
    device: torch.device,
    places: np.ndarray | None = None,
    share: SharePrefix = "off",
) -> MicroBatch:
    """Concatenate `samples` into a packed sequence with next-token labels: column values at
    position t are those of the token that continues it; where a token predicts several trained
    ones, it is there again.

    Without samples there are two padding tokens, so that the rank takes part in collectives.
    `places` [T]: each token's index among those of the whole mini-batch; by default in `samples`.
    """
    if not len(samples):
        samples, places = padding(2), None
    positions_of_targets = np.arange(samples.offsets[-1]) if places is None else places
    tree = tree_of(samples, saves=must_save(share))
    lengths = np.diff(tree.starts)
    positions = np.arange(tree.starts[-1]) + np.repeat(tree.begins - tree.starts[:-1], lengths)
    ids = np.where(tree.owners < 0, -1, samples.ids[tree.owners])

    def of_target(column: np.ndarray) -> np.ndarray:
        """[T] by tokens -> [C] by computed tokens: of the one that each predicts, or 0."""
        return np.where(tree.targets < 0, 0, column[tree.targets])

    def tensor(column: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).to(device, dtype)

    return MicroBatch(
        token_ids=tensor(samples.token_ids[tree.places], torch.int64),
        position_ids=tensor(positions, torch.int64),
        targets=tensor(of_target(samples.token_ids), torch.int64),
        mask=tensor(of_target(samples.mask), torch.bool),
        starts=tensor(tree.starts, torch.int32),
        sample_ids=tensor(np.repeat(ids, lengths), torch.int64),
        engine_logprobs=tensor(of_target(samples.engine_logprobs), torch.float32),
        rewards=tensor(of_target(samples.rewards), torch.float32),
        members=tensor(np.unique(samples.ids), torch.int64),
        places=tensor(of_target(positions_of_targets), torch.int64),
        multiplicity=tensor(multiplicity(tree, ids >= 0), torch.float32),
        ends=tensor(np.flatnonzero(np.isin(tree.places, samples.offsets[1:] - 1)), torch.int64),
        parents=tree.parents,
        begins=tuple(tree.begins.tolist()) if tree.parents else (),
        experts=None
        if samples.experts is None
        else tensor(numbered(samples.experts)[tree.places], torch.int16),
    )


def numbered(experts: np.ndarray) -> np.ndarray:
    """`Samples.experts` as int16, -1 where engines do not tell."""
    return np.where(experts == unreported_experts(experts.dtype), -1, experts.astype(np.int16))


def pack_shared(
    samples: Samples,
    device: torch.device,
    axis: Axis,
    how: str = "auto",
    places: np.ndarray | None = None,
    share: SharePrefix = "off",
    windows: Sequence[int | None] = (),
) -> MicroBatch:
    """`pack`, of which each sequence-parallel rank keeps its tokens; all ranks of `axis` pass the
    same arguments. `how`: which tokens each gets; "auto" for the most even work. `windows`: each
    layer's sliding window in tokens, or None.

    If a rank would get no token, padding of two tokens for each rank is appended.
    """
    whole = pack(samples, device, places, share)
    if axis.size == 1:
        return whole
    indices = _cut(whole, axis.size, how, windows)
    if not all(len(index) for index in indices):
        filler = padding(2 * axis.size)
        if places is not None:
            places = np.concatenate([places, np.zeros(filler.offsets[-1], np.int64)])
        whole = pack(Samples.concatenate([samples, filler]), device, places, share)
        indices = _cut(whole, axis.size, how, windows)
    indices_here = indices[axis.rank].to(device)
    names = [*PER_TOKEN, *(["experts"] if whole.experts is not None else [])]
    columns = {name: getattr(whole, name)[indices_here] for name in names}
    return replace(whole, indices=tuple(indices), **columns)


def _cut(
    whole: MicroBatch, size: int, how: str, windows: Sequence[int | None]
) -> list[torch.Tensor]:
    """Each sequence-parallel rank's positions in a packed sequence. A token's work is the keys that
    it attends to, the mean over layers.
    """
    seen = whole.position_ids.cpu() + 1
    if any(windows):
        layers = Counter(windows)
        most = {window: int(seen.max()) if window is None else window for window in layers}
        parts = [seen.clamp(max=most[window]) * count for window, count in layers.items()]
        seen = torch.stack(parts).sum(0) / layers.total()
    return cut(whole.starts.tolist(), size, how, seen=seen)


PER_TOKEN = (
    *("token_ids", "position_ids", "targets", "mask"),
    *("sample_ids", "engine_logprobs", "rewards", "places", "multiplicity"),
)
"""Fields of `MicroBatch` that are divided over the sequence-parallel ranks."""


class SequenceMean:
    """For each response token the mean (`mean(values)`) or sum (`mean.sum(values)`) of values [M]
    over its sample's response tokens, on all sequence-parallel ranks; differentiable. Collective,
    also without tokens.
    """

    def __init__(self, sample_ids: torch.Tensor, members: torch.Tensor, axis: Axis) -> None:
        """`sample_ids` [M]: of the response tokens here. `members` [S]: all ids of the packed
        sequence, ascending.
        """
        self._axis, self._index = axis, torch.searchsorted(members, sample_ids)
        counts = torch.bincount(self._index, minlength=len(members))
        self._counts = all_reduce(counts, axis).clamp_min(1)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return (self._sums(values) / self._counts.to(values.dtype))[self._index]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """As a call, with sums instead of means."""
        return self._sums(values)[self._index]

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        """[M] -> [S] sums of the samples in `members`."""
        sums = torch.zeros(len(self._counts), dtype=values.dtype, device=values.device)
        return sum_both(sums.index_add(0, self._index, values), self._axis)
