"""Arrays of samples from the ranks that have them to the ranks that want them, rank to rank.

    values of this rank's samples  --move-->  values of the samples that this rank wants

Every rank plans the same transfers from the same description, so that no plan has to travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megarl.parallel.collectives import waits
from megarl.parallel.mesh import Axis


class Redistribution:
    """Plan by which the ranks of an axis exchange samples: which rank sends which samples to which
    rank.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        axis: Axis,
    ) -> None:
        """Given for each sample 0 .. N - 1: its length, the ranks (indices on `axis`) that have it,
        and the ranks that want it.

        A rank that wants a sample it already has keeps it. Otherwise the rank with the least data
        sent so far sends it.
        """
        self._lengths, self._axis = lengths, axis
        self._sends: dict[tuple[int, int], list[int]] = {}
        """(source, target) -> samples, in ascending order."""
        sent = np.zeros(axis.size, dtype=np.int64)
        for sample, (having, wanting) in enumerate(zip(sources, targets, strict=True)):
            for target in wanting:
                source = target if target in having else min(having, key=lambda r: (sent[r], r))
                if source != target:
                    sent[source] += lengths[sample]
                self._sends.setdefault((source, target), []).append(sample)

    def wanted(self) -> list[int]:
        """Numbers of the samples that this rank wants, ascending."""
        mine = self._axis.rank
        return sorted(
            sample
            for (_, target), samples in self._sends.items()
            if target == mine
            for sample in samples
        )

    def move(
        self,
        values: Mapping[int, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        width: tuple[int, ...] = (),
    ) -> dict[int, torch.Tensor]:
        """Exchange the values: {sample: [length, *width] values} on this rank -> the same of the
        samples that this rank wants.

        Every rank of the axis calls it together, with the same dtype and width.
        """
        mine, size = self._axis.rank, self._axis.size
        outgoing = [self._sends.get((mine, target), []) for target in range(size)]
        incoming = [self._sends.get((source, mine), []) for source in range(size)]
        parts = [values[sample].to(device, dtype) for samples in outgoing for sample in samples]
        sent = torch.cat([torch.zeros(0, *width, dtype=dtype, device=device), *parts])
        counts = [sum(self._lengths[sample] for sample in samples) for samples in incoming]
        received = sent
        if size > 1:
            received = torch.empty(sum(counts), *width, dtype=dtype, device=device)
            sizes = [sum(self._lengths[sample] for sample in samples) for samples in outgoing]
            with waits("exchange of samples", self._axis):
                dist.all_to_all_single(
                    received,
                    sent,
                    output_split_sizes=counts,
                    input_split_sizes=sizes,
                    group=self._axis.group,
                )
        order = [sample for samples in incoming for sample in samples]
        split = received.split([self._lengths[sample] for sample in order])
        return dict(zip(order, split, strict=True))
