"""Distribute samples with common prefixes evenly over ranks and packed sequences.

Like `balance.py`, but a packed sequence counts every shared prefix once (`prefix_tree.py`). Ranks
and packed sequences get ranges of the tree's samples, from left to right. The cut between two ranks
may divide a family, the samples with the same shareable tokens; that between two packed sequences
does only where the family does not fit into one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from megarl.parallel.balance import rows_in_step, split_by_work, work_within
from megarl.parallel.prefix_tree import Document, Size, documents

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

    def split(self, parts: int) -> list[list[int]]:
        """Assign all units to `parts` ranks, with about even work. Returns by rank the ascending
        numbers of its units.
        """
        everyone = range(len(self.sizes) // self.together)
        paths, documents = self._paths(everyone)
        if not any(document.is_shared for document in documents):
            return split_by_work([self.work([unit]) for unit in everyone], parts)
        costs = list(map(self._work, documents))
        ranges = _evenly([[unit] for unit in paths], paths, costs, parts, sum(costs))
        return [sorted(units) for units in ranges] + [[] for _ in range(parts - len(ranges))]

    def rows_in_step(self, dealt: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
        """Pack each rank's units into packed sequences of at most `budget` computed tokens, equally
        many on every rank; some may be empty. A larger unit is alone.

        `dealt`: as `split` returns. Returns by rank and packed sequence, the largest work first,
        indices into the rank's list.
        """
        packed = self._rows_in_order(dealt, budget)
        indices = []
        for units, rows in zip(dealt, packed, strict=True):
            index = {number: position for position, number in enumerate(units)}
            # Ranks compute their k-th packed sequences at the same time.
            rows = sorted(rows, key=lambda row: -self.work(row))
            indices.append([sorted(index[n] for n in row) for row in rows])
        return indices

    def _rows_in_order(self, dealt: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
        trees = [self._paths(units) for units in dealt]
        if not any(document.is_shared for _, tree in trees for document in tree):
            lengths = [[self.tokens([unit]) for unit in units] for units in dealt]
            packed = rows_in_step(lengths, budget)
            return [
                [[units[n] for n in row] for row in rows]
                for units, rows in zip(dealt, packed, strict=True)
            ]
        parts = []
        for paths, tree in trees:
            costs = [float(document.end - document.begin) for document in tree]
            parts.append((self._whole_families(paths, budget), paths, costs))
        fewest = max(len(_filled(*part, budget)) for part in parts)
        packed = [
            [row for wide in _evenly(*part, fewest, budget) for row in self._halved(wide, budget)]
            for part in parts
        ]
        most = max(map(len, packed))
        return [rows + [[] for _ in range(most - len(rows))] for rows in packed]

    def _whole_families(self, units: Iterable[int], budget: int) -> list[list[int]]:
        """`units` by family, in their order; alone where the family is larger than `budget`."""
        by_family = [list(group) for _, group in groupby(units, self._family)]
        return [
            chunk
            for family in by_family
            for chunk in ([family] if self.tokens(family) <= budget else [[n] for n in family])
        ]

    def _family(self, unit: int) -> object:
        first = unit * self.together
        names = {size.family for size in self.sizes[first : first + self.together]}
        return names.pop() if len(names) == 1 and None not in names else ("alone", unit)

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


def _filled(
    chunks: Sequence[Sequence[int]],
    paths: Mapping[int, Sequence[int]],
    costs: Sequence[float],
    capacity: float,
) -> list[list[int]]:
    """The units of `chunks` in their order, in the longest ranges of whole chunks of at most
    `capacity`, where a document costs once. `paths`: {unit: documents}.
    """
    ranges: list[list[int]] = []
    held, filled = set[int](), 0.0
    for chunk in chunks:
        needed = {index for unit in chunk for index in paths[unit]}
        more = sum(costs[index] for index in needed - held)
        if ranges and filled + more <= capacity:
            ranges[-1] += chunk
            held |= needed
            filled += more
        else:
            ranges.append([*chunk])
            held, filled = needed, sum(costs[index] for index in needed)
    return ranges


def _evenly(
    chunks: Sequence[Sequence[int]],
    paths: Mapping[int, Sequence[int]],
    costs: Sequence[float],
    most: int,
    capacity: float,
) -> list[list[int]]:
    """`_filled` with about the smallest capacity that makes at most `most` ranges."""
    best, low = _filled(chunks, paths, costs, capacity), 0.0
    for _ in range(BISECTIONS):
        middle = (low + capacity) / 2
        ranges = _filled(chunks, paths, costs, middle)
        if len(ranges) <= most:
            best, capacity = ranges, middle
        else:
            low = middle
    return best
