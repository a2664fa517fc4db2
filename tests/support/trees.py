"""Rollouts that are trees, and the same tokens as sequences: one from the root to each leaf, in
which only what no earlier one has is trained.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from megarl.types import Rollout, Samples, Segment, StepBatch, TokenArrays


def branched(draw: random.Random, rollout: Rollout, *, longest: int = 6, most: int = 7) -> Rollout:
    """A rollout of the same verdict whose segments are a random tree: turns continue any earlier
    segment, or begin a conversation of their own. Tokens are 1 to 39.
    """

    def segment(kind: str, follows: int | None, shortest: int) -> Segment:
        count = draw.randint(shortest, longest)
        tokens = [draw.randint(1, 39) for _ in range(count)]
        is_model = kind == "model"
        logprobs = [-draw.random() * 4 * is_model for _ in tokens]
        arrays = TokenArrays(np.array(tokens, np.int32), np.array(logprobs, np.float32))
        spans = [(0, count)] if is_model else []
        reward = 0.0 if is_model else draw.choice([0.0, 0.5])
        return Segment(kind, count, arrays, spans, "stop" * is_model, reward, follows=follows)

    made = list[Segment]()
    if draw.random() < 0.7:
        made.append(segment("model", None, 1))
    while len(made) < 2 or draw.random() < 1 - 1 / most:
        # None, if by chance it is that: the one before.
        follows = draw.choice([None, -1, *range(len(made))])
        made.append(segment("environment", follows, int(follows == -1)))
        made.append(segment("model", draw.choice([None, None, len(made) - 1]), 1))
        if draw.random() < 0.2:
            made.append(segment("model", draw.randrange(len(made)), 1))
    return replace(rollout, segments=made)


def before(samples: Samples, token: int) -> int:
    """The token that a token continues, or -1."""
    branches = dict(samples.branches.tolist())
    return branches.get(token, -1 if token in samples.offsets else token - 1)


def path(samples: Samples, token: int) -> list[int]:
    """The tokens from a root up to a token."""
    found = [token]
    while (earlier := before(samples, found[-1])) >= 0:
        found.append(earlier)
    return found[::-1]


def lineages(samples: Samples) -> tuple[Samples, np.ndarray, list[list[int]]]:
    """(the sequences, with the ids of their samples; which token of `samples` each of their tokens
    is; for each sample the numbers of its sequences).
    """
    rows, places, members = list[Samples](), list[int](), list[list[int]]()
    seen = np.zeros(len(samples.token_ids), bool)
    for number, (first, last) in enumerate(zip(samples.offsets, samples.offsets[1:], strict=False)):
        inner = {before(samples, token) for token in range(first, last)}
        members.append([])
        for leaf in sorted({*range(first, last)} - inner):
            tokens = path(samples, leaf)
            mask = samples.mask[tokens] & ~seen[tokens]
            seen[tokens] = True
            logprobs = samples.engine_logprobs[tokens] * mask
            settings = {"mask": mask, "engine_logprobs": logprobs}
            row = Samples.one(samples.ids[number], samples.token_ids[tokens], **settings)
            members[-1].append(len(rows))
            rows.append(replace(row, rewards=samples.rewards[tokens] * mask))
            places += tokens
    return Samples.concatenate(rows), np.array(places, np.int64), members


def repeated(batch: StepBatch) -> StepBatch:
    """The batch with sequences in the place of trees, in the same packed sequences."""
    made = [lineages(samples) for samples in batch.samples]
    rows = [
        [[one for n in row for one in members[n]] for row in micro_batches]
        for micro_batches, (_, _, members) in zip(batch.micro_batches, made, strict=True)
    ]
    return replace(batch, samples=[samples for samples, _, _ in made], micro_batches=rows)
