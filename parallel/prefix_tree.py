"""Which tokens of a packed sequence are computed once: its samples as a tree of prefixes.

token ids that samples may share --chains--> prefixes that others have too --documents--> shared
prefixes and rests of samples, depth first
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

DEEPEST = 8
"""Most shared prefixes of a sample, one after the other."""


class Prefix(NamedTuple):
    length: int
    """Number of tokens, at least 1."""
    name: Hashable
    """Hashable, equal for equal tokens, such as their digest."""


class Size(NamedTuple):
    length: int
    """Tokens that are computed; of a tree, with copies (`copied`)."""
    prefixes: tuple[Prefix, ...] = ()
    """Ascending by length; the last is all that the sample may share, shorter than `length`. The
    longest one in two lists is what the two samples have in common.
    """

    @property
    def family(self) -> Hashable:
        """Equal for samples with the same shareable tokens, as responses to one prompt."""
        return self.prefixes[-1].name if self.prefixes else None

    @property
    def shareable(self) -> int:
        return self.prefixes[-1].length if self.prefixes else 0


class Document(NamedTuple):
    """Tokens [begin, end) of sample number `sample`, computed as one document."""

    sample: int
    """Of a shared prefix, the first sample that begins with it."""
    begin: int
    end: int
    parent: int
    """Index of the shared prefix that this document continues, or -1."""
    is_shared: bool
    """Whether this is a shared prefix, and not the rest of a sample."""


def chains(shareable: Sequence[np.ndarray]) -> list[tuple[Prefix, ...]]:
    """`Size.prefixes` of each sample. `shareable`: by sample, the token ids [n] that it may
    share.
    """
    if not shareable:
        return []
    # Big-endian, so that bytes are in the order of the token ids.
    data = [np.ascontiguousarray(tokens, ">i4").tobytes() for tokens in shareable]
    distinct = sorted(set(data))
    agreed = [_agreed(a, b) for a, b in zip(distinct, distinct[1:], strict=False)]
    before = _least(agreed)
    after = reversed(_least(agreed[::-1]))
    by_tokens: dict[bytes, tuple[Prefix, ...]] = {}
    for tokens, left, right in zip(distinct, before, after, strict=True):
        digest, prefixes, done = blake2b(digest_size=16), [], 0
        for length in sorted({*left, *right, len(tokens) // 4} - {0}):
            digest.update(tokens[4 * done : 4 * length])
            prefixes.append(Prefix(length, digest.digest()))
            done = length
        by_tokens[tokens] = tuple(prefixes)
    return [by_tokens[tokens] for tokens in data]


def copied(branches: np.ndarray, mask: np.ndarray) -> list[int]:
    """Which `branches` ([B, 2], as `Samples.branches`) begin with a copy of the token that they
    continue: a state predicts one token, so each further trained one needs a copy.
    """
    firsts, predicts = set(branches[:, 0].tolist()), set[int]()
    numbers = []
    for number, (first, before) in enumerate(branches.tolist()):
        if before < 0 or not mask[first]:
            continue
        if before in predicts or (before + 1 not in firsts and mask[before + 1]):
            numbers.append(number)
        predicts.add(before)
    return numbers


def _agreed(a: bytes, b: bytes) -> int:
    """Leading tokens, of four bytes each, that two samples have in common."""
    length = min(len(a), len(b)) // 4
    first, other = (np.frombuffer(data, np.int32, length) for data in (a, b))
    differs = np.flatnonzero(first != other)
    return int(differs[0]) if len(differs) else length


def _least(agreed: Sequence[int]) -> list[tuple[int, ...]]:
    """By sorted sample, the tokens in common with those before. `agreed`: with the one before."""
    stack, in_common = list[int](), [tuple[int, ...]()]
    for number in agreed:
        while stack and stack[-1] >= number:
            stack.pop()
        stack.append(number)
        in_common.append(tuple(stack))
    return in_common


@dataclass(frozen=True)
class _Set:
    """Samples that begin with the same tokens."""

    members: list[int]
    begin: int
    """Tokens in documents already."""
    level: int
    """Prefixes known to be the same."""
    parent: int
    depth: int
    """Shared prefixes above."""
    is_family: bool = False
    """Whether the samples agree on all that each of them may share."""


def documents(
    sizes: Sequence[Size], members: Iterable[int], *, saves: float, deepest: int = DEEPEST
) -> list[Document]:
    """How one packed sequence computes the samples `members` (indices into `sizes`), depth first. A
    prefix is shared if that saves tokens, and at least the fraction `saves` (0 to 1) of its
    samples'.
    """
    docs: list[Document] = []
    everyone = list(members)
    waiting = [_Set(everyone, 0, 0, -1, 0)] if everyone else []
    while waiting:
        node = waiting.pop()
        if len(node.members) == 1 or node.depth == deepest:
            docs += [
                Document(n, node.begin, sizes[n].length, node.parent, False) for n in node.members
            ]
            continue
        if node.depth == deepest - 1 and not node.is_family:
            # The last prefixes that there may be are the longest: all that a family shares.
            waiting += reversed(
                [
                    _Set(family, node.begin, node.level, node.parent, node.depth, is_family=True)
                    for family in families(sizes, node.members)
                ]
            )
            continue
        level = _common(sizes, node.members, node.level)
        first, begin, parent, depth = sizes[node.members[0]], node.begin, node.parent, node.depth
        agreed = first.prefixes[level - 1].length if level else 0
        others = len(node.members) - 1
        whole = sum(sizes[n].length for n in node.members)
        saved, rest = (agreed - begin) * others, whole - begin * len(node.members)
        # A family is shared wherever it would be without shorter prefixes; see `FamilyBalance`.
        is_expected = all(len(sizes[n].prefixes) == level for n in node.members) and (
            agreed * others >= saves * whole
        )
        if saved > 0 and (saved >= saves * rest or is_expected):
            docs.append(Document(node.members[0], begin, agreed, parent, True))
            begin, parent, depth = agreed, len(docs) - 1, depth + 1
        waiting += reversed(
            [
                _Set(members, begin, level, parent, depth)
                for members in _divided(sizes, node.members, level)
            ]
        )
    return docs


def families(sizes: Sequence[Size], members: Iterable[int]) -> list[list[int]]:
    """Samples `members` (indices into `sizes`) by `Size.family`; one without is alone."""
    groups: dict[Hashable, list[int]] = {}
    for n in members:
        family = sizes[n].family
        groups.setdefault(("alone", n) if family is None else family, []).append(n)
    return list(groups.values())


def _common(sizes: Sequence[Size], members: Sequence[int], at_least: int) -> int:
    """First `prefixes` that all `members` share, `at_least` so many."""
    first = sizes[members[0]].prefixes
    level = len(first)
    for n in members:
        prefixes = sizes[n].prefixes
        level = min(level, len(prefixes))
        # If two samples have a prefix in common, they have all shorter ones.
        while level > at_least and prefixes[level - 1] != first[level - 1]:
            level -= 1
        if level == at_least:
            break
    return level


def _divided(sizes: Sequence[Size], members: Sequence[int], level: int) -> Iterator[list[int]]:
    """Samples by the prefix after the first `level`; one without it is alone."""
    groups: dict[Hashable, list[int]] = {}
    for n in members:
        prefixes = sizes[n].prefixes
        groups.setdefault(prefixes[level] if len(prefixes) > level else n, []).append(n)
    yield from groups.values()
