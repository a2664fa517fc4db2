"""Samples that begin with the same tokens share their computation: a packed sequence as trees.

    samples   [P P P P a a]   [P P P P b]   [P P P P c c c]      (prompt P of 4 tokens, 3 responses)
    tree      P P P | P a a | P b | P c c c                      13 tokens become 12
    parents     -1      0      0      0

A causal model's states at a token depend on the tokens before it alone, so a common prefix is
computed once and every sample attends to it. A sample's part begins with the last token of its
prompt, whose state predicts the sample's own first token: every trained token keeps a target, an
advantage and a loss of its own. Prefixes may have prefixes: prompts that begin with the same
instructions share these. What a sample that is a tree has in common with itself is a document too:
see `branches.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.parallel.prefix_balance import FamilyBalance
from megarl.parallel.prefix_tree import DEEPEST, Size, chains, copied, documents
from megarl.settings.training import SharePrefix
from megarl.trainer.branches import NONE, BranchPart, branch_parts, next_tokens
from megarl.types import Samples

SAVES = 1 / 16
"""Share of the tokens of a set of samples that a common prefix must save to be computed once: below
it, the further call of attention for every layer costs more than the tokens."""


@dataclass(frozen=True)
class Tree:
    """The tokens of several samples as a tree of documents, in which each prefix that samples have
    in common is one document and computed once. A document is a shared prefix, or the rest of one
    sample, or of a sample that is a tree the tokens from one of its branches to a last token.
    `tree_of` makes it; its arrays list the documents depth first, each one before those that
    continue it.
    """

    places: np.ndarray
    """[C] int64 for each of the C computed tokens, its index among the tokens of the samples; for a
    shared prefix that in the first sample which begins with it."""
    targets: np.ndarray
    """[C] int64 index among the tokens of the samples of the token that each computed token
    predicts, or -1 for none; for a shared prefix, of an untrained one."""
    starts: np.ndarray
    """[D + 1] int64 first token of each document; then C."""
    parents: tuple[int, ...]
    """[D] number of the document that each document continues, or -1; empty where none does."""
    begins: np.ndarray
    """[D] int64 number of tokens before each document that it continues."""
    owners: np.ndarray
    """[D] int64 index of each document's sample; -1 for a shared prefix."""


def shareable(samples: Samples) -> np.ndarray:
    """[S] int64: for each sample, how many of its first tokens may be computed together with those
    of other samples that begin alike: all tokens before the one that predicts the first trained
    token. Without trained tokens, all but the last. Where the length of the prompt is known, never
    more than the prompt without its last token; and none behind the first place that a sample that
    is a tree continues more than once.
    """
    found = np.zeros(len(samples), np.int64)
    for number, (first, last) in enumerate(itertools.pairwise(samples.offsets.tolist())):
        # Nothing predicts the first token of a sample.
        trained = np.flatnonzero(samples.mask[first + 1 : last])
        found[number] = trained[0] if len(trained) else last - first - 1
    known = samples.prompts > 0
    found[known] = np.minimum(found, samples.prompts - 1)[known]
    first, before = samples.branches.T
    owner = np.searchsorted(samples.offsets, first, side="right") - 1
    # What predicts a trained token is the sample's own.
    limit = np.where(before < 0, first, before + ~samples.mask[first])
    np.minimum.at(found, owner, limit - samples.offsets[owner])
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
        return [Size(length) for length in computed_lengths(samples).tolist()]
    return list(map(Size, computed_lengths(samples).tolist(), chains(leading_tokens(samples))))


def computed_lengths(samples: Samples) -> np.ndarray:
    """[S] int64 number of tokens that are computed for each sample without shared prefixes: its
    own, and some once more where a sample that is a tree branches.
    """
    lengths, branches = samples.lengths, samples.branches
    again = branches[copied(branches, samples.mask), 0]
    np.add.at(lengths, np.searchsorted(samples.offsets, again, side="right") - 1, 1)
    return lengths


def tree_of(samples: Samples, *, saves: float = SAVES, deepest: int = DEEPEST) -> Tree:
    """The documents by which `samples` are computed, each common prefix once.

    `saves`: a prefix is computed once only if that saves at least this fraction, 0 to 1, of the
    tokens of the samples that have the prefix; 0 shares whatever saves a token, infinity nothing.
    `deepest`: most shared prefixes that follow each other at the beginning of a sample.
    """
    sizes = sizes_of(samples, "off" if math.isinf(saves) else "on")
    following, copies = next_tokens(samples)
    offsets, branches = samples.offsets.tolist(), samples.branches
    edges = np.searchsorted(branches[:, 0], samples.offsets)
    made, owners = list[BranchPart](), list[int]()
    apart = list[
        tuple[int, int, list[BranchPart]]
    ]()  # conversations of their own: of the last documents
    numbers = list[int]()
    planned = documents(sizes, range(len(sizes)), saves=saves, deepest=deepest)
    if not any(one.is_shared for one in planned):
        planned.sort(key=lambda one: one.sample)
    for one in planned:
        above = numbers[one.parent] if one.parent >= 0 else -1
        numbers.append(len(made))
        if one.is_shared or edges[one.sample] == edges[one.sample + 1]:
            places = np.arange(one.begin, one.end) + offsets[one.sample]
            made.append(BranchPart(places, following[places], above, one.begin))
            owners.append(-1 if one.is_shared else one.sample)
            continue
        parts = branch_parts(samples, one.sample, one.begin, following, copies)
        roots = [number for number, part in enumerate(parts) if part.parent == NONE]
        count = roots[0] if roots else len(parts)
        made += _numbered(parts[:count], len(made), above)
        owners += [one.sample] * count
        apart.append((one.sample, count, parts[count:]))
    for sample, count, parts in apart:
        made += _numbered(parts, len(made) - count, -1)
        owners += [sample] * len(parts)
    parents = tuple(one.parent for one in made)
    return Tree(
        places=np.concatenate([following[:0], *(one.places for one in made)]),
        targets=np.concatenate([following[:0], *(one.targets for one in made)]),
        starts=np.cumsum([0, *(len(one.places) for one in made)]),
        parents=parents if any(parent >= 0 for parent in parents) else (),
        begins=np.array([one.begin for one in made], np.int64),
        owners=np.array(owners),
    )


def _numbered(parts: Sequence[BranchPart], by: int, above: int) -> list[BranchPart]:
    """`parts` with their parents' numbers raised by `by`, or `above` for those that have none."""
    return [one._replace(parent=one.parent + by if one.parent >= 0 else above) for one in parts]


def saved_tokens(starts: Sequence[int], parents: Sequence[int], begins: Sequence[int]) -> int:
    """How many tokens of a packed sequence need not be computed, because what samples, or branches
    of a sample, have in common is computed once: compared with a sequence of its own for each
    document, but not for those that others continue from their end. `starts` [D + 1]: index of the
    first token of each document in the packed sequence, then the length of the packed sequence.
    `parents` and `begins` [D]: for each document, the one that it continues, or -1, and the number
    of tokens before it that it continues.
    """
    ends = np.asarray(begins) + np.diff(starts)
    inner = {one for one, at in zip(parents, begins, strict=True) if one >= 0 and at == ends[one]}
    lengths = np.diff(starts).tolist()
    return sum(-lengths[one] if one in inner else at for one, at in enumerate(begins))
