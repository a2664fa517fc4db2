"""Finished groups of rollouts that are not trained yet, as part of a checkpoint: a resumed run
trains on them and does not generate them again.

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
"""Name of the folder in a checkpoint."""


def write_groups(path: Path, groups: Sequence[Group], made_with: str) -> Path:
    """Write finished rollouts, grouped by prompt, to the safetensors file `path`, whose folders are
    created; returns `path`. The segments of `groups` must hold their token arrays in this process.
    `made_with`: digest of the settings that the rollouts depend on, which `read_groups` compares.
    """
    parts = segments_of(groups)
    arrays = {
        "token_ids": _joined([part.arrays.token_ids for part in parts], np.int32),
        "logprobs": _joined([part.arrays.logprobs for part in parts], np.float32),
    }
    about = {
        "made_with": made_with,
        "groups": [
            {
                "ordinal": group.ordinal,
                "has_greedy": group.greedy is not None,
                "left_out": len(group.left_out),
                "rollouts": [asdict(one) for one in group.members],
            }
            for group in with_arrays(groups, [None] * len(parts))
        ],
    }
    # An array: the header of a file is limited to 100 MB. Versions may be numpy's integers.
    arrays["about"] = np.frombuffer(json.dumps(about, default=int).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save(arrays))
    return path


def read_groups(
    checkpoint: Path, made_with: str, prompt_at: Callable[[int], Prompt]
) -> tuple[list[Group], int]:
    """Read the finished rollouts that all ranks wrote to the checkpoint in the folder `checkpoint`.
    Returns (rollouts, grouped by prompt and in the order of training; number of groups left out).
    Groups are left out if `write_groups` wrote their file with another `made_with`, the digest of
    the settings that rollouts depend on. `prompt_at`: gives the prompt at a position of the
    training order, since the files have no prompts.
    """
    found, left_out, reader = list[Group](), 0, TypeAdapter(list[Rollout])
    for path in sorted((checkpoint / FOLDER).glob("*.safetensors")):
        with safe_open(str(path), framework="np") as file:
            about = json.loads(file.get_tensor("about").tobytes())
            token_ids, logprobs = file.get_tensor("token_ids"), file.get_tensor("logprobs")
        if about["made_with"] != made_with:
            left_out += len(about["groups"])
            continue
        end = 0
        for record in about["groups"]:
            for part in (part for one in record["rollouts"] for part in one["segments"]):
                begin, end = end, end + part["num_tokens"]
                part["arrays"] = TokenArrays(token_ids[begin:end], logprobs[begin:end])
            rollouts = reader.validate_python(record["rollouts"])
            missing = [rollouts.pop() for _ in range(record.get("left_out", 0))][::-1]
            greedy = rollouts.pop() if record["has_greedy"] else None
            ordinal = record["ordinal"]
            found.append(Group(ordinal, prompt_at(ordinal), rollouts, greedy, missing))
    return sorted(found, key=lambda group: group.ordinal), left_out


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def with_arrays(groups: Sequence[Group], arrays: Sequence[Any]) -> list[Group]:
    """Copies of `groups` (rollouts grouped by prompt) in which the field `arrays` of every segment
    is replaced by the elements of the argument `arrays`, one for each segment in the order of
    `segments_of`. The field holds the token ids and log-probs of a segment, or a reference to them.
    """
    following = iter(arrays)

    def refilled(one: Rollout) -> Rollout:
        parts = [replace(part, arrays=next(following)) for part in one.segments]
        return replace(one, segments=parts)

    return [
        replace(
            group,
            rollouts=[refilled(one) for one in group.rollouts],
            greedy=refilled(group.greedy) if group.greedy is not None else None,
            left_out=[refilled(one) for one in group.left_out],
        )
        for group in groups
    ]


def segments_of(groups: Sequence[Group]) -> list[Segment]:
    """The segments (runs of tokens by model or environment) of all rollouts of `groups`: group by
    group, rollout by rollout, in the order of `Group.members`.
    """
    return [part for group in groups for one in group.members for part in one.segments]
