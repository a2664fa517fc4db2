"""Finished groups of rollouts that are not trained yet, as part of a checkpoint.

    step_000010/groups/rank_00000.safetensors    the groups that one data rank has written

A file has the tokens of all segments behind each other, and the rest as JSON, in one array too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.numpy import save

from megarl.types import Group, Prompt, Rollout, Segment, TokenArrays

FOLDER = "groups"
"""In a checkpoint."""


def write_groups(path: Path, groups: Sequence[Group], made_with: str) -> Path:
    """The segments must hold their token arrays in this process. `made_with`: digest of the
    settings that the rollouts depend on.
    """
    parts = segments_of(groups)
    arrays = {
        "token_ids": _joined([segment.arrays.token_ids for segment in parts], np.int32),
        "logprobs": _joined([segment.arrays.logprobs for segment in parts], np.float32),
    }
    recorded = [experts for segment in parts if (experts := segment.arrays.experts) is not None]
    if recorded:
        arrays["experts"] = np.concatenate(recorded)
    header = {
        "made_with": made_with,
        "experts": [
            0 if (experts := segment.arrays.experts) is None else len(experts) for segment in parts
        ],
        "groups": [
            {
                "ordinal": group.ordinal,
                "has_greedy": group.greedy is not None,
                "left_out": len(group.left_out),
                "rollouts": [asdict(rollout) for rollout in group.members],
            }
            for group in with_arrays(groups, [None] * len(parts))
        ],
    }
    # An array: the header of a file is limited to 100 MB. Versions may be numpy's integers.
    arrays["about"] = np.frombuffer(json.dumps(header, default=int).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save(arrays))
    return path


def read_groups(
    checkpoint: Path, made_with: str, prompt_at: Callable[[int], Prompt]
) -> tuple[list[Group], int]:
    """(the groups that all ranks wrote, in the order of training; number of those left out because
    they were made with other settings). `prompt_at`: the prompt at a position, since the files have
    none.
    """
    groups, left_out, reader = list[Group](), 0, TypeAdapter(list[Rollout])
    for path in sorted((checkpoint / FOLDER).glob("*.safetensors")):
        with safe_open(str(path), framework="np") as file:
            header = json.loads(file.get_tensor("about").tobytes())
            token_ids, logprobs = file.get_tensor("token_ids"), file.get_tensor("logprobs")
            experts = file.get_tensor("experts") if "experts" in file.keys() else None  # noqa: SIM118
        if header["made_with"] != made_with:
            left_out += len(header["groups"])
            continue
        end = last = 0
        counts = iter(header.get("experts", ()))  # older files have none
        for record in header["groups"]:
            for span in (span for row in record["rollouts"] for span in row["segments"]):
                begin, end = end, end + span["num_tokens"]
                first, last = last, last + next(counts, 0)
                chosen = experts[first:last] if experts is not None and last > first else None
                span["arrays"] = TokenArrays(token_ids[begin:end], logprobs[begin:end], chosen)
            rollouts = reader.validate_python(record["rollouts"])
            missing = [rollouts.pop() for _ in range(record.get("left_out", 0))][::-1]
            greedy = rollouts.pop() if record["has_greedy"] else None
            ordinal = record["ordinal"]
            groups.append(Group(ordinal, prompt_at(ordinal), rollouts, greedy, missing))
    return sorted(groups, key=lambda group: group.ordinal), left_out


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def with_arrays(groups: Sequence[Group], arrays: Sequence[Any]) -> list[Group]:
    """Copies of `groups` whose segments' `arrays` (token ids and log-probs, or a reference to them)
    are replaced, in the order of `segments_of`.
    """
    following = iter(arrays)

    def refilled(rollout: Rollout) -> Rollout:
        parts = [replace(segment, arrays=next(following)) for segment in rollout.segments]
        return replace(rollout, segments=parts)

    return [
        replace(
            group,
            rollouts=[refilled(rollout) for rollout in group.rollouts],
            greedy=refilled(group.greedy) if group.greedy is not None else None,
            left_out=[refilled(rollout) for rollout in group.left_out],
        )
        for group in groups
    ]


def segments_of(groups: Sequence[Group]) -> list[Segment]:
    """Of all rollouts, in the order of `Group.members`."""
    return [segment for group in groups for row in group.members for segment in row.segments]
