"""Arrays of samples from the ranks that have them to those that want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megarl.parallel.collectives import all_to_all
from megarl.parallel.mesh import Axis


class Redistribution:
    """Exchanges per-token values of samples among the ranks of an axis."""

    def __init__(
        self,
        lengths: Sequence[int],
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        axis: Axis,
    ) -> None:
        """Plan the exchange, alike on every rank and without communication. Of the ranks that have
        a sample, the one that sends the least so far sends it.

        Args:
            lengths: number of values (tokens) of each sample.
            sources: by sample, the ranks that have it, as indices on `axis`.
            targets: by sample, the ranks that want it, as indices on `axis`.
            axis: the ranks that exchange.
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
        """Samples that this rank has after the exchange, ascending."""
        rank = self._axis.rank
        return sorted(
            sample
            for (_, target), samples in self._sends.items()
            if target == rank
            for sample in samples
        )

    def move(
        self,
        values: Mapping[int, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        width: tuple[int, ...] = (),
    ) -> dict[int, torch.Tensor]:
        """From {sample: [length, *width]} that this rank sends or keeps to those of the samples
        that it wants, as `dtype` on `device`. Collective, with equal `dtype` and `width`.
        """
        rank, size = self._axis.rank, self._axis.size
        outgoing = [self._sends.get((rank, target), []) for target in range(size)]
        incoming = [self._sends.get((source, rank), []) for source in range(size)]
        parts = [values[sample].to(device, dtype) for samples in outgoing for sample in samples]
        sent = torch.cat([torch.zeros(0, *width, dtype=dtype, device=device), *parts])
        counts = [sum(self._lengths[sample] for sample in samples) for samples in incoming]
        sizes = [sum(self._lengths[sample] for sample in samples) for samples in outgoing]
        received = all_to_all(sent, sizes, counts, self._axis)
        order = [sample for samples in incoming for sample in samples]
        split = received.split([self._lengths[sample] for sample in order])
        return dict(zip(order, split, strict=True))
