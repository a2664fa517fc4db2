"""The order in which the rows of a data set, or of a mixture of several, are used in training."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from fractions import Fraction


class Order:
    """The order in which the `num_rows` rows of one data set are used over all epochs: `row(n)` for
    the n-th use. With `shuffle` each epoch is a new permutation, which depends on nothing but
    `seed` and the epoch, so any position can be asked for at any time; otherwise rows come in file
    order.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        self.num_rows, self._seed, self._shuffle = num_rows, seed, shuffle
        self._epochs: dict[int, list[int]] = {}

    def row(self, ordinal: int) -> int:
        """Index, from 0, of the row used at position `ordinal` of training, counted from 0 over all
        epochs.
        """
        epoch, position = divmod(ordinal, self.num_rows)
        return self._permutation(epoch)[position] if self._shuffle else position

    def _permutation(self, epoch: int) -> list[int]:
        found = self._epochs.get(epoch)
        if found is None:
            # Sorted by hash, not `random.shuffle`: the same on every version of every library.
            def key(row: int) -> bytes:
                return hashlib.blake2b(
                    f"{self._seed}/{epoch}/{row}".encode(), digest_size=16
                ).digest()

            found = sorted(range(self.num_rows), key=key)
            while len(self._epochs) >= 2:  # where one epoch runs into the next, both are in use
                self._epochs.pop(next(iter(self._epochs)), None)
            self._epochs[epoch] = found
        return found


class Interleaving:
    """Which source of a mixture gives the prompt at each position of training, computed without
    random draws, so that every stretch of positions has nearly the fractions of the weights. Made
    from one weight above 0 for each source; `at(ordinal)` answers.

    Source 0 takes its share of the positions, evenly spaced, source 1 its share of the rest, and so
    on: with r = the source's weight / the sum of its and all later weights, it takes its m-th
    remaining position, counted from 0, if floor((m + 1) r + 1/2) > floor(m r + 1/2). Of the first n
    positions, each of k sources gets n x its fraction, with an error of at most (k - 1) / 2;
    independent draws would be off by about the square root of n. Any position is computed by itself
    in O(k), in exact arithmetic.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        """`weights`: above 0, of any sum."""
        self._shares = [
            weight / sum(weights[number:], Fraction(0)) for number, weight in enumerate(weights)
        ]

    def at(self, ordinal: int) -> tuple[int, int]:
        """(index of the source that gives the prompt at position `ordinal`, number of earlier
        positions that this source gives). Positions count from 0.
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
    """The order in which the rows of a mixture of data sets are used: `row(n)` for the n-th use.
    Rows are numbered from 0 over all data sets, one after the other; each data set has its own
    shuffled epochs (`orders`). The order depends only on the seeds, the weights and the position.
    """

    def __init__(self, interleaving: Interleaving, orders: Sequence[Order]) -> None:
        """`interleaving`: which source gives each position. `orders`: the order of each source's
        own rows.
        """
        self._interleaving, self._orders = interleaving, orders
        self._first = [*itertools.accumulate((one.num_rows for one in orders), initial=0)]

    def row(self, ordinal: int) -> int:
        """Index, from 0 over all sources, of the row used at position `ordinal` of training, from
        0.
        """
        number, own = self._interleaving.at(ordinal)
        return self._first[number] + self._orders[number].row(own)
