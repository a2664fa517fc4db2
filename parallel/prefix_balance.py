"""Distribute samples with common prefixes evenly over ranks and packed sequences.

Like `balance.py`, but a packed sequence counts every shared prefix once (`prefix_tree.py`). The
samples with the same shareable tokens, a family, stay together; a family is divided where it does
not fit. Where families share prefixes with each other, or ranks would be uneven, ranks and packed
sequences get ranges of the tree's samples, from left to right.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from megarl.parallel.balance import rows_in_step, split_by_work, work_within
from megarl.parallel.prefix_tree import Document, Size, documents

EVEN = 1.05
"""Largest work of a rank, of the mean, for which families are dealt out whole."""
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
        `budget` tokens. Returns by rank the ascending numbers of its units.
        """
        everyone = range(len(self.sizes) // self.together)
        chunks = self._chunks(self._paths(everyone)[0], budget)
        works = list(map(self.work, chunks))
        if all(len(chunk) == 1 for chunk in chunks):
            dealt = split_by_work(works, parts)
            return [sorted(chunks[n][0] for n in numbers) for numbers in dealt]
        dealt, most = _dealt(works, chunks, parts)
        if not self._is_nested(everyone) and most <= EVEN * sum(works) / parts:
            return dealt
        # One chunk after the other, in the tree's order.
        paths: dict[int, list[int]] = {}
        costs = list[float]()
        for chunk in chunks:
            of_chunk, documents = self._paths(chunk)
            paths |= {n: [index + len(costs) for index in path] for n, path in of_chunk.items()}
            costs += map(self._work, documents)
        ranges = _evenly(paths, costs, parts, sum(costs))
        return [sorted(units) for units in ranges] + [[] for _ in range(parts - len(ranges))]

    def rows_in_step(self, dealt: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
        """Pack each rank's units into packed sequences of at most `budget` computed tokens, equally
        many on every rank; some may be empty. A larger unit is alone.

        `dealt`: as `split` returns. Returns by rank and packed sequence, the largest work first,
        indices into the rank's list.
        """
        packed = self._rows(dealt, budget)
        indices = []
        for units, rows in zip(dealt, packed, strict=True):
            index = {number: position for position, number in enumerate(units)}
            # Ranks compute their k-th packed sequences at the same time.
            rows = sorted(rows, key=lambda row: -self.work(row))
            indices.append([sorted(index[n] for n in row) for row in rows])
        return indices

    def _rows(self, dealt: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
        if any(map(self._is_nested, dealt)):
            trees = []
            for units in dealt:
                paths, documents = self._paths(units)
                trees.append((paths, [float(doc.end - doc.begin) for doc in documents]))
            fewest = max(len(_filled(paths, costs, budget)) for paths, costs in trees)
            packed = [_evenly(paths, costs, fewest, budget) for paths, costs in trees]
        else:
            chunks = [self._chunks(units, budget) for units in dealt]
            lengths = [list(map(self.tokens, of_rank)) for of_rank in chunks]
            packed = [
                [[n for number in row for n in of_rank[number]] for row in rows]
                for of_rank, rows in zip(chunks, rows_in_step(lengths, budget), strict=True)
            ]
        packed = [[half for row in rows for half in self._halved(row, budget)] for rows in packed]
        most = max(map(len, packed))
        return [rows + [[] for _ in range(most - len(rows))] for rows in packed]

    def _chunks(self, units: Iterable[int], budget: int) -> list[list[int]]:
        """`units` by family; alone where it shares nothing, in parts where it exceeds `budget`."""
        chunks = list[list[int]]()
        for family in self._families(units):
            tokens = self.tokens(family)
            if tokens == sum(self.tokens([unit]) for unit in family):
                chunks += [[unit] for unit in family]
            elif tokens <= budget:
                chunks.append(family)
            else:
                for members in self._first_fit(family, budget):
                    chunks += self._halved(members, budget)
        return chunks

    def _first_fit(self, family: Sequence[int], budget: int) -> list[list[int]]:
        """A family in few parts of at most `budget` tokens, the longest unit first."""
        prefix = self.sizes[family[0] * self.together].shareable
        rests = {unit: self.tokens([unit]) - prefix for unit in family}
        parts, rooms = list[list[int]](), list[int]()
        for unit in sorted(family, key=lambda unit: (-rests[unit], unit)):
            number = next((n for n, room in enumerate(rooms) if rests[unit] <= room), len(parts))
            if number == len(parts):
                parts.append([])
                rooms.append(budget - prefix)
            parts[number].append(unit)
            rooms[number] -= rests[unit]
        return parts

    def _is_nested(self, units: Sequence[int]) -> bool:
        """Whether families share prefixes with each other."""
        return self.tokens(units) < sum(map(self.tokens, self._families(units)))

    def _families(self, units: Iterable[int]) -> list[list[int]]:
        by_name = dict[object, list[int]]()
        for unit in units:
            first = unit * self.together
            names = {size.family for size in self.sizes[first : first + self.together]}
            is_one = len(names) == 1 and None not in names
            by_name.setdefault(names.pop() if is_one else ("alone", unit), []).append(unit)
        return list(by_name.values())

    def _documents(self, members: Iterable[int]) -> list[Document]:
        samples = [n * self.together + offset for n in members for offset in range(self.together)]
        return documents(self.sizes, samples, saves=self.saves)

    def _work(self, document: Document) -> float:
        return self._cost(document.end) - self._cost(document.begin)

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

    def _halved(self, row: list[int], budget: int) -> list[list[int]]:
        """`row` in parts within `budget`, which may save too little to share."""
        if len(row) < 2 or self.tokens(row) <= budget:
            return [row]
        middle = len(row) // 2
        return [
            piece for half in (row[:middle], row[middle:]) for piece in self._halved(half, budget)
        ]


def _dealt(
    works: Sequence[float], chunks: Sequence[list[int]], parts: int
) -> tuple[list[list[int]], float]:
    """(by rank its units, ascending; the most work): each chunk to the rank with the least so far,
    the most work first.
    """
    heap = [(0.0, rank) for rank in range(parts)]
    dealt = [list[int]() for _ in range(parts)]
    for number in sorted(range(len(chunks)), key=lambda n: (-works[n], n)):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + works[number], rank))
        dealt[rank] += chunks[number]
    return list(map(sorted, dealt)), max(heap)[0]


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
