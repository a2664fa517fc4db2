"""Samples become packed rows: no padding, labels shifted once, every position knows its sample.

[Sample, ...]  ->  MicroBatch of T = sum of their lengths
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.types import MicroBatch, Sample


def pack(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """One row of all `samples`. None at all gives two tokens of nothing, so that ranks without work still take part."""
    if not samples:
        samples = [Sample(row=0, token_ids=[0, 0], mask=[False, False], engine_logprobs=[0.0, 0.0])]
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
    )


def sequence_mean(rows: torch.Tensor) -> SequenceMean:
    """For response tokens of samples `rows` [M]: a function that gives each token the mean over its own sample."""
    return SequenceMean(rows)


class SequenceMean:
    """Mean of a per-token quantity over the response tokens of each sample, given back to every token; differentiable."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._samples, self._index = torch.unique(rows, return_inverse=True)
        self._counts = torch.bincount(self._index, minlength=len(self._samples))

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """[M] -> [M]"""
        sums = torch.zeros(len(self._samples), dtype=values.dtype, device=values.device).index_add(0, self._index, values)
        return (sums / self._counts.to(values.dtype))[self._index]
