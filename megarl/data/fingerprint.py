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
    """Number of rows and xxh3-128 digest of a data set. The digest covers `settings` (which
    determine rendering and order) and, in order, each row's (prompt, answer or response).

    The digest is the same on every machine and Python version. It does not depend on file or column
    names.
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
    """Bytes of a text, or of the JSON of another value, prefixed by type and length. The prefix
    makes the concatenation of several values unambiguous.
    """
    if isinstance(value, str):
        # A JSON text may hold half a surrogate pair, which plain UTF-8 refuses.
        text = value.encode("utf-8", "surrogatepass")
        return b"text %d:%b" % (len(text), text)
    text = canonical_json(value).encode()
    return b"json %d:%b" % (len(text), text)


def canonical_json(value: Any) -> str:
    """ASCII JSON with sorted keys, so that equal values give the same text."""
    return json.dumps(value, sort_keys=True, default=str)
