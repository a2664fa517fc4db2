"""Rows that are longer than a recipe allows: refused, left out, or their prompts cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from megarl.data.config import TooLong
from megarl.data.rows import Table
from megarl.data.tokens import TokenLists
from megarl.schema import require

T = TypeVar("T")


def picked(items: Sequence[T], rows: Sequence[int]) -> list[T]:
    """The items of `rows`."""
    return [items[row] for row in rows]


def fit(
    table: Table,
    prompts: TokenLists,
    replies: np.ndarray | int,
    *,
    limit: int,
    key: str,
    too_long: TooLong,
    setting: str,
) -> tuple[list[int], TokenLists, str]:
    """(indices of the rows that are used, prompts of all rows, what the user should know) of a data
    set in which no row may have more than `limit` tokens.

    `replies`: [N] tokens of each row's response, which is never cut; 0 without responses.
    `setting` and `key`: section of the recipe, and the setting of the limit in it. Raises
    `ValueError` for a prompt without tokens, and if rows are too long and may not be, or no row is
    left.
    """
    lengths = prompts.lengths + replies
    num_rows = len(lengths)
    empty = np.flatnonzero(lengths == replies)
    require(
        not len(empty),
        f"{table.place(int(empty[0])) if len(empty) else ''}: the prompt has no tokens; fill its"
        " column",
    )
    long = np.flatnonzero(lengths > limit)
    if not len(long):
        return list(range(num_rows)), prompts, ""
    longest, first = int(lengths.max()), int(long[0])
    found = (
        f"{len(long)} of {num_rows} {'prompts' if np.all(replies == 0) else 'rows'} have more"
        f" tokens than {setting}.{key} = {limit} (the longest {longest})"
    )
    place = f"{table.place(first)} with {lengths[first]}"
    require(
        too_long != "refuse",
        f"{found}, the first is {place}; set {key} to at least {longest}, or {setting}.too_long to"
        " 'drop' or 'truncate_left'",
    )
    if too_long == "drop":
        require(len(long) < num_rows, f"{found}, so that no row is left; raise {key}")
        kept = np.flatnonzero(lengths <= limit).tolist()
        return kept, prompts, f"{found}; they are left out"
    room = np.broadcast_to(limit - np.asarray(replies), (num_rows,))
    full = np.flatnonzero(room < 1)
    require(
        not len(full),
        f"{setting}.too_long is 'truncate_left', which cuts prompts and never responses, but"
        f" {len(full)} of {num_rows} responses leave no room for a prompt within {key} = {limit},"
        f" the first is {table.place(int(full[0])) if len(full) else ''}; raise {key}, or set"
        " too_long to 'drop'",
    )
    cut = TokenLists(prompts[row][-int(room[row]) :] for row in range(num_rows))
    return list(range(num_rows)), cut, f"{found}; their prompts lose the first tokens"
