"""Distribute samples with common prefixes evenly over ranks and packed sequences.

Like `balance.py`, but a packed sequence counts every shared prefix once (`prefix_tree.py`). Every
rank compares the same ways, by the work of their packed sequences:

    by families   samples with the same shareable tokens stay together; a family is divided where it
                  does not fit, or a rank would have too much work
    in order      the samples of the tree from left to right, where families share prefixes
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megarl.parallel.balance import rows_in_step, split_by_work, work_within
from megarl.parallel.prefix_tree import Document, Size, documents, families

GAIN = 0.02
"""A way that computes more tokens has to lower the largest work of a rank by this fraction."""
BISECTIONS = 16
"""Steps that divide consecutive units into ranges of about equal cost."""


class FamilyBalance:
    """Divides the samples of a step over ranks (`split`) and packed sequences (`rows_in_step`).

    A unit is `together` consecutive samples; a family is the units with the same shareable tokens,
    as responses to one prompt.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        saves: float = 0.0,
        *,
        windows: Sequence[int | None] = (),
        together: int = 1,
    ) -> None:
        """Describe the samples of a step.

        Args:
            sizes: length of each sample and the prefixes that it may share.
            saves: fraction (0 to 1) of its samples' tokens that sharing a prefix must save.
            windows: by layer, the sliding window in tokens or None; empty for none.
            together: samples of a unit; divides their number.
        """
        self.sizes, self.saves, self.together = sizes, saves, together
        self._cost = work_within(windows)
        self._units = [self._unit(n) for n in range(len(sizes) // together)]

    def tokens(self, members: Iterable[int]) -> int:
        """Tokens computed for the units `members` in one packed sequence."""
        return sum(doc.end - doc.begin for doc in self._documents(members))

    def work(self, members: Iterable[int]) -> float:
        """Cost of the units `members` in one packed sequence; 1 is the linear layers for one
        token.
        """
        return sum(map(self._work, self._documents(members)))

    def split(self, parts: int, budget: int) -> list[list[int]]:
        """Assign all units to `parts` ranks, with about even work in packed sequences of at most
        `budget` tokens. A family is divided only where that requires it, since each rank computes
        the prefix.

        Returns by rank the ascending numbers of its units.
        """
        best, least = [[] for _ in range(parts)], float("inf")
        enough = 0.0
        for dealt in self._ways_to_split(parts, budget):
            works = [self._packed_work(units, budget) for units in dealt]
            if max(works, default=0.0) < least * (1 - GAIN):
                best, least = dealt, max(works, default=0.0)
            # The first way divides a family only where it has to: no other computes much less.
            enough = enough or (1 + GAIN) * sum(works) / parts
            if least <= enough:
                break
        return [sorted(units) for units in best] + [[] for _ in range(parts - len(best))]

    def rows_in_step(self, dealt: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
        """Pack each rank's units into packed sequences of at most `budget` computed tokens, equally
        many on every rank; some may be empty. A larger unit is alone.

        `dealt`: as `split` returns. Returns by rank and packed sequence, the largest work first,
        indices into the rank's list.
        """
        packed = self._rows_by_families(dealt, budget)
        if any(map(self._is_nested, dealt)):
            packed = min(packed, self._rows_in_order(dealt, budget), key=self._computed)
        indices = []
        for units, rows in zip(dealt, packed, strict=True):
            index = {number: position for position, number in enumerate(units)}
            # Ranks compute their k-th packed sequences at the same time.
            rows = sorted(rows, key=lambda row: -self.work(row))
            indices.append([sorted(index[n] for n in row) for row in rows])
        return indices

    def _unit(self, number: int) -> Size:
        first = number * self.together
        sizes = self.sizes[first : first + self.together]
        if self.together == 1:
            return sizes[0]
        length = sum(
            doc.end - doc.begin for doc in documents(sizes, range(len(sizes)), saves=self.saves)
        )
        is_one = len({size.family for size in sizes}) == 1
        return Size(length, sizes[0].prefixes if is_one else ())

    def _documents(self, members: Iterable[int]) -> list[Document]:
        samples = [n * self.together + offset for n in members for offset in range(self.together)]
        return documents(self.sizes, samples, saves=self.saves)

    def _work(self, document: Document) -> float:
        return self._cost(document.end) - self._cost(document.begin)

    def _packed_work(self, units: Sequence[int], budget: int) -> float:
        """Work of a rank's units, about as `rows_in_step` packs them."""
        apart = sum(
            self.work(chunk)
            for family in self._families(units)
            for chunk in self._fitting(family, budget)
        )
        if not self._is_nested(units):
            return apart
        paths, documents = self._paths(units)
        rows = _filled(paths, [float(doc.end - doc.begin) for doc in documents], budget)
        return min(apart, sum(map(self.work, rows)))

    def _computed(self, packed: Sequence[Sequence[Sequence[int]]]) -> tuple[int, int]:
        """(packed sequences of a rank, tokens of all ranks): fewer of either are better."""
        return len(packed[0]), sum(self.tokens(row) for rows in packed for row in rows)

    # Units in the order of the tree.

    def _is_nested(self, members: Iterable[int]) -> bool:
        """Whether families share prefixes with each other."""
        members = list(members)
        return self.tokens(members) < sum(map(self.tokens, self._families(members)))

    def _paths(self, members: Iterable[int]) -> tuple[dict[int, list[int]], list[Document]]:
        """({unit: indices of the documents that hold its tokens}, the documents), in the tree's
        order.
        """
        documents = self._documents(members)
        paths: dict[int, list[int]] = {}
        for index, document in enumerate(documents):
            if not document.is_shared:
                path = paths.setdefault(document.sample // self.together, [])
                while index >= 0 and index not in path:
                    path.append(index)
                    index = documents[index].parent
        return paths, documents

    def _rows_in_order(self, dealt: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
        packed = []
        for units in dealt:
            paths, documents = self._paths(units)
            costs = [float(doc.end - doc.begin) for doc in documents]
            fewest = len(_filled(paths, costs, budget))
            ranges = _evenly(paths, costs, fewest, budget)
            packed.append([row for wide in ranges for row in self._halved(wide, budget)])
        most = max(map(len, packed))
        return [rows + [[] for _ in range(most - len(rows))] for rows in packed]

    def _halved(self, row: list[int], budget: int) -> list[list[int]]:
        """`row` in parts within `budget`, which may save too little to share."""
        if len(row) < 2 or self.tokens(row) <= budget:
            return [row]
        middle = len(row) // 2
        return [
            piece for half in (row[:middle], row[middle:]) for piece in self._halved(half, budget)
        ]

    # Units by families.

    def _common(self, family: Sequence[int]) -> int:
        """Tokens that are computed once for these members of a family."""
        units = self._units
        prefix, tokens = units[family[0]].shareable, sum(units[n].length for n in family)
        return prefix if prefix * (len(family) - 1) >= self.saves * tokens else 0

    def _families(self, members: Iterable[int]) -> list[list[int]]:
        """`members` by family; alone where a family would share nothing."""
        return [
            group
            for family in families(self._units, members)
            for group in ([family] if self._common(family) else [[n] for n in family])
        ]

    def _ways_to_split(self, parts: int, budget: int) -> Iterator[list[list[int]]]:
        """Divisions over `parts` ranks, the one with the fewest tokens first."""
        everyone = range(len(self._units))
        whole = self._families(everyone)
        if all(len(family) == 1 for family in whole):
            yield split_by_work([self.work(family) for family in whole], parts)
            return
        if parts > 1 and self._is_nested(everyone):
            paths, documents = self._paths(everyone)
            costs = list(map(self._work, documents))
            yield _evenly(paths, costs, parts, sum(costs))
        # What does not fit into one packed sequence computes its prefix in each of several, and may
        # as well be on several ranks.
        fitting = [chunk for family in whole for chunk in self._fitting(family, budget)]
        chunks = [(self.work(chunk), chunk) for chunk in fitting]
        yield _dealt(chunks, parts)
        if parts > 1:
            yield self._split_in_line(fitting, parts)

    def _split_in_line(self, chunks: Sequence[Sequence[int]], parts: int) -> list[list[int]]:
        """One chunk after the other: fewer chunks than ranks are divided."""
        paths: dict[int, list[int]] = {}
        costs = list[float]()
        for chunk in chunks:
            of_chunk, documents = self._paths(chunk)
            for unit, path in of_chunk.items():
                paths[unit] = [index + len(costs) for index in path]
            costs += map(self._work, documents)
        return _evenly(paths, costs, parts, sum(costs))

    def _rows_by_families(
        self, dealt: Sequence[Sequence[int]], budget: int
    ) -> list[list[list[int]]]:
        chunks = [
            [chunk for family in self._families(units) for chunk in self._fitting(family, budget)]
            for units in dealt
        ]
        lengths = [[self.tokens(chunk) for chunk in units] for units in chunks]

        def packed(budget: int) -> list[list[list[int]]]:
            by_rank = rows_in_step(lengths, budget)
            return [
                [[n for c in row for n in chunk[c]] for row in rows]
                for chunk, rows in zip(chunks, by_rank, strict=True)
            ]

        by_families = packed(budget)
        if all(len(row) < 2 or self.tokens(row) <= budget for rows in by_families for row in rows):
            return by_families
        # Together, parts of a family may save too little for their prefix to be computed once.
        # They then have at most `saves` more tokens of their own than when it was.
        return packed(int(budget * (1 - min(self.saves, 1.0))))

    def _fitting(self, family: Sequence[int], budget: int) -> list[list[int]]:
        """Divide a family into few parts of at most `budget` tokens: first fit, the longest unit
        first.
        """
        if self.tokens(family) <= budget:
            return [list(family)]
        prefix, parts = self._units[family[0]].shareable, list[list[int]]()
        left: list[int] = []
        """Tokens that each part has room for."""
        for n in sorted(family, key=lambda n: (-self._units[n].length, n)):
            length = self._units[n].length - prefix
            index = next((at for at, room in enumerate(left) if length <= room), len(parts))
            if index == len(parts):
                parts.append([])
                left.append(budget - prefix)
            parts[index].append(n)
            left[index] -= length
        # Too few to share: what the parts save may be below what sharing must save.
        return [
            group
            for units in parts
            for group in ([units] if self.tokens(units) <= budget else [[n] for n in units])
        ]


def _dealt(chunks: Sequence[tuple[float, list[int]]], parts: int) -> list[list[int]]:
    """By rank its units of `chunks`, (work, units): the most work first, each to the rank with the
    least so far.
    """
    heap = [(0.0, rank) for rank in range(parts)]
    dealt = [list[int]() for _ in range(parts)]
    for work, units in sorted(chunks, key=lambda chunk: (-chunk[0], chunk[1])):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + work, rank))
        dealt[rank] += units
    return dealt


def _filled(
    paths: Mapping[int, Sequence[int]], costs: Sequence[float], capacity: float
) -> list[list[int]]:
    """Units in their order, in the longest ranges of at most `capacity`, where a document costs
    once. `paths`: {unit: documents}.
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
    """`_filled` with about the smallest capacity that makes at most `most` ranges."""
    best, low = _filled(paths, costs, capacity), 0.0
    for _ in range(BISECTIONS):
        middle = (low + capacity) / 2
        ranges = _filled(paths, costs, middle)
        if len(ranges) <= most:
            best, capacity = ranges, middle
        else:
            low = middle
    return best
