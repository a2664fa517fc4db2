"""The order in which the rows of a data set are used."""

from __future__ import annotations

import hashlib

from megarl.schema import require


class Order:
    """The order in which rows are used over all epochs; each epoch is shuffled anew. It depends
    only on the seed and the ordinal.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        self._num_rows, self._seed, self._shuffle = num_rows, seed, shuffle
        self._epochs: dict[int, list[int]] = {}

    def row(self, ordinal: int) -> int:
        """Index of the row used at position `ordinal`, from 0."""
        require(ordinal >= 0, f"ordinal is {ordinal}; ordinals count from 0")
        epoch, position = divmod(ordinal, self._num_rows)
        return self._permutation(epoch)[position] if self._shuffle else position

    def _permutation(self, epoch: int) -> list[int]:
        found = self._epochs.get(epoch)
        if found is None:
            # Sorted by hash, not `random.shuffle`: the same on every version of every library.
            def key(row: int) -> bytes:
                return hashlib.blake2b(
                    f"{self._seed}/{epoch}/{row}".encode(), digest_size=16
                ).digest()

            found = sorted(range(self._num_rows), key=key)
            while len(self._epochs) >= 2:  # where one epoch runs into the next, both are in use
                self._epochs.pop(next(iter(self._epochs)), None)
            self._epochs[epoch] = found
        return found
