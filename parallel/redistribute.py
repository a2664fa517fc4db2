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
    """Exchanges per-token values of samples among the ranks of an axis. `Redistribution(lengths,
    sources, targets, axis)` decides who sends what to whom, without communication: `lengths` is the
    number of tokens of each sample, `sources` and `targets` are for each sample the ranks (indices
    on `axis`) that have it and that want it. Arguments are the same on every rank. All ranks then
    call `move` together, once for each kind of values.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        axis: Axis,
    ) -> None:
        """Plan the exchange; nothing is communicated. All ranks pass the same arguments.

        Args:
            lengths: number of values (tokens) of each of the samples 0 .. N - 1.
            sources: for each sample, the ranks that have it, as indices on `axis`.
            targets: for each sample, the ranks that want it, as indices on `axis`.
            axis: the ranks that exchange.

        A rank that wants a sample it already has keeps it. Otherwise, of the ranks that have it,
        the one with the least data sent so far sends it.
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
        """Numbers of the samples that this rank is to have after the exchange, ascending."""
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
        """Exchange one array of values for each sample. `values`: {sample: [length, *width]} on
        this rank, with at least those that it sends or keeps. Returns {sample: [length, *width]} of
        the samples that this rank wants, as `dtype` on `device`.

        Every rank of the axis calls it together, with the same `dtype` and `width` (dimensions
        after the first); blocks.
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
