"""TODO"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.kernels.block import Block, Places
from megarl.kernels.blocks import BLOCKS, default_block


def _hops(places: Sequence[Places], starts: torch.Tensor) -> int:
    """How far keys must travel until nobody can see them any more, 0 to size - 1."""
    size, num_documents = len(places), max(starts.numel() - 1, 1)
    last_query = torch.full((size, num_documents), -1, dtype=torch.int64)
    first_key = torch.full((size, num_documents), torch.iinfo(torch.int64).max)
    edges = starts.to(device="cpu", dtype=torch.int64)
    for rank, owned in enumerate(places):
        document = torch.searchsorted(edges, owned.index, right=True) - 1
        last_query[rank].scatter_reduce_(0, document, owned.index, "amax")
        first_key[rank].scatter_reduce_(0, document, owned.index, "amin")
    # A rank's last query of a document sees the most: it sees another's keys if it sees the first
    # of them.
    sees = (last_query[:, None] >= first_key[None]).any(-1)
    pairs = sees.nonzero()
    return int(((pairs[:, 0] - pairs[:, 1]) % size).max()) if len(pairs) else 0


@dataclass
class AttentionPlan:
    """Who holds which tokens of one micro-batch, and the work lists that follow; made once, used by
    every layer.
    """

    lengths: list[int]
    """Tokens of each rank, in the order of the sequence axis."""
    ulysses: int
    places: list[Places]
    """Per outer rank: the places of its inner ranks' tokens together, in their order."""
    hops: int
    """Steps that keys travel round the outer ring; beyond, nobody sees them."""
    block: Block
    device: torch.device
    _made: dict[tuple[int, int | None], Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        indices: Sequence[torch.Tensor],
        starts: torch.Tensor,
        device: torch.device,
        *,
        ulysses: int = 1,
        block: str | None = None,
    ) -> AttentionPlan:
        """From each rank's token positions [L_r] int64 and the documents' starts [D + 1]; the same
        on every rank.

        `ulysses` divides the number of ranks; `block` is a name in `BLOCKS`, by default that of the
        device.
        """
        if ulysses < 1 or len(indices) % ulysses:
            raise ValueError(
                f"{len(indices)} sequence ranks cannot be split in Ulysses groups of {ulysses}; set"
                " a divisor"
            )
        name = default_block(device) if block is None else block
        if name not in BLOCKS:
            raise ValueError(
                f"no attention block is called {name!r}; set one of {', '.join(BLOCKS)}"
            )
        joined = [
            torch.cat(list(indices[start : start + ulysses]))
            for start in range(0, len(indices), ulysses)
        ]
        places = [Places.of(index, starts) for index in joined]
        lengths = [int(index.numel()) for index in indices]
        return AttentionPlan(
            lengths, ulysses, places, _hops(places, starts), BLOCKS[name](), device
        )

    @property
    def group_lengths(self) -> list[int]:
        """Tokens of each outer rank."""
        return [int(owned.index.numel()) for owned in self.places]

    def work(self, rank: int, owner: int | None) -> Any:
        """The work list of outer rank `rank`'s queries and `owner`'s keys, or everybody's (None);
        None where there is none.
        """
        if (rank, owner) not in self._made:
            if owner is None:
                keys = Places(
                    *(
                        torch.cat(parts)
                        for parts in zip(
                            *((p.index, p.doc_start) for p in self.places), strict=True
                        )
                    )
                )
            else:
                keys = self.places[owner]
            self._made[rank, owner] = self.block.prepare(self.places[rank], keys, self.device)
        return self._made[rank, owner]
