"""Token arrays of finished groups in Ray's object store, where the ranks that train on them read
them. They belong to the process that stored them, and live as long as it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from megarl.checkpoints.group_files import segments_of, with_arrays
from megarl.types import Group, Segment, TokenArrays

MAX_BATCH = 64
"""Most segments whose arrays are stored as one object, which is read as a whole."""


@dataclass(frozen=True, slots=True)
class StoredArrays:
    """Token arrays in Ray's object store. See `Segment.arrays`."""

    ref: Any
    """`ray.ObjectRef` of a list of arrays."""
    position: int
    """Index of the arrays in the list that `ref` refers to."""


def store(groups: Sequence[Group]) -> list[Group]:
    """Put the token arrays of groups into Ray's object store: the groups with references."""
    parts, found = segments_of(groups), list[StoredArrays]()
    for start in range(0, len(parts), MAX_BATCH):
        batch = [tuple(part.arrays) for part in parts[start : start + MAX_BATCH]]
        ref = ray.put(batch)
        found += [StoredArrays(ref, position) for position in range(len(batch))]
    return with_arrays(groups, found)


async def stored(group: Group) -> Group:
    """As `store`, for one group; the event loop goes on meanwhile."""
    return (await asyncio.to_thread(store, [group]))[0]


async def loaded(segment: Segment) -> Segment:
    """The segment with its token arrays in this process, of which Ray is asked without blocking."""
    if not isinstance(segment.arrays, StoredArrays):
        return segment
    batch = await segment.arrays.ref
    return replace(segment, arrays=TokenArrays(*batch[segment.arrays.position]))


def fetch(
    arrays: Sequence[StoredArrays], timeout_s: float, what: str = "segments"
) -> list[TokenArrays]:
    """Read token arrays from Ray's object store, without a copy, in the order of the references.
    `what`: whose they are, for errors.

    With a `timeout_s` given, has the type `megarl.rollout.batch.Fetch`. Raises `RuntimeError` if
    the node that stored the arrays is lost, or if they do not arrive within `timeout_s`.
    """
    refs = list({one.ref: None for one in arrays})
    try:
        found = dict(zip(refs, ray.get(refs, timeout=timeout_s), strict=True))
    except GetTimeoutError:
        raise RuntimeError(
            f"the token arrays of {len(arrays)} {what} did not arrive within {timeout_s:g} s"
        ) from None
    except ObjectLostError as error:
        raise RuntimeError(
            f"the token arrays of {len(arrays)} {what} were lost with the node that held them"
            f" ({str(error).splitlines()[0]}); `--resume auto` goes on from the newest checkpoint"
        ) from error
    return [TokenArrays(*found[one.ref][one.position]) for one in arrays]
