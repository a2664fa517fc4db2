"""Ranks as threads of one process: an in-process `Exchange`, with a deadline for every wait.

It is stricter than a real one: a sender that touches a message before it has waited, ranks that
call different methods, and messages that nobody fetches are errors.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Mail:
    """Letters between simulated ranks, first in first out between each two of a kind."""

    def __init__(self, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s
        self.failed = False
        self.boxes: dict[Any, deque[Any]] = defaultdict(deque)
        self.changed = threading.Condition()

    def put(self, address: Any, letter: Any) -> None:
        with self.changed:
            self.boxes[address].append(letter)
            self.changed.notify_all()

    def take(self, address: Any) -> Any:
        with self.changed:
            here = self.changed.wait_for(
                lambda: self.boxes[address] or self.failed, self.deadline - time.monotonic()
            )
            if self.failed:
                raise Abandoned(f"another rank failed while this one waited for {address}")
            if not here:
                raise TimeoutError(f"nothing came for {address}")
            return self.boxes[address].popleft()

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()


class Abandoned(RuntimeError):
    """A rank that waited for one that failed: not the cause."""


class Letter:
    """What `shift` returns."""

    def __init__(self, mail: Mail, address: Any, shape: Sequence[int], sent: torch.Tensor) -> None:
        self.mail, self.address, self.shape = mail, address, tuple(shape)
        self.sent, self.as_sent = sent, sent.clone()

    def wait(self) -> torch.Tensor:
        assert torch.equal(self.sent, self.as_sent) or self.sent.isnan().any(), (
            "a message was changed while on its way"
        )
        found = self.mail.take(self.address)
        assert tuple(found.shape) == self.shape, (
            f"expected {self.shape}, but {tuple(found.shape)} came"
        )
        return found


class SimulatedExchange:
    """`Exchange` among threads. `calls` lists what was called; `bytes_sent` counts to others."""

    def __init__(self, mail: Mail, ranks: Sequence[int], rank: int) -> None:
        self.mail, self.ranks = mail, tuple(ranks)
        self.rank, self.size = self.ranks.index(rank), len(self.ranks)
        self.calls: list[str] = []
        self.bytes_sent = 0

    def shift(
        self, tensor: torch.Tensor, shape: Sequence[int], *, channel: int = 0, offset: int = 1
    ) -> Letter:
        kind = f"shift {offset % self.size} on {channel}"
        self.calls.append(kind)
        self.bytes_sent += tensor.numel() * tensor.element_size()
        target, source = ((self.rank + way * offset) % self.size for way in (1, -1))
        self.mail.put((self.ranks, kind, self.rank, target), tensor.clone())
        return Letter(self.mail, (self.ranks, kind, source, self.rank), shape, tensor)

    def _swap(self, kind: str, letters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Letter r to rank r; returns everybody's to me."""
        self.calls.append(kind)
        for target, letter in enumerate(letters):
            self.bytes_sent += letter.numel() * letter.element_size() * (target != self.rank)
            self.mail.put((self.ranks, kind, self.rank, target), letter.clone())
        return [
            self.mail.take((self.ranks, kind, source, self.rank)) for source in range(self.size)
        ]

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        found = self._swap("all_gather", [tensor] * self.size)
        assert [x.shape[0] for x in found] == list(lengths)
        return found

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(self._swap("reduce_scatter", pieces)).sum(0)

    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        found = self._swap("all_to_all", pieces)
        assert [tuple(x.shape) for x in found] == [tuple(shape) for shape in shapes]
        return found

    def split(self, inner_size: int) -> tuple[SimulatedExchange, SimulatedExchange]:
        """(inner, outer): `inner_size` neighbours, and the ranks with the same place among theirs."""
        me, first = self.ranks[self.rank], self.rank - self.rank % inner_size
        inner = SimulatedExchange(self.mail, self.ranks[first : first + inner_size], me)
        return inner, SimulatedExchange(
            self.mail, self.ranks[self.rank % inner_size :: inner_size], me
        )


def simulate(
    size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 300.0
) -> list[Any]:
    """What `function(exchange, *arguments)` returns on each of `size` ranks; raises the failure of
    the lowest.
    """
    mail = Mail(timeout_s)
    results: list[Any] = [None] * size
    failures: list[tuple[bool, int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            results[rank] = function(SimulatedExchange(mail, range(size), rank), *arguments)
        except BaseException as error:
            failures.append((isinstance(error, Abandoned), rank, error))
            mail.fail()

    threads = [
        threading.Thread(target=body, args=(rank,), daemon=True, name=f"rank-{rank}")
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, mail.deadline - time.monotonic()) + 5.0)
    if failures:
        raise min(failures, key=lambda failure: failure[:2])[2]
    assert not any(thread.is_alive() for thread in threads), (
        "a simulated rank hangs outside of the exchange"
    )
    left = [address for address, box in mail.boxes.items() if box]
    assert not left, f"messages nobody fetched: {left}"
    return results
