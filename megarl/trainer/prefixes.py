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

import itertools
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
    """The tokens of several samples as a tree of documents, in which each prefix that samples have
    in common is one document and computed once. A document is a shared prefix, or the rest of one
    sample. `tree_of` makes it; its arrays list the documents depth first, each shared prefix before
    what continues it.
    """

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
    """[S] int64: for each sample, how many of its first tokens may be computed together with those
    of other samples that begin alike: all tokens before the one that predicts the first trained
    token. Without trained tokens, all but the last. Where the length of the prompt is known, never
    more than the prompt without its last token.
    """
    found = np.zeros(len(samples), np.int64)
    for number, (first, last) in enumerate(itertools.pairwise(samples.offsets.tolist())):
        # Nothing predicts the first token of a sample.
        trained = np.flatnonzero(samples.mask[first + 1 : last])
        found[number] = trained[0] if len(trained) else last - first - 1
    known = samples.prompts > 0
    found[known] = np.minimum(found, samples.prompts - 1)[known]
    return np.maximum(found, 0)


def must_save(share: SharePrefix) -> float:
    """How much computing a common prefix once must save, as a fraction of the tokens of the samples
    that have the prefix: 1/16 for "auto", 0 for "on" (any saving will do), infinity for "off"
    (never).
    """
    return {"auto": SAVES, "on": 0.0, "off": math.inf}[share]


def balance_of(
    samples: Samples, share: SharePrefix, windows: Sequence[int | None] = (), *, together: int = 1
) -> FamilyBalance:
    """A `FamilyBalance` of `samples`. Its method `split` divides them evenly over ranks, and
    `rows_in_step` divides each rank's samples over packed sequences. Both count a prefix that
    several samples have in common as often as it is computed.

    `share`: when such a prefix is computed once. "auto": if that saves at least 1/16 of the tokens
    of the samples that have it; "on": if it saves any token; "off": never. `together`: each run of
    this many consecutive samples stays in one packed sequence; a divisor of the number of samples.
    `windows`: the sliding window of each layer of the model in tokens, or None; empty where no
    layer has one.
    """
    return FamilyBalance(
        sizes_of(samples, share), must_save(share), windows=windows, together=together
    )


def leading_tokens(samples: Samples) -> list[np.ndarray]:
    """For each sample, its shareable tokens: the token ids at its beginning that may be computed
    together with those of other samples, as an int32 array. They are the tokens before the one that
    predicts the first trained token, such as the prompt without its last token. `shareable` returns
    their number.
    """
    starts = samples.offsets[:-1]
    spans = zip(starts.tolist(), (starts + shareable(samples)).tolist(), strict=True)
    return [samples.token_ids[first:last] for first, last in spans]


def sizes_of(samples: Samples, share: SharePrefix) -> list[Size]:
    """For each sample, in the order of `samples`, a `Size`: its length and the prefixes that could
    be computed once for it and other samples. `FamilyBalance` and `tree_of` plan from these which
    prefixes are computed once.

    `Size.length` is the number of the sample's tokens. `Size.prefixes` is a tuple of `Prefix`,
    ascending by length. A `Prefix` has a `length`, its number of tokens, and a `name`, a digest of
    these tokens that is equal for equal prefixes. Only the sample's shareable tokens count, those
    that `leading_tokens` returns. For each other sample the tuple has the longest prefix that the
    shareable tokens of both have in common, if that is not empty. Its last entry is all of the
    sample's shareable tokens, even if no other sample has them. It is empty for a sample without
    shareable tokens.

    `share`: if "off", all `prefixes` are empty. "auto" and "on" give the same result; they differ
    only in how much a prefix must save (`must_save`).
    """
    if share == "off":
        return [Size(length) for length in samples.lengths.tolist()]
    return list(map(Size, samples.lengths.tolist(), chains(leading_tokens(samples))))


def tree_of(samples: Samples, *, saves: float = SAVES, deepest: int = DEEPEST) -> Tree | None:
    """The tree by which common prefixes of `samples` are computed once, or None where no prefix is
    shared.

    `saves`: a prefix is computed once only if that saves at least this fraction, 0 to 1, of the
    tokens of the samples that have the prefix; 0 shares whatever saves a token. `deepest`: maximum
    number of shared prefixes that follow each other at the beginning of a sample (depth of the
    tree).
    """
    sizes, starts = sizes_of(samples, "on"), samples.offsets[:-1].tolist()
    made = documents(sizes, range(len(sizes)), saves=saves, deepest=deepest)
    if len(made) == len(samples):
        return None
    places = [np.arange(one.begin, one.end) + starts[one.sample] for one in made]
    return Tree(
        places=np.concatenate(places),
        starts=np.cumsum([0, *(one.end - one.begin for one in made)]),
        parents=tuple(one.parent for one in made),
        owners=np.array([-1 if one.is_shared else one.sample for one in made]),
    )


def saved_tokens(starts: Sequence[int], parents: Sequence[int]) -> int:
    """How many tokens of the samples of a packed sequence need not be computed, because shared
    prefixes are computed once. `starts` [D + 1]: index of the first token of each document in the
    packed sequence, then the length of the packed sequence. `parents` [D]: index of the shared
    prefix that each document continues, or -1.
    """
    lengths = np.diff(starts)
    before = np.zeros(len(parents), np.int64)  # tokens of a document's ancestors
    for document, parent in enumerate(parents):
        if parent >= 0:
            before[document] = before[parent] + lengths[parent]
    is_prefix = np.isin(np.arange(len(parents)), parents)
    return int(before[~is_prefix].sum() - lengths[is_prefix].sum())
