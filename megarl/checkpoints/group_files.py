"""Finished groups of rollouts that are not trained yet, as part of a checkpoint: a resumed run
trains on them and does not generate them again.

    step_000010/groups/rank_00000.safetensors    the groups that one data rank has written

A file has the tokens of all segments behind each other, and the rest as JSON, in one array too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from megarl.types import Group, Prompt, Rollout, Segment, TokenArrays, Verdict

FOLDER = "groups"
"""Name of the folder in a checkpoint."""


def write_groups(path: Path, groups: Sequence[Group], made_with: str) -> Path:
    """Write groups whose token arrays are in this process; returns the path. `made_with`:
    fingerprint of the settings that the rollouts depend on.
    """
    parts = [part for group in groups for one in _members(group) for part in one.segments]
    arrays = {
        "token_ids": _joined([part.arrays.token_ids for part in parts], np.int32),
        "logprobs": _joined([part.arrays.logprobs for part in parts], np.float32),
    }
    about = {"made_with": made_with, "groups": [_plain(group) for group in groups]}
    # An array: the header of a file is limited to 100 MB.
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save(arrays))
    return path


def read_groups(
    checkpoint: Path, made_with: str, prompt_at: Callable[[int], Prompt]
) -> tuple[list[Group], int]:
    """(groups of all files of a checkpoint, ascending; number of groups left out). Groups are left
    out if they were made with other settings than those of the fingerprint `made_with`.
    `prompt_at`: the prompt of a group's ordinal.
    """
    found, left_out = list[Group](), 0
    for path in sorted((checkpoint / FOLDER).glob("*.safetensors")):
        with safe_open(str(path), framework="np") as file:
            about = json.loads(file.get_tensor("about").tobytes())
            token_ids, logprobs = file.get_tensor("token_ids"), file.get_tensor("logprobs")
        if about["made_with"] != made_with:
            left_out += len(about["groups"])
            continue
        arrays = _split(token_ids, logprobs)
        for record in about["groups"]:
            rollouts = [_rollout(one, arrays) for one in record["rollouts"]]
            greedy = rollouts.pop() if record["has_greedy"] else None
            ordinal = record["ordinal"]
            found.append(Group(ordinal, prompt_at(ordinal), rollouts, greedy))
    return sorted(found, key=lambda group: group.ordinal), left_out


Split = Callable[[int], TokenArrays]
"""A function that returns the arrays of the next n tokens of a file."""


def _split(token_ids: np.ndarray, logprobs: np.ndarray) -> Split:
    start = 0

    def following(count: int) -> TokenArrays:
        nonlocal start
        begin, start = start, start + count
        return TokenArrays(token_ids[begin:start], logprobs[begin:start])

    return following


def _members(group: Group) -> Iterator[Rollout]:
    """The rollouts of a group, the greedy one last if there is one."""
    yield from group.rollouts
    if group.greedy is not None:
        yield group.greedy


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def _plain(group: Group) -> dict[str, Any]:
    """What JSON holds of a group."""
    return {
        "ordinal": group.ordinal,
        "has_greedy": group.greedy is not None,
        "rollouts": [
            {
                "sample": one.sample,
                "seed": one.seed,
                "dispatched_at": one.dispatched_at,
                "verdict": asdict(one.verdict),
                "segments": [
                    {
                        "kind": part.kind,
                        "num_tokens": part.num_tokens,
                        "versions": [list(map(int, span)) for span in part.versions],
                        "receipts": list(part.receipts),
                        "finish": part.finish,
                        "reward": part.reward,
                    }
                    for part in one.segments
                ],
            }
            for one in _members(group)
        ],
    }


def _rollout(record: dict[str, Any], arrays: Split) -> Rollout:
    """The rollout that `_plain` made `record` of."""
    segments = []
    for part in record["segments"]:
        versions = [(version, count) for version, count in part["versions"]]
        whole = Segment(**part | {"arrays": arrays(part["num_tokens"]), "versions": versions})
        segments.append(whole)
    return Rollout(**record | {"verdict": Verdict(**record["verdict"]), "segments": segments})


def with_arrays(groups: Sequence[Group], arrays: Sequence[Any]) -> list[Group]:
    """The groups with `arrays`, one of each segment in order, in the place of those they have."""
    following = iter(arrays)

    def refilled(one: Rollout) -> Rollout:
        parts = [replace(part, arrays=next(following)) for part in one.segments]
        return replace(one, segments=parts)

    return [
        replace(
            group,
            rollouts=[refilled(one) for one in group.rollouts],
            greedy=refilled(group.greedy) if group.greedy is not None else None,
        )
        for group in groups
    ]


def segments_of(groups: Sequence[Group]) -> list[Segment]:
    """The segments of all rollouts of `groups`, in the order of `with_arrays`."""
    return [part for group in groups for one in _members(group) for part in one.segments]
