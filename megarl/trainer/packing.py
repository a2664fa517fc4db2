"""Samples become packed rows: no padding, labels shifted once, every position knows its sample;
sequence-parallel ranks share a row. Common prefixes of samples may be in a row once
(`prefixes.py`), and those of a sample's branches are (`branches.py`).

Samples -> MicroBatch of T = sum of their lengths, less what is shared -> this rank's tokens
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
from megarl.trainer.prefixes import must_save, tree_of
from megarl.types import MicroBatch, Samples


def padding(length: int) -> Samples:
    """A sample of `length` tokens of id 0, none of which is a training target; its sample id is -1.
    It fills ranks that would have no token.
    """
    return Samples.one(-1, np.zeros(length, np.int32), mask=np.zeros(length, bool))


def pack(
    samples: Samples,
    device: torch.device,
    places: np.ndarray | None = None,
    share: SharePrefix = "off",
) -> MicroBatch:
    """Concatenate `samples` into one packed sequence on `device` (a new micro-batch), with
    next-token labels: targets, mask, log-probs and rewards at position t are those of the token
    that continues it in the same sample. Of a sample that is a tree every token is computed once,
    and once more where it predicts several trained ones.

    Without samples the sequence has two padding tokens, so that the rank still takes part in
    collectives. `places` [T]: for each token its index among the tokens of the whole mini-batch,
    where per-token results are stored; by default its index in `samples`. `share`: whether prefixes
    that several samples have in common are in the sequence once: where that saves at least 1/16 of
    their tokens ("auto"), wherever it saves any ("on"), or never ("off").
    """
    if not len(samples):
        samples, places = padding(2), None
    positions_of_targets = np.arange(samples.offsets[-1]) if places is None else places
    tree = tree_of(samples, saves=must_save(share))
    lengths = np.diff(tree.starts)
    positions = np.arange(tree.starts[-1]) + np.repeat(tree.begins - tree.starts[:-1], lengths)
    ids = np.where(tree.owners < 0, -1, samples.ids[tree.owners])

    def of_target(column: np.ndarray) -> np.ndarray:
        """From `column` [T], a number for each token of the samples, make an array [C], with an
        entry for each of the C tokens that `tree` computes (a shared prefix has its tokens once).
        The entry of a token is the number of the token that it predicts; 0 if it predicts none.
        """
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
        ends=tensor(np.flatnonzero(np.isin(tree.places, samples.offsets[1:] - 1)), torch.int64),
        parents=tree.parents,
        begins=tuple(tree.begins.tolist()) if tree.parents else (),
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
    """Concatenate `samples` into one packed sequence with next-token labels, of which each rank of
    `axis` (the sequence-parallel ranks) keeps only its tokens, as a micro-batch. All ranks of
    `axis` pass the same arguments; nothing is communicated.

    `how`: which tokens each rank gets: "contiguous", "zigzag", "zigzag_document", "striped", or
    "auto" for the one that divides work most evenly. `places` [T]: for each token its index among
    the tokens of the whole mini-batch; by default its index in `samples`. `share`: whether prefixes
    that several samples have in common are in the sequence once: "auto" (if that saves enough),
    "on" or "off". `windows`: the sliding window of each layer of the model in tokens, or None, from
    which work is computed; empty where no layer has one.

    Labels are shifted before the tokens are divided. If a rank would get no token, padding of two
    tokens for each rank is appended to the packed sequence.
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
    mine = indices[axis.rank].to(device)
    own = {name: getattr(whole, name)[mine] for name in PER_TOKEN}
    return replace(whole, indices=tuple(indices), **own)


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
    """Pack a mini-batch into this rank's packed sequences (micro-batches) on `device`. `samples`:
    the whole mini-batch. `micro_batches`: for each packed sequence, the indices of its samples in
    `samples`. `axis`: the sequence-parallel ranks, which divide the tokens of each packed sequence;
    `how`: which tokens each gets, as in `pack_shared`; "auto" divides work most evenly. `share`:
    whether prefixes that several samples have in common are computed once: "auto" (if that saves
    enough), "on" or "off". `windows`: the sliding window of each layer in tokens, or None; empty
    where no layer has one.
    """
    return [
        pack_shared(
            *(samples.select(chosen), device, axis, how, samples.places(chosen), share, windows)
        )
        for chosen in micro_batches
    ]


PER_TOKEN = (
    *("token_ids", "position_ids", "targets", "mask"),
    *("sample_ids", "engine_logprobs", "rewards", "places"),
)
"""Per-token fields of `MicroBatch`, which are divided over the sequence-parallel ranks."""


class SequenceMean:
    """Replaces each number of a per-token tensor by the mean over the response tokens of the same
    sample, or by the sum (`sum`), also of samples whose tokens are spread over sequence-parallel
    ranks; differentiable. Called with values [M], it returns [M].

    `sample_ids` [M] int64: the sample of each response token on this rank. `members` [S] int64: ids
    of all samples of the packed sequence, ascending. `axis`: the sequence-parallel ranks, which
    create and call the object together.
    """

    def __init__(self, sample_ids: torch.Tensor, members: torch.Tensor, axis: Axis) -> None:
        self._axis, self._index = axis, torch.searchsorted(members, sample_ids)
        counts = torch.bincount(self._index, minlength=len(members))
        self._counts = all_reduce(counts, axis).clamp_min(1)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """values [M], one for each response token on this rank -> [M]: for each token the mean over
        all response tokens of its sample. All sequence-parallel ranks call it together, even
        without tokens.
        """
        return (self._sums(values) / self._counts.to(values.dtype))[self._index]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """values [M], one for each response token on this rank -> [M]: for each token the sum over
        all response tokens of its sample. All sequence-parallel ranks call it together, even
        without tokens.
        """
        return self._sums(values)[self._index]

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        """[M] per-token values -> [S] sums of the samples in `members`."""
        sums = torch.zeros(len(self._counts), dtype=values.dtype, device=values.device)
        return sum_both(sums.index_add(0, self._index, values), self._axis)
