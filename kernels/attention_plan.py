"""Which rank has which tokens of a packed sequence under context parallelism, and the attention
work that follows.

Ranks of a Ulysses group exchange tokens for heads; groups exchange keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megarl.kernels.attention_cudnn import CudnnBlock
from megarl.kernels.block import Block, Positions
from megarl.kernels.block_cpu import CpuBlock
from megarl.kernels.block_flash import FlashBlock
from megarl.kernels.block_reference import ReferenceBlock


def _triton() -> Block:
    from megarl.kernels.block_triton import TritonBlock  # needs triton

    return TritonBlock()


BLOCKS: dict[str, Callable[[], Block]] = {
    "reference": ReferenceBlock,
    "cpu": CpuBlock,
    "triton": _triton,
    "flash": FlashBlock,
    "cudnn": CudnnBlock,
}
"""{name: function that makes the block attention kernel}"""


def default_block(device: torch.device) -> str:
    return "triton" if device.type == "cuda" else "cpu"


def _hops(positions: Sequence[Positions], starts: torch.Tensor, parents: Sequence[int] = ()) -> int:
    """Ring steps, 0 to size - 1, after which no query on a later rank attends to the keys."""
    size, num_documents = len(positions), max(starts.numel() - 1, 1)
    last_query = torch.full((size, num_documents), -1, dtype=torch.int64)
    first_key = torch.full((size, num_documents), torch.iinfo(torch.int64).max)
    edges = starts.to(device="cpu", dtype=torch.int64)
    for rank, group in enumerate(positions):
        document = torch.searchsorted(edges, group.index, right=True) - 1
        last_query[rank].scatter_reduce_(0, document, group.index, "amax")
        first_key[rank].scatter_reduce_(0, document, group.index, "amin")
    # The queries of a document's descendants come after all its keys; children come after parents.
    for document in reversed(range(len(parents))):
        if (parent := parents[document]) >= 0:
            last_query[:, parent] = torch.maximum(last_query[:, parent], last_query[:, document])
    # A rank sees keys of another if its last query of a document sees the other's first key.
    sees = (last_query[:, None] >= first_key[None]).any(-1)
    pairs = sees.nonzero()
    return int(((pairs[:, 0] - pairs[:, 1]) % size).max()) if len(pairs) else 0


def _hops_within(positions: Sequence[Positions], window: int) -> int:
    """As `_hops`, with a sliding window."""
    size, keys = len(positions), [group.index.sort().values for group in positions]
    hops = 0
    for rank, group in enumerate(positions):
        views = group.views(window)
        for distance in range(hops + 1, size):
            other = keys[(rank - distance) % size]
            if any(
                bool((torch.searchsorted(other, view.first) < _end(other, view.index)).any())
                for view in views
            ):
                hops = distance
    return hops


def _attended(keys: torch.Tensor, queries: Positions, window: int | None) -> torch.Tensor:
    """[L] bool: whether any of the `queries` attends to the key at each position `keys` [L],
    ascending.
    """
    attended = torch.zeros(len(keys), dtype=torch.bool)
    for view in queries.views(window):
        first, end = torch.searchsorted(keys, view.first), _end(keys, view.index)
        sees = end > first
        change = torch.zeros(len(keys) + 1, dtype=torch.int64)
        change.index_add_(0, first[sees], torch.ones_like(first[sees]))
        change.index_add_(0, end[sees], -torch.ones_like(end[sees]))
        attended |= change.cumsum(0)[:-1] > 0
    return attended


def _travelling(
    positions: Sequence[Positions], owner: int, window: int, hops: int
) -> list[torch.Tensor | None]:
    """By distance 0 to `hops` from rank `owner`: its keys, [n] ascending, that queries there or
    farther on attend to; None for all.
    """
    keys, order = positions[owner].index.sort()
    needed = torch.zeros(len(keys), dtype=torch.bool)
    travelling: list[torch.Tensor | None] = []
    for distance in range(hops, 0, -1):
        needed[order] |= _attended(keys, positions[(owner + distance) % len(positions)], window)
        travelling.append(_chosen(needed))
    return [None, *reversed(travelling)]


def _chosen(needed: torch.Tensor) -> torch.Tensor | None:
    """Indices [n] of the True in `needed` [L]; None where all are."""
    return None if bool(needed.all()) else needed.nonzero()[:, 0]


def _end(keys: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """[L]: number of `keys`, ascending, up to the positions `last` [L]."""
    return torch.searchsorted(keys, last, right=True)


def _longest(positions: Positions) -> int:
    if not len(positions.index):
        return 0
    return int(sum(view.index - view.first + 1 for view in positions.views()).max())


@dataclass
class AttentionPlan:
    """How the ranks of the sequence axis divide a micro-batch's attention. Layers with a sliding
    window use `plan.within(window)`.
    """

    lengths: list[int]
    """Tokens of each rank."""
    ulysses: int
    positions: list[Positions]
    """By Ulysses group, one rank's tokens after the other's."""
    hops: int
    """Ring steps that keys travel; no query farther on attends to them."""
    block: Block
    device: torch.device
    longest: int
    """Tokens of the longest document with those that it continues."""
    window: int | None = None
    """Most tokens that a query attends to, itself included; None for all."""
    _within: dict[int, AttentionPlan] = field(default_factory=dict, repr=False)
    _works: dict[tuple[int, int | None], list[Any]] = field(default_factory=dict, repr=False)
    _parts: dict[int, list[torch.Tensor | None]] = field(default_factory=dict, repr=False)
    _sent: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        indices: Sequence[torch.Tensor],
        starts: torch.Tensor,
        device: torch.device,
        *,
        parents: Sequence[int] = (),
        begins: Sequence[int] = (),
        ulysses: int = 1,
        block: str | Callable[[], Block] | None = None,
    ) -> AttentionPlan:
        """Every rank makes it with the same arguments but the device; nothing is communicated.
        `parents` and `begins` as in `Positions.of`.

        Args:
            indices: by rank, positions [L_r] int64 of its tokens.
            starts: [D + 1] first position of each document, then the sequence's length.
            device: where work lists are kept.
            ulysses: ranks of a Ulysses group; divides the number of ranks.
            block: a name in `BLOCKS`, or what makes one; None for that of the device.

        Raises:
            ValueError: `ulysses` does not divide the number of ranks, or there is no such block.
        """
        if ulysses < 1 or len(indices) % ulysses:
            raise ValueError(
                f"{len(indices)} sequence ranks cannot be split in Ulysses groups of {ulysses}; set"
                " training.sequence.ulysses to a divisor"
            )
        name = default_block(device) if block is None else block
        make = BLOCKS.get(name) if isinstance(name, str) else name
        if make is None:
            raise ValueError(
                f"no attention block is called {name!r}; set one of {', '.join(BLOCKS)}"
            )
        groups = range(0, len(indices), ulysses)
        joined = [torch.cat(list(indices[start : start + ulysses])) for start in groups]
        positions = [Positions.of(index, starts, parents, begins) for index in joined]
        lengths = [int(index.numel()) for index in indices]
        hops = _hops(positions, starts, parents)
        longest = max((_longest(group) for group in positions), default=0)
        return AttentionPlan(lengths, ulysses, positions, hops, make(), device, longest)

    def within(self, window: int | None) -> AttentionPlan:
        """The plan for layers with this sliding window, the query included; kept."""
        if window is None or window >= self.longest:
            return self
        if window not in self._within:
            hops = _hops_within(self.positions, window)
            self._within[window] = replace(
                self, hops=hops, window=window, _within={}, _works={}, _parts={}, _sent={}
            )
        return self._within[window]

    @property
    def group_lengths(self) -> list[int]:
        """Tokens of each Ulysses group."""
        return [int(own.index.numel()) for own in self.positions]

    def part(self, owner: int, distance: int) -> torch.Tensor | None:
        """Keys of group `owner` that travel `distance` steps: ascending indices [n] int64 into its
        tokens, on the CPU, or None for all.
        """
        if self.window is None or distance > self.hops:
            return None
        if owner not in self._parts:
            self._parts[owner] = _travelling(self.positions, owner, self.window, self.hops)
        return self._parts[owner][distance]

    def travels(self, owner: int, distance: int) -> int:
        """Number of keys of group `owner` that travel `distance` steps."""
        chosen = self.part(owner, distance)
        return self.group_lengths[owner] if chosen is None else len(chosen)

    def passed_on(self, kv: torch.Tensor, owner: int, distance: int) -> torch.Tensor:
        """Those of `kv` [n, ...], `distance` steps from `owner`, that go on to the next rank."""
        have, next_ones = self.part(owner, distance), self.part(owner, distance + 1)
        if next_ones is None:
            return kv
        index = next_ones if have is None else torch.searchsorted(have, next_ones)
        return kv.index_select(0, index.to(kv.device))

    def sent(self, owner: int, rank: int) -> torch.Tensor | None:
        """Keys of group `owner` that queries of group `rank` attend to, as `part` returns them."""
        if self.window is None or owner == rank:
            return None
        if (owner, rank) not in self._sent:
            keys, order = self.positions[owner].index.sort()
            needed = torch.zeros(len(keys), dtype=torch.bool)
            needed[order] = _attended(keys, self.positions[rank], self.window)
            self._sent[owner, rank] = _chosen(needed)
        return self._sent[owner, rank]

    def num_sent(self, owner: int, rank: int) -> int:
        """Number of tokens that `owner` sends to `rank` by all-gather; 0 to itself."""
        if owner == rank:
            return 0
        chosen = self.sent(owner, rank)
        return self.group_lengths[owner] if chosen is None else len(chosen)

    def works(self, rank: int, owner: int | None) -> list[Any]:
        """What the block's kernels compute for queries of group `rank`, from `Block.prepare`:
        a list for keys of their own documents, then one for each level of shared prefixes that
        these continue, unless empty. The keys are those that arrive from `owner` around the ring;
        None for those of all groups.
        """
        if (rank, owner) not in self._works:
            groups = len(self.positions)
            # arriving: (group, indices of those of its keys that come here, or None for all)
            if owner is None:
                arriving = [(group, self.sent(group, rank)) for group in range(groups)]
            else:
                arriving = [(owner, self.part(owner, (rank - owner) % groups))]
            index, first = list[torch.Tensor](), list[torch.Tensor]()
            for group, chosen in arriving:
                positions = self.positions[group]
                index.append(positions.index if chosen is None else positions.index[chosen])
                first.append(positions.first if chosen is None else positions.first[chosen])
            keys = Positions(torch.cat(index), torch.cat(first))
            works = [
                self.block.prepare(queries, keys, self.device)
                for queries in self.positions[rank].views(self.window)
            ]
            self._works[rank, owner] = [work for work in works if work is not None]
        return self._works[rank, owner]
