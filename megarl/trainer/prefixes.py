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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from megarl.parallel.balance import FamilyBalance, Size
from megarl.trainer.config import SharePrefix
from megarl.types import Samples

SAVES = 1 / 16
"""Share of the tokens of a set of samples that a common prefix must save to be computed once: below
it, the further call of attention for every layer costs more than the tokens."""
DEEPEST = 8
"""Most prefixes that a sample may continue, one after the other."""


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
    too: all before the token that predicts the first trained one, and never the last token.
    """
    found = np.zeros(len(samples), np.int64)
    for number, (first, last) in enumerate(
        zip(samples.offsets[:-1].tolist(), samples.offsets[1:].tolist(), strict=True)
    ):
        # Nothing predicts the first token of a sample.
        trained = np.flatnonzero(samples.mask[first + 1 : last])
        found[number] = trained[0] if len(trained) else last - first - 1
    return np.maximum(found, 0)


def must_save(share: SharePrefix) -> float:
    """The share of its tokens that a prefix must save to be computed once; infinite for `off`."""
    return {"auto": SAVES, "on": 0.0, "off": math.inf}[share]


def balance_of(samples: Samples, share: SharePrefix) -> FamilyBalance:
    """The object that divides `samples` over ranks and packed sequences. Samples whose shareable
    tokens are the same are a family, which is kept together.
    """
    return FamilyBalance(sizes_of(samples, share), must_save(share))


def sizes_of(samples: Samples, share: SharePrefix) -> list[Size]:
    """The size of each of `samples`. Its family is the digest of its shareable tokens."""
    if share == "off":
        return [Size(length) for length in samples.lengths.tolist()]
    found = []
    for first, length, common in zip(
        samples.offsets[:-1].tolist(),
        samples.lengths.tolist(),
        shareable(samples).tolist(),
        strict=True,
    ):
        data = np.ascontiguousarray(samples.token_ids[first : first + common]).tobytes()
        family = blake2b(data, digest_size=16).hexdigest() if common else None
        found.append(Size(length, family, common))
    return found


@dataclass(frozen=True)
class _Set:
    """Samples that begin with the same `agreed` tokens, while the tree is made."""

    members: list[int]
    begin: int
    """Number of their tokens that are in documents already."""
    agreed: int
    parent: int
    """Number of the document that they continue, or -1."""
    depth: int
    """Number of prefixes above."""
    is_family: bool = False
    """Whether the samples agree on all that each of them may share."""


def tree_of(samples: Samples, *, saves: float = SAVES, deepest: int = DEEPEST) -> Tree | None:
    """The tree of `samples`, or None where no prefix is shared.

    `saves`: share of the tokens of some samples that their common prefix must save to be shared; 0
    shares whatever saves a token. `deepest`: most prefixes that a sample may continue.
    """
    starts, limits = samples.offsets[:-1], shareable(samples)
    lengths, documents, parents, owners = samples.lengths, [], [], []

    def add(sample: int, begin: int, end: int, parent: int, owner: int) -> int:
        documents.append(np.arange(starts[sample] + begin, starts[sample] + end))
        parents.append(parent)
        owners.append(owner)
        return len(documents) - 1

    waiting = [_Set(list(range(len(samples))), 0, 0, -1, 0)]
    while waiting:
        one = waiting.pop()
        if len(one.members) == 1 or one.depth == deepest:
            for sample in one.members:
                add(sample, one.begin, int(lengths[sample]), one.parent, sample)
            continue
        if one.depth == deepest - 1 and not one.is_family:
            # The last prefixes that there may be are the longest: all that a family shares.
            waiting += reversed(_families(samples, limits, one))
            continue
        agreed = _agreed(samples, one.members, limits, one.agreed)
        begin, parent, depth = one.begin, one.parent, one.depth
        others, whole = len(one.members) - 1, float(lengths[one.members].sum())
        saved, rest = (agreed - begin) * others, whole - begin * len(one.members)
        # Of a whole family the balance expects that it is shared; see `FamilyBalance.tokens`.
        is_expected = bool((limits[one.members] == agreed).all()) and (
            agreed * others >= saves * whole
        )
        if saved > 0 and (saved >= saves * rest or is_expected):
            parent = add(one.members[0], begin, agreed, parent, -1)
            begin, depth = agreed, depth + 1
        waiting += reversed(
            [
                _Set(members, begin, agreed, parent, depth)
                for members in _divided(samples, one.members, limits, agreed)
            ]
        )
    if len(documents) == len(samples):
        return None
    return Tree(
        places=np.concatenate(documents),
        starts=np.cumsum([0, *(len(document) for document in documents)]),
        parents=tuple(parents),
        owners=np.array(owners),
    )


def _families(samples: Samples, limits: np.ndarray, one: _Set) -> list[_Set]:
    """Divide the samples of the set `one` into families: sets of samples whose shareable tokens are
    the same.
    """
    found: dict[bytes, list[int]] = {}
    for member in one.members:
        first = samples.offsets[member]
        shared = samples.token_ids[first : first + limits[member]]
        found.setdefault(np.ascontiguousarray(shared).tobytes(), []).append(member)
    return [replace(one, members=members, is_family=True) for members in found.values()]


def _agreed(samples: Samples, members: list[int], limits: np.ndarray, at_least: int) -> int:
    """How many tokens all `members` have in common and may share; they agree on `at_least`."""
    upto = int(limits[members].min())
    if upto <= at_least:
        return at_least
    first = samples.offsets[members[0]]
    wanted = samples.token_ids[first + at_least : first + upto]
    for member in members[1:]:
        start = samples.offsets[member] + at_least
        differs = np.flatnonzero(samples.token_ids[start : start + len(wanted)] != wanted)
        if len(differs):
            wanted = wanted[: differs[0]]
    return at_least + len(wanted)


def _divided(
    samples: Samples, members: list[int], limits: np.ndarray, agreed: int
) -> Iterator[list[int]]:
    """Divide samples that begin with the same `agreed` tokens by the token after them. A sample
    that may share no further token is a part of its own.
    """
    by_token: dict[int, list[int]] = {}
    for member in members:
        ends = limits[member] <= agreed
        # Token ids are not negative, so these keys are free.
        key = -1 - member if ends else int(samples.token_ids[samples.offsets[member] + agreed])
        by_token.setdefault(key, []).append(member)
    yield from by_token.values()
