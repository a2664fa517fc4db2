"""Rows that a program makes, by an adapter to another library (`megarl.lookup.SOURCES`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.lookup import SOURCES, load
from megarl.schema import require


def made_rows(
    source: str, arguments: Mapping[str, Any] | None, limit: int | None, setting: str
) -> list[dict[str, Any]] | None:
    """The rows of a source such as `reasoning_gym:NAME`, made with `arguments`, at most `limit`;
    None for a source that is read. `setting`: the section of the recipe, for messages. Raises
    `ValueError` if a source that is read has arguments, and as the adapter does.
    """
    kind, colon, name = source.partition(":")
    if colon and kind in SOURCES:
        made = load(SOURCES[kind])(name, dict(arguments or {}), limit)
        require(bool(made), f"{setting}.arguments makes no row; set size to 1 or more")
        return made
    require(
        not arguments,
        f"{setting}.arguments is for a source that makes its rows ({':NAME, '.join(SOURCES)}:NAME),"
        f" but {setting}.source is '{source}'; leave it out",
    )
    return None
