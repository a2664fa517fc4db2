"""A digest of the data that a run trains on, kept in its checkpoints.

A checkpoint remembers how many prompts or demonstrations were used. That number means the same rows
only while the digest stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import xxhash


def fingerprint(settings: Iterable[Any], rows: Iterable[tuple[Any, str]]) -> str:
    """xxh3-128 over `settings` (what renders and orders the rows) and over each row's (value of the
    prompt column, answer or response), in order; preceded by the number of rows.

    Equal on every machine and version of Python; the data's place and column names do not enter.
    """
    hasher = xxhash.xxh3_128()
    for value in settings:
        hasher.update(framed(value))
    count = 0
    for prompt, reply in rows:
        hasher.update(framed(prompt) + framed(reply))
        count += 1
    return f"{count} rows, xxh3-128 {hasher.hexdigest()}"


def framed(value: Any) -> bytes:
    """The bytes of a text, or of the JSON of anything else, after their kind and number: no two
    sequences of values give the same bytes.
    """
    if isinstance(value, str):
        # A JSON text may hold half a surrogate pair, which plain UTF-8 refuses.
        text = value.encode("utf-8", "surrogatepass")
        return b"text %d:%b" % (len(text), text)
    text = canonical_json(value).encode()
    return b"json %d:%b" % (len(text), text)


def canonical_json(value: Any) -> str:
    """ASCII JSON with sorted keys: one text for equal values."""
    return json.dumps(value, sort_keys=True, default=str)
