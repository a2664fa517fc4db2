"""Which tokens of a packed sequence are computed once: its samples as a tree of prefixes.

    token ids that samples may share --chains--> each one's prefixes that others have too
        --documents--> shared prefixes and rests of samples, depth first

The same function says what is computed (`megarl.trainer.prefixes.tree_of`) and what samples cost
together (`prefix_balance.py`), so that budgets count exactly what is computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

DEEPEST = 8
"""Most shared prefixes that a sample may consist of, one after the other, before its own rest."""


class Prefix(NamedTuple):
    """A prefix of a sample: the number of its tokens (`length`), and a hashable value (`name`, such
    as a digest of the tokens) that is equal for equal prefixes of different samples.
    """

    length: int
    """Number of tokens, at least 1."""
    name: Hashable
    """Equal for equal tokens, such as their digest."""


class Size(NamedTuple):
    """Length of a sample in tokens (`length`), and the prefixes that other samples have too, so
    that they could be computed once (`prefixes`, ascending by length; the last is all that the
    sample may share, such as its prompt).
    """

    length: int
    """Number of tokens; of a sample that is a tree, all that are computed (`copied`)."""
    prefixes: tuple[Prefix, ...] = ()
    """Prefixes of the sample that other samples have too, ascending by length; the last one is all
    that the sample may share (as the prompt), shorter than `length`. The longest prefix that is in
    the lists of two samples is all that the two have in common of what both may share."""

    @property
    def family(self) -> Hashable:
        """A value that is equal for samples whose shareable tokens are the same, as those of the
        responses to one prompt; None for a sample that may share none.
        """
        return self.prefixes[-1].name if self.prefixes else None

    @property
    def shareable(self) -> int:
        """Number of the sample's first tokens that may be computed once for this and other samples;
        0 for none.
        """
        return self.prefixes[-1].length if self.prefixes else 0


class Document(NamedTuple):
    """Tokens [begin, end) of sample number `sample` that are computed as one document of a packed
    sequence: either a prefix that several samples share (`is_shared`), or the rest of a sample.
    `parent` is the index, in the list of documents, of the shared prefix that this document
    continues, or -1.
    """

    sample: int
    """Index of the sample whose tokens these are; for a shared prefix, the first sample that begins
    with it."""
    begin: int
    """Number of the sample's tokens before the document."""
    end: int
    """Number of the sample's tokens up to the document's end."""
    parent: int
    """Index, in the list of documents, of the shared prefix that this document continues, or -1."""
    is_shared: bool
    """Whether this is a shared prefix, and not the rest of a sample."""


def chains(shareable: Sequence[np.ndarray]) -> list[tuple[Prefix, ...]]:
    """For each sample, its prefixes that other samples have too, as (number of tokens, digest that
    is equal for equal prefixes), ascending by length, with all its shareable tokens as the last:
    the value of `Size.prefixes`. `shareable`: for each sample the token ids [n] int, not negative,
    that it may share with others, such as its prompt. A sample with none gets an empty tuple.
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


def copied(branches: np.ndarray, mask: np.ndarray) -> list[int]:
    """Which of the `branches` ([B, 2], as `Samples.branches`) begin with a copy of the token that
    they continue. The state at a token predicts one token of those that follow it, so each further
    trained one needs a copy. `mask`: [T] bool, which tokens are trained.
    """
    firsts, predicts = set(branches[:, 0].tolist()), set[int]()
    found = []
    for number, (first, before) in enumerate(branches.tolist()):
        if before < 0 or not mask[first]:
            continue
        if before in predicts or (before + 1 not in firsts and mask[before + 1]):
            found.append(number)
        predicts.add(before)
    return found


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
    """How the samples `members` (indices into `sizes`) are computed in one packed sequence: a list
    of documents, which are shared prefixes and the rests of samples, each as a range of tokens of a
    sample. A prefix comes before what continues it, and its descendants follow it directly (depth
    first).

    `sizes`: for each sample its length and the prefixes that it may share. `saves`: a common prefix
    is computed once only if that saves at least this fraction (0 to 1) of its samples' tokens; 0
    shares whatever saves a token. `deepest`: most prefixes that a sample may continue, one after
    the other.
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
    """Group the samples `members` (indices into `sizes`): those of a group have the same shareable
    tokens (`Size.family`), as the responses to one prompt have. A sample without shareable tokens
    is a group of its own. Returns the indices of each group; groups are in the order of their first
    samples.
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
