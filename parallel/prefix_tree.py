"""Which tokens of a packed sequence are computed once: its samples as a tree of prefixes.

    token ids that samples may share --chains--> each one's prefixes that others have too
        --documents--> shared prefixes and rests of samples, depth first

The same function says what is computed (`megarl.trainer.prefixes.tree_of`) and what samples cost
together (`megarl.parallel.balance`), so that budgets count exactly what is computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

DEEPEST = 8
"""Most prefixes that a sample may continue, one after the other."""


class Prefix(NamedTuple):
    """The first tokens of a sample."""

    length: int
    """Number of tokens, at least 1."""
    name: Hashable
    """The same for the same tokens, such as their digest."""


class Size(NamedTuple):
    """Tokens of a sample, the first of which other samples may have too."""

    length: int
    """Number of tokens."""
    prefixes: tuple[Prefix, ...] = ()
    """Prefixes of the sample that other samples have too, ascending; the last one is all that the
    sample may share, below `length`. Two samples of one set agree on the longest prefix that is in
    both lists, and on no further token that both may share."""

    @property
    def family(self) -> Hashable:
        """The same for samples whose shareable tokens are the same; None for a sample that may
        share none.
        """
        return self.prefixes[-1].name if self.prefixes else None

    @property
    def shareable(self) -> int:
        """Number of leading tokens that may be computed together with those of other samples."""
        return self.prefixes[-1].length if self.prefixes else 0


class Document(NamedTuple):
    """Tokens of a packed sequence that one document of the tree holds."""

    sample: int
    """The sample whose tokens these are, for a shared prefix the first one that begins with it."""
    begin: int
    """Number of the sample's tokens before the document."""
    end: int
    """Number of the sample's tokens up to the document's end."""
    parent: int
    """Number of the shared prefix that the document continues, or -1."""
    is_shared: bool
    """Whether this is a shared prefix, and not the rest of a sample."""


def chains(shareable: Sequence[np.ndarray]) -> list[tuple[Prefix, ...]]:
    """For each sample the prefixes of `Size.prefixes`. `shareable`: the token ids that each sample
    may share, not negative.
    """
    if not shareable:
        return []
    # Big-endian, so that bytes are in the order of the token ids.
    data = [np.ascontiguousarray(tokens, ">i4").tobytes() for tokens in shareable]
    distinct = sorted(set(data))
    agreed = [_agreed(a, b) for a, b in zip(distinct, distinct[1:], strict=False)]
    before = _least(agreed)
    after = reversed(_least(agreed[::-1]))
    found: dict[bytes, tuple[Prefix, ...]] = {}
    for tokens, left, right in zip(distinct, before, after, strict=True):
        digest, prefixes, done = blake2b(digest_size=16), [], 0
        for length in sorted({*left, *right, len(tokens) // 4} - {0}):
            digest.update(tokens[4 * done : 4 * length])
            prefixes.append(Prefix(length, digest.digest()))
            done = length
        found[tokens] = tuple(prefixes)
    return [found[tokens] for tokens in data]


def _agreed(a: bytes, b: bytes) -> int:
    """Number of leading tokens of four bytes each that two samples have in common."""
    length = min(len(a), len(b)) // 4
    one, other = (np.frombuffer(data, np.int32, length) for data in (a, b))
    differs = np.flatnonzero(one != other)
    return int(differs[0]) if len(differs) else length


def _least(agreed: Sequence[int]) -> list[tuple[int, ...]]:
    """For each of the sorted samples the numbers of tokens that it has in common with those before
    it, ascending. `agreed`: those of each sample but the first with the one before it.
    """
    stack, found = list[int](), [tuple[int, ...]()]
    for number in agreed:
        while stack and stack[-1] >= number:
            stack.pop()
        stack.append(number)
        found.append(tuple(stack))
    return found


@dataclass(frozen=True)
class _Set:
    """Samples that begin with the same tokens, while the tree is made."""

    members: list[int]
    begin: int
    """Number of their tokens that are in documents already."""
    level: int
    """Number of their prefixes that are known to be the same."""
    parent: int
    """Number of the document that they continue, or -1."""
    depth: int
    """Number of shared prefixes above."""
    is_family: bool = False
    """Whether the samples agree on all that each of them may share."""


def documents(
    sizes: Sequence[Size], members: Iterable[int], *, saves: float, deepest: int = DEEPEST
) -> list[Document]:
    """The documents of the samples `members`, indices into `sizes`, in one packed sequence: shared
    prefixes before what continues them, depth first.

    `saves`: share of the tokens of some samples that their common prefix must save to be shared; 0
    shares whatever saves a token. `deepest`: most prefixes that a sample may continue.
    """
    made: list[Document] = []
    everyone = list(members)
    waiting = [_Set(everyone, 0, 0, -1, 0)] if everyone else []
    while waiting:
        one = waiting.pop()
        if len(one.members) == 1 or one.depth == deepest:
            made += [
                Document(n, one.begin, sizes[n].length, one.parent, False) for n in one.members
            ]
            continue
        if one.depth == deepest - 1 and not one.is_family:
            # The last prefixes that there may be are the longest: all that a family shares.
            waiting += reversed(
                [
                    _Set(family, one.begin, one.level, one.parent, one.depth, is_family=True)
                    for family in families(sizes, one.members)
                ]
            )
            continue
        level = _common(sizes, one.members, one.level)
        first, begin, parent, depth = sizes[one.members[0]], one.begin, one.parent, one.depth
        agreed = first.prefixes[level - 1].length if level else 0
        others = len(one.members) - 1
        whole = sum(sizes[n].length for n in one.members)
        saved, rest = (agreed - begin) * others, whole - begin * len(one.members)
        # A family is shared wherever it would be without shorter prefixes; see `FamilyBalance`.
        is_expected = all(len(sizes[n].prefixes) == level for n in one.members) and (
            agreed * others >= saves * whole
        )
        if saved > 0 and (saved >= saves * rest or is_expected):
            made.append(Document(one.members[0], begin, agreed, parent, True))
            begin, parent, depth = agreed, len(made) - 1, depth + 1
        waiting += reversed(
            [
                _Set(part, begin, level, parent, depth)
                for part in _divided(sizes, one.members, level)
            ]
        )
    return made


def families(sizes: Sequence[Size], members: Iterable[int]) -> list[list[int]]:
    """Group the samples `members` (indices into `sizes`) by `Size.family`: samples of a group have
    the same shareable tokens, as the responses to one prompt have. A sample without shareable
    tokens is a group of its own.
    """
    found: dict[Hashable, list[int]] = {}
    for n in members:
        family = sizes[n].family
        found.setdefault(("alone", n) if family is None else family, []).append(n)
    return list(found.values())


def _common(sizes: Sequence[Size], members: Sequence[int], at_least: int) -> int:
    """Number of entries of `Size.prefixes`, from the first on, that are the same in all samples
    `members`. The caller knows that the first `at_least` are.
    """
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
    """Group samples whose first `level` entries of `Size.prefixes` are the same by the entry after
    them. A sample without a further entry is a group of its own.
    """
    found: dict[Hashable, list[int]] = {}
    for n in members:
        prefixes = sizes[n].prefixes
        found.setdefault(prefixes[level] if len(prefixes) > level else n, []).append(n)
    yield from found.values()
