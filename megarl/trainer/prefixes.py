"""Samples that begin with the same tokens share their computation: a packed sequence as trees.

    samples   [P P P P a a]   [P P P P b]   [P P P P c c c]      (prompt P of 4 tokens, 3 responses)
    tree      P P P | P a a | P b | P c c c                      13 tokens become 12
    parents     -1      0      0      0

A causal model's states at a token depend on the tokens before it alone, so a common prefix is
computed once and every sample attends to it. A sample's part begins with the last token of its
prompt, whose state predicts the sample's own first token: every trained token keeps a target, an
advantage and a loss of its own. Prefixes may have prefixes: prompts that begin with the same
instructions share these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.parallel.prefix_balance import FamilyBalance
from megarl.parallel.prefix_tree import DEEPEST, Size, chains, documents
from megarl.trainer.config import SharePrefix
from megarl.types import Samples

SAVES = 1 / 16
"""Share of the tokens of a set of samples that a common prefix must save to be computed once: below
it, the further call of attention for every layer costs more than the tokens."""


@dataclass(frozen=True)
class Tree:
    """The tokens of samples with each shared prefix once, in depth-first order."""

    places: np.ndarray
    """[C] int64 for each of the C computed tokens, its index among the tokens of the samples; for a
    shared prefix that in the first sample which begins with it."""
    starts: np.ndarray
    """[D + 1] int64 first token of each document, a shared prefix or the rest of a sample; then
    C."""
    parents: tuple[int, ...]
    """[D] number of the shared prefix that each document continues, or -1."""
    owners: np.ndarray
    """[D] int64 index of each document's sample; -1 for a shared prefix."""


def shareable(samples: Samples) -> np.ndarray:
    """[S] int64 number of leading tokens of each sample whose states may be those of other samples
    too: all before the token that predicts the first trained one, and never the last token. Of a
    response that is not trained on none is shared, since whoever packs it may not know its tokens.
    """
    found = np.zeros(len(samples), np.int64)
    for number, (first, last) in enumerate(
        zip(samples.offsets[:-1].tolist(), samples.offsets[1:].tolist(), strict=True)
    ):
        # Nothing predicts the first token of a sample.
        trained = np.flatnonzero(samples.mask[first + 1 : last])
        found[number] = trained[0] if len(trained) else last - first - 1
    known = samples.prompts > 0
    found[known] = np.minimum(found, samples.prompts - 1)[known]
    return np.maximum(found, 0)


def must_save(share: SharePrefix) -> float:
    """The share of its tokens that a prefix must save to be computed once; infinite for `off`."""
    return {"auto": SAVES, "on": 0.0, "off": math.inf}[share]


def balance_of(
    samples: Samples, share: SharePrefix, windows: Sequence[int | None] = (), *, together: int = 1
) -> FamilyBalance:
    """The object that divides `samples` over ranks and packed sequences. So many consecutive
    samples stay `together`; `windows`: the sliding window of each layer of the model, or None.
    """
    sizes = sizes_of(samples, share)
    return FamilyBalance(sizes, must_save(share), windows=windows, together=together)


def leading_tokens(samples: Samples) -> list[np.ndarray]:
    """For each of `samples`, the token ids that it may share; see `shareable`."""
    starts, ends = samples.offsets[:-1], samples.offsets[:-1] + shareable(samples)
    return [
        samples.token_ids[first:last]
        for first, last in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


def sizes_of(samples: Samples, share: SharePrefix) -> list[Size]:
    """The size of each of `samples`, with the prefixes that others of them have too."""
    if share == "off":
        return [Size(length) for length in samples.lengths.tolist()]
    found = chains(leading_tokens(samples))
    return [
        Size(length, prefixes)
        for length, prefixes in zip(samples.lengths.tolist(), found, strict=True)
    ]


def tree_of(samples: Samples, *, saves: float = SAVES, deepest: int = DEEPEST) -> Tree | None:
    """The tree of `samples`, or None where no prefix is shared.

    `saves`: share of the tokens of some samples that their common prefix must save to be shared; 0
    shares whatever saves a token. `deepest`: most prefixes that a sample may continue.
    """
    sizes, starts = sizes_of(samples, "on"), samples.offsets[:-1].tolist()
    made = documents(sizes, range(len(sizes)), saves=saves, deepest=deepest)
    if len(made) == len(samples):
        return None
    return Tree(
        places=np.concatenate(
            [
                np.arange(starts[one.sample] + one.begin, starts[one.sample] + one.end)
                for one in made
            ]
        ),
        starts=np.cumsum([0, *(one.end - one.begin for one in made)]),
        parents=tuple(one.parent for one in made),
        owners=np.array([-1 if one.is_shared else one.sample for one in made]),
    )


def saved_tokens(starts: Sequence[int], parents: Sequence[int]) -> int:
    """By how many tokens the samples of a packed sequence have more than are computed; `starts` and
    `parents` are those of its `Tree`.
    """
    lengths = np.diff(starts)
    before = np.zeros(len(parents), np.int64)  # tokens of a document's ancestors
    for document, parent in enumerate(parents):
        if parent >= 0:
            before[document] = before[parent] + lengths[parent]
    is_prefix = np.isin(np.arange(len(parents)), parents)
    return int(before[~is_prefix].sum() - lengths[is_prefix].sum())
