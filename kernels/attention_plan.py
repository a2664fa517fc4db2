"""Which rank has which tokens of a packed sequence under context parallelism, and the attention
work (lists of queries and keys) that follows.

A Ulysses group is the ranks that exchange tokens for heads; groups exchange keys and values around
a ring or by all-gather. With Ulysses groups of one rank, a group is a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

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
}
"""{name: function that makes the block attention kernel}."""


def default_block(device: torch.device) -> str:
    """Name of the kernel by which `AttentionPlan` computes attention on this device: "triton" on
    GPUs, "cpu" elsewhere. Both are keys of `BLOCKS`, whose values make the kernels.
    """
    return "triton" if device.type == "cuda" else "cpu"


def _hops(positions: Sequence[Positions], starts: torch.Tensor, parents: Sequence[int] = ()) -> int:
    """Number of ring steps, 0 to size - 1, after which keys and values need not be passed on: no
    query on a later rank attends to them.

    `positions`: for each rank, its tokens. `starts` [D + 1]: first position of each of the D
    documents, then the length. `parents`: see `Positions.of`.
    """
    size, num_documents = len(positions), max(starts.numel() - 1, 1)
    last_query = torch.full((size, num_documents), -1, dtype=torch.int64)
    first_key = torch.full((size, num_documents), torch.iinfo(torch.int64).max)
    edges = starts.to(device="cpu", dtype=torch.int64)
    for rank, own in enumerate(positions):
        document = torch.searchsorted(edges, own.index, right=True) - 1
        last_query[rank].scatter_reduce_(0, document, own.index, "amax")
        first_key[rank].scatter_reduce_(0, document, own.index, "amin")
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
    size, keys = len(positions), [own.index.sort().values for own in positions]
    found = 0
    for rank, own in enumerate(positions):
        views = own.views(window)
        for distance in range(found + 1, size):
            other = keys[(rank - distance) % size]
            if any(
                bool((torch.searchsorted(other, view.first) < _end(other, view.index)).any())
                for view in views
            ):
                found = distance
    return found


def _attended(keys: torch.Tensor, queries: Positions, window: int | None) -> torch.Tensor:
    """[L] bool: whether any of the `queries` attends to the key at each of the positions `keys` [L]
    (ascending). `window`: the sliding window.
    """
    found = torch.zeros(len(keys), dtype=torch.bool)
    for view in queries.views(window):
        first, end = torch.searchsorted(keys, view.first), _end(keys, view.index)
        sees = end > first
        change = torch.zeros(len(keys) + 1, dtype=torch.int64)
        change.index_add_(0, first[sees], torch.ones_like(first[sees]))
        change.index_add_(0, end[sees], -torch.ones_like(end[sees]))
        found |= change.cumsum(0)[:-1] > 0
    return found


def _travelling(
    positions: Sequence[Positions], owner: int, window: int, hops: int
) -> list[torch.Tensor | None]:
    """For each distance 0 to `hops` from rank `owner` around the ring: which of its tokens' keys
    travel so far, because a query there or farther on attends to them, as [n] int64 ascending
    indices into its tokens; None for all of them. `window`: the sliding window.
    """
    keys, order = positions[owner].index.sort()
    needed = torch.zeros(len(keys), dtype=torch.bool)
    found: list[torch.Tensor | None] = []
    for distance in range(hops, 0, -1):
        needed[order] |= _attended(keys, positions[(owner + distance) % len(positions)], window)
        found.append(_chosen(needed))
    return [None, *reversed(found)]


def _chosen(needed: torch.Tensor) -> torch.Tensor | None:
    """[n] int64 ascending indices of the True in `needed` [L]; None where all are."""
    return None if bool(needed.all()) else needed.nonzero()[:, 0]


def _end(keys: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """[L] number of `keys`, ascending, up to the positions `last` [L]."""
    return torch.searchsorted(keys, last, right=True)


def _longest(positions: Positions) -> int:
    """Largest number of tokens that one of these queries attends to."""
    if not len(positions.index):
        return 0
    return int(sum(view.index - view.first + 1 for view in positions.views()).max())


@dataclass
class AttentionPlan:
    """How the attention of one packed micro-batch is divided among the ranks of the sequence
    (context-parallel) axis: which tokens each rank has, and the work lists (which queries attend to
    which keys) that the attention kernel gets in every layer. Each rank makes it once for a
    micro-batch with `AttentionPlan.of(indices, starts, device)` and passes it to
    `sequence_attention`, for layers with a sliding window as `plan.within(window)`.
    """

    lengths: list[int]
    """Number of tokens of each rank of the sequence (context-parallel) axis, in its order."""
    ulysses: int
    """Number of ranks in a Ulysses group: ranks that exchange tokens for heads."""
    positions: list[Positions]
    """By Ulysses group, where the tokens of its ranks are in the packed sequence, one rank's after
    the other's."""
    hops: int
    """Steps, each to the next Ulysses group, that keys and values travel around the ring; no query
    farther on attends to them."""
    block: Block
    """The block attention kernel that computes attention of some queries to some keys."""
    device: torch.device
    """Device on which the block kernel's work lists are."""
    longest: int
    """Number of tokens of the longest sample: a document with those that it continues."""
    window: int | None = None
    """A query attends to so many tokens of its sample at most, itself included; None for all."""
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
        block: str | None = None,
    ) -> AttentionPlan:
        """Make the plan of one micro-batch. Every rank calls it with the same arguments but the
        device; nothing is communicated.

        Args:
            indices: by rank, positions of its tokens in the packed sequence, [L_r] int64.
            starts: [D + 1] int: first position of each of the D documents, then the sequence's
                length.
            device: where work lists are kept.
            parents: for each document, the number of the document that it continues (as a response
                continues its prompt), or -1. A document's tokens attend to those of its parent, and
                of the parent's parents, too. A parent comes before its children, and between them
                only its other descendants. Empty where no document continues another.
            begins: for each document, the number of tokens before it that it continues, where these
                are not all tokens of its parents; see `Positions.of`.
            ulysses: ranks of a Ulysses group; divides the number of ranks.
            block: a name in `BLOCKS`; None for "triton" on GPUs and "cpu" elsewhere.

        Raises:
            ValueError: `ulysses` does not divide the number of ranks, or there is no such block.
        """
        if ulysses < 1 or len(indices) % ulysses:
            raise ValueError(
                f"{len(indices)} sequence ranks cannot be split in Ulysses groups of {ulysses}; set"
                " training.sequence.ulysses to a divisor"
            )
        name = default_block(device) if block is None else block
        if name not in BLOCKS:
            raise ValueError(
                f"no attention block is called {name!r}; set one of {', '.join(BLOCKS)}"
            )
        groups = range(0, len(indices), ulysses)
        joined = [torch.cat(list(indices[start : start + ulysses])) for start in groups]
        positions = [Positions.of(index, starts, parents, begins) for index in joined]
        lengths = [int(index.numel()) for index in indices]
        hops = _hops(positions, starts, parents)
        longest = max((_longest(own) for own in positions), default=0)
        return AttentionPlan(lengths, ulysses, positions, hops, BLOCKS[name](), device, longest)

    def within(self, window: int | None) -> AttentionPlan:
        """The plan for layers with a sliding window of `window` tokens, the query included. It is
        this plan itself for None, and where no sample (a document with those that it continues) is
        longer than the window. Made at the first call for a window, then kept.
        """
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
        """Number of tokens of each Ulysses group (ranks that exchange tokens for heads), by
        group.
        """
        return [int(own.index.numel()) for own in self.positions]

    def part(self, owner: int, distance: int) -> torch.Tensor | None:
        """Which keys of Ulysses group `owner` travel `distance` steps around the ring, from group
        to group: ascending indices [n] int64 into the tokens of `owner` (ranks one after the
        other), on the CPU, or None for all. Without a sliding window it is always None, and also
        for a distance beyond `hops`, the most steps that any keys travel in this plan.
        """
        if self.window is None or distance > self.hops:
            return None
        if owner not in self._parts:
            self._parts[owner] = _travelling(self.positions, owner, self.window, self.hops)
        return self._parts[owner][distance]

    def travels(self, owner: int, distance: int) -> int:
        """Number of keys of Ulysses group `owner` that travel `distance` steps around the ring,
        from group to group. Without a sliding window that is all keys of `owner`.
        """
        chosen = self.part(owner, distance)
        return self.group_lengths[owner] if chosen is None else len(chosen)

    def passed_on(self, kv: torch.Tensor, owner: int, distance: int) -> torch.Tensor:
        """The keys and values that a rank sends to the next one in ring attention. `kv` [n, ...]
        are the keys and values of Ulysses group `owner` that have travelled `distance` steps; the
        result [m, ...] are those of them that some query farther on attends to, hence all without a
        sliding window.
        """
        have, next_ones = self.part(owner, distance), self.part(owner, distance + 1)
        if next_ones is None:
            return kv
        place = next_ones if have is None else torch.searchsorted(have, next_ones)
        return kv.index_select(0, place.to(kv.device))

    def sent(self, owner: int, rank: int) -> torch.Tensor | None:
        """Which keys of Ulysses group `owner` are attended to by some query of group `rank`:
        ascending indices [n] int64 into the tokens of `owner`, on the CPU, or None for all. Without
        a sliding window, and where `rank` is `owner`, it is None.
        """
        if self.window is None or owner == rank:
            return None
        if (owner, rank) not in self._sent:
            keys, order = self.positions[owner].index.sort()
            needed = torch.zeros(len(keys), dtype=torch.bool)
            needed[order] = _attended(keys, self.positions[rank], self.window)
            self._sent[owner, rank] = _chosen(needed)
        return self._sent[owner, rank]

    def num_sent(self, owner: int, rank: int) -> int:
        """Number of tokens whose keys and values Ulysses group `owner` sends to group `rank` by the
        all-gather transport (all at once rather than around the ring); 0 if `owner` is `rank`.
        """
        if owner == rank:
            return 0
        chosen = self.sent(owner, rank)
        return self.group_lengths[owner] if chosen is None else len(chosen)

    def works(self, rank: int, owner: int | None) -> list[Any]:
        """Work lists (which queries attend to which keys) of the block attention kernel, for
        queries of Ulysses group `rank` and keys of group `owner`. The first list is for keys of the
        queries' own documents. One more follows for each level of documents that these continue, as
        a response continues its prompt. Lists without work are left out.

        `owner` None stands for the keys of all groups that queries of `rank` attend to,
        concatenated by group. With a number, the keys are those that travel from `owner` to `rank`
        around the ring. Each list has the type that the kernel's `prepare` returns, and is passed
        to its `forward` and `backward`. Made at the first call, then kept.
        """
        if (rank, owner) not in self._works:
            groups = len(self.positions)
            if owner is None:
                arriving = [(group, self.sent(group, rank)) for group in range(groups)]
            else:
                arriving = [(owner, self.part(owner, (rank - owner) % groups))]
            index, first = list[torch.Tensor](), list[torch.Tensor]()
            for group, chosen in arriving:
                own = self.positions[group]
                index.append(own.index if chosen is None else own.index[chosen])
                first.append(own.first if chosen is None else own.first[chosen])
            keys = Positions(torch.cat(index), torch.cat(first))
            made = [
                self.block.prepare(queries, keys, self.device)
                for queries in self.positions[rank].views(self.window)
            ]
            self._works[rank, owner] = [work for work in made if work is not None]
        return self._works[rank, owner]
