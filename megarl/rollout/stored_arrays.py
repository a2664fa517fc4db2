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
    """Reference to the token arrays (ids and log-probs) of one rollout segment, the tokens of one
    turn, in Ray's object store; the value of `Segment.arrays` while the arrays are not in this
    process.
    """

    ref: Any
    """`ray.ObjectRef` of a list with one (token_ids, logprobs) for each of several segments."""
    position: int
    """Index of the arrays in the list that `ref` refers to."""


def store(groups: Sequence[Group]) -> list[Group]:
    """Put the token arrays (ids and log-probs) of `groups` into Ray's object store. Returns new
    groups in which each `Segment.arrays` is a `StoredArrays`, a reference. Blocks. The stored
    arrays are lost when the calling process ends.
    """
    parts, found = segments_of(groups), list[StoredArrays]()
    for start in range(0, len(parts), MAX_BATCH):
        batch = [tuple(part.arrays) for part in parts[start : start + MAX_BATCH]]
        ref = ray.put(batch)
        found += [StoredArrays(ref, position) for position in range(len(batch))]
    return with_arrays(groups, found)


async def stored(group: Group) -> Group:
    """Coroutine: put the token arrays (ids and log-probs) of one group into Ray's object store, in
    a thread, so that the event loop goes on. Returns a new group in which each `Segment.arrays` is
    a `StoredArrays`, a reference.
    """
    return (await asyncio.to_thread(store, [group]))[0]


async def loaded(segment: Segment) -> Segment:
    """Coroutine: copy a rollout's segment (the tokens of one turn) with its token ids and log-probs
    fetched from Ray's object store; in the copy `Segment.arrays` is a `TokenArrays`. A segment
    whose arrays are in this process already is returned unchanged.
    """
    if not isinstance(segment.arrays, StoredArrays):
        return segment
    batch = await segment.arrays.ref
    return replace(segment, arrays=TokenArrays(*batch[segment.arrays.position]))


def fetch(
    arrays: Sequence[StoredArrays], timeout_s: float, what: str = "segments"
) -> list[TokenArrays]:
    """Read the token arrays of rollout segments from Ray's object store, without a copy where they
    are on this node; returns one `TokenArrays` for each reference, in the order of `arrays`.
    Blocks for at most `timeout_s` seconds. `what`: what the arrays belong to, for error messages.

    Raises `RuntimeError` if the node that stored the arrays is lost, or if they do not arrive
    within `timeout_s`.
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
