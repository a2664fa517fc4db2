"""Distribute samples evenly over ranks and packed sequences. Pure arithmetic on their lengths.

Every rank computes the same result, so that nothing is communicated:

    lengths of samples -> split over ranks -> packed sequences of at most a token budget, equally
        many on every rank

Samples with a prefix in common cost less together. `FamilyBalance` keeps them together while work
stays even.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

ATTENTION_TOKENS = 4096.0
"""Sequence length at which attention costs about as much per token as the linear layers."""

MOST_BOUNDED = 16
"""Largest number of samples a packed sequence by which the number of packed sequences is bounded
from below before one is tried."""

GAIN = 0.02
"""The samples of a family are divided into more parts, for more ranks, only if that lowers the
largest work of a rank by this share."""


def work(length: int) -> float:
    """Relative cost of a sample of `length` tokens: linear layers plus causal attention."""
    return length + length * length / (2 * ATTENTION_TOKENS)


def split(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Assign samples to `parts` ranks: sample counts differ by at most 1, and work is about even.

    Returns for each rank the ascending indices into `lengths`. The algorithm is greedy: the longest
    sample first, each to the rank with the least work among those that may take one more.
    """
    base, extra = divmod(len(lengths), parts)
    # (load, rank, count); `extra` ranks may take one sample more than `base`.
    heap = [(0.0, rank, 0) for rank in range(parts)]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for position in sorted(range(len(lengths)), key=lambda p: (-lengths[p], p)):
        skipped = []
        while True:
            load, rank, count = heapq.heappop(heap)
            if count < base or (count == base and extra > 0):
                break
            skipped.append((load, rank, count))
        if count == base:
            extra -= 1
        dealt[rank].append(position)
        heapq.heappush(heap, (load + work(lengths[position]), rank, count + 1))
        for item in skipped:
            heapq.heappush(heap, item)
    return [sorted(positions) for positions in dealt]


def rows(lengths: Sequence[int], budget: int, at_least: int = 1) -> list[list[int]]:
    """Pack samples into packed sequences ("rows") of at most `budget` tokens, evenly filled. A
    sample of more than `budget` tokens gets a row of its own.

    Returns for each row the ascending indices into `lengths`. There are at least `at_least` rows,
    of which some are empty if there are too few samples.
    """
    if not lengths:
        return [[] for _ in range(at_least)]
    order = sorted(range(len(lengths)), key=lambda p: (-lengths[p], p))
    # The part of a sample beyond the budget fills no other row.
    count = max(at_least, -(-sum(min(length, budget) for length in lengths) // budget), 1)
    for most in range(1, MOST_BOUNDED + 1):  # samples of which a row has room for so many only
        large = sum(length * (most + 1) > budget for length in lengths)
        count = max(count, -(-large // most))
    while True:
        # The least filled row first, so that rows and hence ranks are even; if a sample does not
        # fit, start again with one row more.
        heap = [(0, index) for index in range(count)]
        packed: list[list[int]] = [[] for _ in range(count)]
        for position in order:
            filled, index = heap[0]
            if filled and filled + lengths[position] > budget:
                break
            heapq.heapreplace(heap, (filled + lengths[position], index))
            packed[index].append(position)
        else:
            return [sorted(row) for row in packed]
        count += 1


def rows_in_step(lengths_per_rank: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
    """Pack each rank's samples into packed sequences, equally many on every rank.

    Some may be empty. `lengths_per_rank`: tokens of each sample, by rank; `budget`: tokens of a
    packed sequence. Returns by rank and packed sequence the positions in the rank's lengths.
    """
    needed = max(len(rows(lengths, budget)) for lengths in lengths_per_rank)
    while True:
        packed = [rows(lengths, budget, at_least=needed) for lengths in lengths_per_rank]
        most = max(len(made) for made in packed)
        if all(len(made) == most for made in packed):
            return packed
        needed = most


class Size(NamedTuple):
    """Tokens of a sample, some of which the samples of its family have in common."""

    length: int
    """Number of tokens."""
    family: Hashable = None
    """Samples of the same family begin with the same `prefix` tokens; None: no other does."""
    prefix: int = 0
    """Number of tokens that all samples of the family begin with, below `length`; packed together,
    they are computed once."""


class FamilyBalance:
    """Like `split` and `rows_in_step`, for samples of families whose prefix is computed once for
    all members in a packed sequence.
    """

    def __init__(self, sizes: Sequence[Size], saves: float = 0.0) -> None:
        """`saves`: share of the tokens of a family's samples that their prefix must save to be
        computed once; see `megarl.trainer.prefixes.tree_of`.
        """
        self.sizes, self.saves = sizes, saves

    def tokens(self, members: Iterable[int]) -> int:
        """Number of tokens that are computed for the samples `members` in one packed sequence."""
        return sum(
            sum(self.sizes[n].length for n in family) - self._common(family) * (len(family) - 1)
            for family in self._families(members)
        )

    def work(self, members: Iterable[int]) -> float:
        """Relative cost of the samples `members`, packed together; as `work`."""
        return sum(
            sum(work(self.sizes[n].length) for n in family)
            - work(self._common(family)) * (len(family) - 1)
            for family in self._families(members)
        )

    def _common(self, family: Sequence[int]) -> int:
        """Number of tokens that are computed once for these members of a family."""
        prefix, tokens = self.sizes[family[0]].prefix, sum(self.sizes[n].length for n in family)
        return prefix if prefix * (len(family) - 1) >= self.saves * tokens else 0

    def split(self, parts: int) -> list[list[int]]:
        """Assign the samples to `parts` ranks, with about even work. Families are divided as little
        as that allows: each division computes a prefix once more.

        Returns for each rank the ascending indices into `sizes`.
        """
        best, least = [[] for _ in range(parts)], float("inf")
        largest = max((len(one) for one in self._families(range(len(self.sizes)))), default=1)
        if largest == 1:
            return split([size.length for size in self.sizes], parts)
        pieces = 1
        while True:
            dealt = self._dealt(pieces, parts)
            found = max((self.work(one) for one in dealt), default=0.0)
            if found < least * (1 - GAIN):
                best, least = dealt, found
            if pieces >= largest:
                return best
            pieces = min(2 * pieces, largest)

    def rows_in_step(self, dealt: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
        """Pack each rank's samples into packed sequences of at most `budget` computed tokens,
        equally many on every rank; some may be empty. A family that does not fit is divided into as
        few parts as do.

        `dealt`: for each rank, indices into `sizes`. Returns by rank and packed sequence the
        positions in the rank's list.
        """
        chunks = [
            [chunk for family in self._families(one) for chunk in self._fitting(family, budget)]
            for one in dealt
        ]
        lengths = [[self.tokens(chunk) for chunk in one] for one in chunks]
        packed = rows_in_step(lengths, budget)
        if not self._fit(chunks, packed, budget):
            # Together, parts of a family may save too little for their prefix to be computed once.
            # They then have at most `saves` more tokens of their own than when it was.
            packed = rows_in_step(lengths, int(budget * (1 - min(self.saves, 1.0))))
        found = []
        for mine, own, made in zip(dealt, chunks, packed, strict=True):
            place = {number: position for position, number in enumerate(mine)}
            found.append([sorted(place[n] for c in row for n in own[c]) for row in made])
        return found

    def _fit(
        self,
        chunks: Sequence[Sequence[list[int]]],
        packed: Sequence[Sequence[Sequence[int]]],
        budget: int,
    ) -> bool:
        """Whether no packed sequence of several `chunks` has more than `budget` tokens. Both are by
        rank; `packed` has indices into the rank's chunks.
        """
        return all(
            len(row) < 2 or self.tokens(n for c in row for n in own[c]) <= budget
            for own, made in zip(chunks, packed, strict=True)
            for row in made
        )

    def _families(self, members: Iterable[int]) -> list[list[int]]:
        """`members` by family; a sample is alone if it has none, or if nothing is computed once for
        those of its family.
        """
        found: dict[Hashable, list[int]] = {}
        for n in members:
            family = self.sizes[n].family
            found.setdefault(("alone", n) if family is None else family, []).append(n)
        return [
            part
            for family in found.values()
            for part in ([family] if self._common(family) else [[n] for n in family])
        ]

    def _divided(self, family: Sequence[int], parts: int) -> list[list[int]]:
        """Divide the members of one family into parts of about even work."""
        prefix = self.sizes[family[0]].prefix
        weights = [self.sizes[n].length - prefix for n in family]
        made = split(weights, min(parts, len(family)))
        return [[family[place] for place in part] for part in made]

    def _fitting(self, family: Sequence[int], budget: int) -> list[list[int]]:
        """A family in parts that fit into `budget` tokens each, about as few as there can be: the
        longest sample first, each into the first part with room. A sample that is too long is
        alone.
        """
        if self.tokens(family) <= budget:
            return [list(family)]
        prefix, parts = self.sizes[family[0]].prefix, list[list[int]]()
        left: list[int] = []
        """Tokens that each part has room for."""
        for n in sorted(family, key=lambda n: (-self.sizes[n].length, n)):
            own = self.sizes[n].length - prefix
            place = next((at for at, room in enumerate(left) if own <= room), len(parts))
            if place == len(parts):
                parts.append([])
                left.append(budget - prefix)
            parts[place].append(n)
            left[place] -= own
        # Too few to share: what the parts save may be below what sharing must save.
        return [
            part
            for made in parts
            for part in ([made] if self.tokens(made) <= budget else [[n] for n in made])
        ]

    def _dealt(self, pieces: int, parts: int) -> list[list[int]]:
        """The samples of each of `parts` ranks if every family is divided into `pieces`: the most
        work first, to the rank with the least.
        """
        whole = self._families(range(len(self.sizes)))
        chunks = [chunk for family in whole for chunk in self._divided(family, pieces)]
        chunks.sort(key=lambda chunk: (-self.work(chunk), chunk))
        heap = [(0.0, rank) for rank in range(parts)]
        dealt: list[list[int]] = [[] for _ in range(parts)]
        for chunk in chunks:
            load, rank = heap[0]
            heapq.heapreplace(heap, (load + self.work(chunk), rank))
            dealt[rank] += chunk
        return [sorted(one) for one in dealt]
