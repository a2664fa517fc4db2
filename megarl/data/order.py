"""The order in which the rows of a data set, or of a mixture, are used in training."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from fractions import Fraction


class Order:
    """The order of `num_rows` rows over all epochs. With `shuffle` each epoch is a new permutation,
    which depends on `seed` and epoch only; otherwise rows come in file order.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        self.num_rows, self._seed, self._shuffle = num_rows, seed, shuffle
        self._epochs: dict[int, list[int]] = {}

    def row(self, ordinal: int) -> int:
        """The row at position `ordinal` of training, from 0 over all epochs."""
        epoch, position = divmod(ordinal, self.num_rows)
        return self._permutation(epoch)[position] if self._shuffle else position

    def _permutation(self, epoch: int) -> list[int]:
        rows = self._epochs.get(epoch)
        if rows is None:
            # Sorted by hash, not `random.shuffle`: the same on every version of every library.
            def key(row: int) -> bytes:
                return hashlib.blake2b(
                    f"{self._seed}/{epoch}/{row}".encode(), digest_size=16
                ).digest()

            rows = sorted(range(self.num_rows), key=key)
            while len(self._epochs) >= 2:  # where one epoch runs into the next, both are in use
                self._epochs.pop(next(iter(self._epochs)), None)
            self._epochs[epoch] = rows
        return rows


class Interleaving:
    """Which source of a mixture gives the prompt at each position of training, without random
    draws: every stretch of positions has nearly the fractions of the weights.

    Source 0 takes its share of the positions, evenly spaced, source 1 its share of the rest, and so
    on: with r = the source's weight / the sum of its and all later weights, it takes its m-th
    remaining position, from 0, if floor((m + 1) r + 1/2) > floor(m r + 1/2). Of the first n
    positions, each of k sources gets n x its fraction, with an error of at most (k - 1) / 2;
    independent draws would be off by about the square root of n. Computed in O(k), in exact
    arithmetic.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        """`weights`: one above 0 for each source, of any sum."""
        self._shares = [
            weight / sum(weights[number:], Fraction(0)) for number, weight in enumerate(weights)
        ]

    def at(self, ordinal: int) -> tuple[int, int]:
        """(source that gives the prompt at position `ordinal`, number of earlier positions that it
        gives).
        """
        for number, share in enumerate(self._shares):
            before = _rounded(ordinal * share)
            if _rounded((ordinal + 1) * share) > before:
                return number, before
            ordinal -= before
        raise AssertionError("the last share is 1, whose positions are all")


def _rounded(value: Fraction) -> int:
    """The nearest integer; a half is rounded up."""
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)


class MixedOrder:
    """The order of the rows of several data sets, which are numbered from 0 over all of them; each
    has its own shuffled epochs.
    """

    def __init__(self, interleaving: Interleaving, orders: Sequence[Order]) -> None:
        self._interleaving, self._orders = interleaving, orders
        self._first = [*itertools.accumulate((order.num_rows for order in orders), initial=0)]

    def row(self, ordinal: int) -> int:
        """The row at position `ordinal` of training."""
        number, position = self._interleaving.at(ordinal)
        return self._first[number] + self._orders[number].row(position)
