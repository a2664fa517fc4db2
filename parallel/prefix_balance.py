"""Distribute samples with common prefixes evenly over ranks and packed sequences.

Like `balance.py`, but of the tokens of a packed sequence every shared prefix counts once
(`prefix_tree.py`). Several ways are compared, by the work of the packed sequences that they lead
to; every rank finds the same:

    by families   samples that may share the same tokens stay together; families are divided where
                  a packed sequence has no room for them, or where a rank would have too much work
    in order      the samples of the tree from left to right, so that families with a prefix in
                  common are neighbours; only where some have one
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megarl.parallel.balance import rows_in_step, split_by_work, work_within
from megarl.parallel.prefix_tree import Document, Size, documents, families

GAIN = 0.02
"""A way that computes more tokens is taken only if it lowers the largest work of a rank by this
fraction."""
PATIENCE = 2
"""The search for families (samples of one prompt) to divide ends after so many attempts, times the
number of ranks, that have not lowered the largest work of a rank."""
BISECTIONS = 16
"""Steps of the bisection by which consecutive units are divided into ranges of about equal cost."""


class FamilyBalance:
    """Divides the samples of a step over ranks (`split`) and packed sequences (`rows_in_step`),
    where a prefix that samples of one packed sequence have in common is computed once. Made from
    the length and shareable prefixes of each sample, `FamilyBalance(sizes)`.

    A unit is `together` (an argument, by default 1) consecutive samples that stay together. A
    family is the units with the same shareable tokens, as the responses to one prompt.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        saves: float = 0.0,
        *,
        windows: Sequence[int | None] = (),
        together: int = 1,
    ) -> None:
        """Describe the samples of a step; nothing is divided yet.

        Args:
            sizes: length of each sample and the prefixes that it may share.
            saves: a common prefix is computed once only if that saves at least this fraction (0 to
                1) of its samples' tokens.
            windows: the sliding window of each layer of the model in tokens, or None; empty where
                no layer has one.
            together: so many consecutive samples are a unit, which is not divided; the number of
                samples is a multiple of it.
        """
        self.sizes, self.saves, self.together = sizes, saves, together
        self._cost = work_within(windows)
        self._units = [self._unit(n) for n in range(len(sizes) // together)]
        """Each unit as one sample, which may share what all of its samples may."""

    def tokens(self, members: Iterable[int]) -> int:
        """Number of tokens that are computed if the units `members` are in one packed sequence,
        each shared prefix once. A unit is some consecutive samples that stay together (usually
        one), given by its number.
        """
        return sum(one.end - one.begin for one in self._documents(members))

    def work(self, members: Iterable[int]) -> float:
        """Relative cost of computing the units `members` in one packed sequence, each shared prefix
        once; 1 is the cost of the linear layers for one token. A unit is some consecutive samples
        that stay together (usually one), given by its number.
        """
        return sum(map(self._work, self._documents(members)))

    def split(self, parts: int, budget: int) -> list[list[int]]:
        """Assign all units to `parts` ranks, with about even work in the packed sequences of at
        most `budget` tokens that they are computed in. A unit is some consecutive samples that stay
        together (usually one). Samples with a common prefix are divided over several ranks only
        where even work or `budget` requires it, since each of these ranks computes the prefix once
        more.

        Returns for each rank the ascending numbers of its units.
        """
        best, least = [[] for _ in range(parts)], float("inf")
        enough = 0.0
        for dealt in self._ways_to_split(parts, budget):
            works = [self._packed_work(one, budget) for one in dealt]
            if max(works, default=0.0) < least * (1 - GAIN):
                best, least = dealt, max(works, default=0.0)
            # The first way divides a family only where it has to: no other computes much less.
            enough = enough or (1 + GAIN) * sum(works) / parts
            if least <= enough:
                break
        return [sorted(one) for one in best] + [[] for _ in range(parts - len(best))]

    def rows_in_step(self, dealt: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
        """Pack each rank's units into packed sequences of at most `budget` computed tokens, equally
        many on every rank, so that ranks take their micro-batches in step; some may be empty. A
        unit (some consecutive samples that stay together, usually one) of more tokens is alone.

        `dealt`: for each rank, the numbers of its units, as `split` returns them. Returns by rank
        and packed sequence the indices into the rank's list, the packed sequences with the most
        work first.
        """
        packed = self._rows_by_families(dealt, budget)
        if any(map(self._is_nested, dealt)):
            packed = min(packed, self._rows_in_order(dealt, budget), key=self._computed)
        found = []
        for mine, rows in zip(dealt, packed, strict=True):
            place = {number: position for position, number in enumerate(mine)}
            # Ranks compute their k-th packed sequences at the same time.
            rows = sorted(rows, key=lambda row: -self.work(row))
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

    def _packed_work(self, mine: Sequence[int], budget: int) -> float:
        """Work of the units `mine` of a rank, about as `rows_in_step` packs them: a prefix is
        computed in each packed sequence that holds some of its samples.
        """
        apart = sum(
            self.work(chunk)
            for family in self._families(mine)
            for chunk in self._fitting(family, budget)
        )
        if not self._is_nested(mine):
            return apart
        paths, found = self._paths(mine)
        rows = _filled(paths, [float(one.end - one.begin) for one in found], budget)
        return min(apart, sum(map(self.work, rows)))

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

    def _ways_to_split(self, parts: int, budget: int) -> Iterator[list[list[int]]]:
        """Ways to divide the units over `parts` ranks, the one that computes the fewest tokens
        first. Each is a list of the ranks' units.
        """
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
        yield _dealt(chunks, parts)[0]
        if parts > 1:
            yield self._split_of_largest(chunks, parts)
            yield self._split_in_line(fitting, parts)

    def _split_of_largest(
        self, chunks: Sequence[tuple[float, list[int]]], parts: int
    ) -> list[list[int]]:
        """The units of each of `parts` ranks. `chunks`: (work, units) of families, or of parts of
        them that fit into a packed sequence. Of the rank with the most work, the chunk with the
        most work is halved and all are dealt out again, as long as the most work becomes less.
        """
        best, least, left = _dealt(chunks, parts)[0], float("inf"), PATIENCE * parts
        chunks = list(chunks)
        while left:
            dealt, loads, held = _dealt(chunks, parts)
            fullest = max(range(parts), key=lambda rank: loads[rank])
            left -= 1
            if loads[fullest] < least:
                best, least, left = dealt, loads[fullest], PATIENCE * parts
            divisible = [one for one in held[fullest] if len(chunks[one][1]) > 1]
            if not divisible:
                break
            _, family = chunks.pop(max(divisible, key=lambda one: chunks[one][0]))
            chunks += [(self.work(one), one) for one in self._in_two(family)]
        return best

    def _split_in_line(self, chunks: Sequence[Sequence[int]], parts: int) -> list[list[int]]:
        """The units of each of `parts` ranks: of one chunk after the other, in ranges of about even
        work, so that no more chunks are divided than there are ranks.
        """
        paths: dict[int, list[int]] = {}
        costs = list[float]()
        for chunk in chunks:
            of_chunk, documents = self._paths(chunk)
            for unit, path in of_chunk.items():
                paths[unit] = [index + len(costs) for index in path]
            costs += map(self._work, documents)
        return _evenly(paths, costs, parts, sum(costs))

    def _in_two(self, family: Sequence[int]) -> list[list[int]]:
        """Divide two or more members of one family into two parts of about even work."""
        prefix = self._units[family[0]].shareable
        works = [self._cost(self._units[n].length - prefix) for n in family]
        made = split_by_work(works, 2)
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
        """Divide a family into about as few parts as possible, each of which computes at most
        `budget` tokens in a packed sequence of its own: its prefix once, and the rest of its units.
        Each unit, the longest first, goes to the first part with room for it. A unit that exceeds
        the budget by itself is a part of its own. Returns the units of each part.
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


def _dealt(
    chunks: Sequence[tuple[float, Sequence[int]]], parts: int
) -> tuple[list[list[int]], list[float], list[list[int]]]:
    """Deal `chunks`, each (work, units), out to `parts` ranks: the one with the most work first,
    each to the rank with the least work so far. Returns for each rank its units, its work, and the
    indices of its chunks.
    """
    heap = [(0.0, rank) for rank in range(parts)]
    dealt, held = [list[int]() for _ in range(parts)], [list[int]() for _ in range(parts)]
    for index in sorted(range(len(chunks)), key=lambda one: (-chunks[one][0], chunks[one][1])):
        work, units = chunks[index]
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + work, rank))
        dealt[rank] += units
        held[rank].append(index)
    loads = [load for load, _ in sorted(heap, key=lambda one: one[1])]
    return dealt, loads, held


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
