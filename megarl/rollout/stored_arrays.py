"""Token arrays of finished groups in Ray's object store; they live as long as the process that
stored them.
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
"""Most segments stored as one object, which is read as a whole."""


@dataclass(frozen=True, slots=True)
class StoredArrays:
    """The value of `Segment.arrays` while the arrays are in the object store."""

    ref: Any
    """`ray.ObjectRef` of a list of (token_ids, logprobs)."""
    position: int
    """Index in that list."""


def store(groups: Sequence[Group]) -> list[Group]:
    """Put the groups' arrays into the object store; returns groups with `StoredArrays`."""
    parts, references = segments_of(groups), list[StoredArrays]()
    for start in range(0, len(parts), MAX_BATCH):
        batch = [tuple(segment.arrays) for segment in parts[start : start + MAX_BATCH]]
        ref = ray.put(batch)
        references += [StoredArrays(ref, position) for position in range(len(batch))]
    return with_arrays(groups, references)


async def stored(group: Group) -> Group:
    """As `store`, of one group, in a thread."""
    return (await asyncio.to_thread(store, [group]))[0]


async def loaded(segment: Segment) -> Segment:
    """The segment with `TokenArrays` in this process."""
    if not isinstance(segment.arrays, StoredArrays):
        return segment
    batch = await segment.arrays.ref
    return replace(segment, arrays=TokenArrays(*batch[segment.arrays.position]))


def fetch(
    arrays: Sequence[StoredArrays], timeout_s: float, what: str = "segments"
) -> list[TokenArrays]:
    """The arrays, in order, without a copy on their node. Raises `RuntimeError` after `timeout_s`,
    or if their node is lost. `what`: for messages.
    """
    refs = list({reference.ref: None for reference in arrays})
    try:
        objects = dict(zip(refs, ray.get(refs, timeout=timeout_s), strict=True))
    except GetTimeoutError:
        raise RuntimeError(
            f"the token arrays of {len(arrays)} {what} did not arrive within {timeout_s:g} s"
        ) from None
    except ObjectLostError as error:
        raise RuntimeError(
            f"the token arrays of {len(arrays)} {what} were lost with the node that held them"
            f" ({str(error).splitlines()[0]}); `--resume auto` goes on from the newest checkpoint"
        ) from error
    return [TokenArrays(*objects[reference.ref][reference.position]) for reference in arrays]
