"""Distribute samples with common prefixes evenly over ranks and packed sequences.

Like `megarl.parallel.balance`, but a packed sequence counts the tokens of its tree
(`megarl.parallel.prefix_tree`): every shared prefix once. Two ways are compared, by what they would
compute; every rank finds the same:

    by families   samples that may share the same tokens stay together, else as even as can be
    in order      the samples of the tree from left to right, so that families with a prefix in
                  common are neighbours; only where some have one
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from megarl.parallel.balance import rows_in_step, split, work_within
from megarl.parallel.prefix_tree import Document, Size, documents, families

GAIN = 0.02
"""The samples of a family are divided into more parts, for more ranks, only if that lowers the
largest work of a rank by this share."""
BISECTIONS = 16
"""Steps in the search for the smallest capacity of equally filled ranges."""


class FamilyBalance:
    """Divides units of consecutive samples, with each prefix counted once in a packed sequence. A
    family is the units whose samples may share the same tokens, all that each of them may share.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        saves: float = 0.0,
        *,
        windows: Sequence[int | None] = (),
        together: int = 1,
    ) -> None:
        """`sizes`: of samples, of which so many consecutive ones stay `together` as a unit; their
        number is a multiple of it. `saves`: share of the tokens of some samples that their common
        prefix must save to be computed once; see `megarl.trainer.prefixes.tree_of`. `windows`: the
        sliding window of each layer of the model in tokens, or None; empty where no layer has one.
        """
        self.sizes, self.saves, self.together = sizes, saves, together
        self._cost = work_within(windows)
        self._units = [self._unit(n) for n in range(len(sizes) // together)]
        """Each unit as one sample, which may share what all of its samples may."""

    def tokens(self, members: Iterable[int]) -> int:
        """Number of tokens that are computed for the units `members` in one packed sequence."""
        return sum(one.end - one.begin for one in self._documents(members))

    def work(self, members: Iterable[int]) -> float:
        """Relative cost of the units `members`, packed together; see `balance.work`."""
        return sum(map(self._work, self._documents(members)))

    def split(self, parts: int) -> list[list[int]]:
        """Assign the units to `parts` ranks, with about even work. Samples with a common prefix are
        divided as little as that allows: each division computes it once more.

        Returns for each rank the ascending numbers of its units.
        """
        everyone = range(len(self._units))
        dealt = self._split_by_families(parts)
        if parts > 1 and self._is_nested(everyone):
            paths, found = self._paths(everyone)
            costs = list(map(self._work, found))
            other = _evenly(paths, costs, parts, sum(costs))
            other = [sorted(one) for one in other] + [[] for _ in range(parts - len(other))]
            dealt = min(dealt, other, key=self._largest)
        return dealt

    def rows_in_step(self, dealt: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
        """Pack each rank's units into packed sequences of at most `budget` computed tokens, equally
        many on every rank; some may be empty. A unit of more tokens is alone.

        `dealt`: for each rank, numbers of units. Returns by rank and packed sequence the positions
        in the rank's list.
        """
        packed = self._rows_by_families(dealt, budget)
        if any(map(self._is_nested, dealt)):
            packed = min(packed, self._rows_in_order(dealt, budget), key=self._computed)
        found = []
        for mine, rows in zip(dealt, packed, strict=True):
            place = {number: position for position, number in enumerate(mine)}
            found.append([sorted(place[n] for n in row) for row in rows])
        return found

    def _unit(self, number: int) -> Size:
        first = number * self.together
        sizes = self.sizes[first : first + self.together]
        if self.together == 1:
            return sizes[0]
        length = sum(
            one.end - one.begin for one in documents(sizes, range(len(sizes)), saves=self.saves)
        )
        is_one = len({size.family for size in sizes}) == 1
        return Size(length, sizes[0].prefixes if is_one else ())

    def _documents(self, members: Iterable[int]) -> list[Document]:
        """The documents of a packed sequence of the units `members`."""
        samples = [n * self.together + part for n in members for part in range(self.together)]
        return documents(self.sizes, samples, saves=self.saves)

    def _work(self, document: Document) -> float:
        """Work of a document, whose tokens attend to those before it too."""
        return self._cost(document.end) - self._cost(document.begin)

    def _largest(self, dealt: Sequence[Sequence[int]]) -> float:
        """Work of the rank that has most."""
        return max(map(self.work, dealt), default=0.0)

    def _computed(self, packed: Sequence[Sequence[Sequence[int]]]) -> tuple[int, int]:
        """(number of packed sequences of a rank, tokens of all ranks): fewer of either are better.
        `packed`: units by rank and packed sequence.
        """
        return len(packed[0]), sum(self.tokens(row) for rows in packed for row in rows)

    # Units in the order of the tree.

    def _is_nested(self, members: Iterable[int]) -> bool:
        """Whether families share prefixes with each other."""
        members = list(members)
        return self.tokens(members) < sum(map(self.tokens, self._families(members)))

    def _paths(self, members: Iterable[int]) -> tuple[dict[int, list[int]], list[Document]]:
        """({unit: indices of all documents that hold tokens of it}, the documents) of one packed
        sequence of the units `members`; the units are in the order of the tree.
        """
        found = self._documents(members)
        paths: dict[int, list[int]] = {}
        for index, document in enumerate(found):
            if not document.is_shared:
                path = paths.setdefault(document.sample // self.together, [])
                while index >= 0 and index not in path:
                    path.append(index)
                    index = found[index].parent
        return paths, found

    def _rows_in_order(self, dealt: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
        """The units of each rank's packed sequences: neighbours in the tree."""
        packed = []
        for mine in dealt:
            paths, found = self._paths(mine)
            costs = [float(one.end - one.begin) for one in found]
            fewest = len(_filled(paths, costs, budget))
            ranges = _evenly(paths, costs, fewest, budget)
            packed.append([row for one in ranges for row in self._halved(one, budget)])
        most = max(map(len, packed))
        return [rows + [[] for _ in range(most - len(rows))] for rows in packed]

    def _halved(self, row: list[int], budget: int) -> list[list[int]]:
        """`row` in as many parts as fit into `budget`: what it shares may be too little for sharing
        although more units with the same prefix share it.
        """
        if len(row) < 2 or self.tokens(row) <= budget:
            return [row]
        middle = len(row) // 2
        return [
            part for half in (row[:middle], row[middle:]) for part in self._halved(half, budget)
        ]

    # Units by families.

    def _common(self, family: Sequence[int]) -> int:
        """Number of tokens that are computed once for these members of a family."""
        units = self._units
        prefix, tokens = units[family[0]].shareable, sum(units[n].length for n in family)
        return prefix if prefix * (len(family) - 1) >= self.saves * tokens else 0

    def _families(self, members: Iterable[int]) -> list[list[int]]:
        """`members` by family; a unit is alone if it has none, or if nothing is computed once for
        those of its family.
        """
        return [
            part
            for family in families(self._units, members)
            for part in ([family] if self._common(family) else [[n] for n in family])
        ]

    def _split_by_families(self, parts: int) -> list[list[int]]:
        """As `split`; families are whole, or in as many pieces as it takes."""
        best, least = [[] for _ in range(parts)], float("inf")
        largest = max((len(one) for one in self._families(range(len(self._units)))), default=1)
        if largest == 1:
            return split([self.work([n]) for n in range(len(self._units))], parts)
        pieces = 1
        while True:
            dealt = self._dealt(pieces, parts)
            found = self._largest(dealt)
            if found < least * (1 - GAIN):
                best, least = dealt, found
            if pieces >= largest:
                return best
            pieces = min(2 * pieces, largest)

    def _dealt(self, pieces: int, parts: int) -> list[list[int]]:
        """The units of each of `parts` ranks if every family is divided into `pieces`: the most
        work first, to the rank with the least.
        """
        whole = self._families(range(len(self._units)))
        chunks = [chunk for family in whole for chunk in self._divided(family, pieces)]
        weighed = sorted((-self.work(chunk), chunk) for chunk in chunks)
        heap = [(0.0, rank) for rank in range(parts)]
        dealt: list[list[int]] = [[] for _ in range(parts)]
        for negative, chunk in weighed:
            load, rank = heap[0]
            heapq.heapreplace(heap, (load - negative, rank))
            dealt[rank] += chunk
        return [sorted(one) for one in dealt]

    def _divided(self, family: Sequence[int], parts: int) -> list[list[int]]:
        """Divide the members of one family into parts of about even work."""
        prefix = self._units[family[0]].shareable
        works = [self._cost(self._units[n].length - prefix) for n in family]
        made = split(works, min(parts, len(family)))
        return [[family[place] for place in part] for part in made]

    def _rows_by_families(
        self, dealt: Sequence[Sequence[int]], budget: int
    ) -> list[list[list[int]]]:
        """The units of each rank's packed sequences. A family that does not fit is divided into as
        few parts as do.
        """
        chunks = [
            [chunk for family in self._families(one) for chunk in self._fitting(family, budget)]
            for one in dealt
        ]
        lengths = [[self.tokens(chunk) for chunk in one] for one in chunks]

        def packed(budget: int) -> list[list[list[int]]]:
            made = rows_in_step(lengths, budget)
            return [
                [[n for c in row for n in own[c]] for row in rows]
                for own, rows in zip(chunks, made, strict=True)
            ]

        found = packed(budget)
        if all(len(row) < 2 or self.tokens(row) <= budget for rows in found for row in rows):
            return found
        # Together, parts of a family may save too little for their prefix to be computed once.
        # They then have at most `saves` more tokens of their own than when it was.
        return packed(int(budget * (1 - min(self.saves, 1.0))))

    def _fitting(self, family: Sequence[int], budget: int) -> list[list[int]]:
        """A family in parts that fit into `budget` tokens each, about as few as there can be: the
        longest unit first, each into the first part with room. A unit that is too long is alone.
        """
        if self.tokens(family) <= budget:
            return [list(family)]
        prefix, parts = self._units[family[0]].shareable, list[list[int]]()
        left: list[int] = []
        """Tokens that each part has room for."""
        for n in sorted(family, key=lambda n: (-self._units[n].length, n)):
            own = self._units[n].length - prefix
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


def _filled(
    paths: Mapping[int, Sequence[int]], costs: Sequence[float], capacity: float
) -> list[list[int]]:
    """Units in their order, in ranges of at most `capacity`, each as long as it can be. A unit of
    more than that is alone. `paths`: the documents of each unit, which are counted once in a range;
    `costs`: of each document.
    """
    ranges: list[list[int]] = []
    held, filled = set[int](), 0.0
    for unit, path in paths.items():
        more = sum(costs[index] for index in path if index not in held)
        if ranges and filled + more <= capacity:
            ranges[-1].append(unit)
            filled += more
        else:
            ranges.append([unit])
            held, filled = set(), sum(costs[index] for index in path)
        held.update(path)
    return ranges


def _evenly(
    paths: Mapping[int, Sequence[int]], costs: Sequence[float], most: int, capacity: float
) -> list[list[int]]:
    """`_filled` with about the smallest capacity for which there are at most `most` ranges, as
    there are with `capacity`.
    """
    best, low = _filled(paths, costs, capacity), 0.0
    for _ in range(BISECTIONS):
        middle = (low + capacity) / 2
        found = _filled(paths, costs, middle)
        if len(found) <= most:
            best, capacity = found, middle
        else:
            low = middle
    return best
