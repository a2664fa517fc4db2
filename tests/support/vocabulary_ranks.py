"""Ranks that share a vocabulary, as threads, and a record of the largest tensor that an operator
returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.kernels.logprobs import VocabularyShard

DEADLINE_S = 30.0


class Ranks:
    """Threads that reduce tensors with each other. A rank that is late or fails ends the wait of
    all.
    """

    def __init__(self, size: int) -> None:
        self.size, self.calls = size, [[] for _ in range(size)]
        self._barrier = threading.Barrier(size, timeout=DEADLINE_S)
        self._given: list[torch.Tensor] = [torch.empty(0)] * size

    def reducer(
        self, rank: int, name: str, combine: Callable[..., torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            assert tensor.is_contiguous()
            self.calls[rank].append((name, tuple(tensor.shape), tensor.dtype))
            self._given[rank] = tensor
            self._barrier.wait()
            found = combine(torch.stack(self._given), dim=0)
            self._barrier.wait()
            return tensor.copy_(found)

        return reduce

    def shards(self, sizes: list[int]) -> list[VocabularyShard]:
        firsts = [sum(sizes[:rank]) for rank in range(self.size)]
        return [
            VocabularyShard(
                first,
                max(sizes),
                self.reducer(rank, "max", torch.amax),
                self.reducer(rank, "sum", torch.sum),
            )
            for rank, first in enumerate(firsts)
        ]

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """What `body(rank)` returns on each."""
        results, errors = [None] * self.size, []

        def rank_of(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [
            threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads), "a rank did not end"
        if errors:  # rather the cause than the broken barriers of the others
            raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return results


class Largest(TorchDispatchMode):
    """The most elements of any tensor that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        found = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *found])
        return result
