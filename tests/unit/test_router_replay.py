"""The experts of each token on their way from an engine's answer to the routers: turns and trees,
files, packed sequences, and their parts on sequence-parallel ranks.

An engine here chooses by all tokens up to each one, as a real one does, so that an array which is
shifted, or of another branch, is wrong at once.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rollouts import dealt, segment
from support.trees import before, branched, path

from megarl.checkpoints.group_files import read_groups, write_groups
from megarl.engines.plan import check_engine_kind
from megarl.engines.remote import reported_tokens
from megarl.parallel.mesh import Axis
from megarl.rollout.attempts import path as path_of
from megarl.rollout.batch_files import batch_file, read_batch, write_batch
from megarl.settings.objectives import AlgorithmConfig
from megarl.settings.training import SharePrefix, TrainingConfig
from megarl.trainer.branches import next_tokens
from megarl.trainer.experts import Routers
from megarl.trainer.packing import pack, pack_shared
from megarl.trainer.plan import refuse_expert_settings
from megarl.trainer.prefixes import must_save, tree_of
from megarl.types import (
    Group,
    MicroBatch,
    Prompt,
    Rollout,
    Samples,
    Segment,
    Verdict,
    expert_dtype,
    unreported_experts,
)

LAYERS, CHOSEN = 3, 2


def experts_after(tokens: list[int], num_experts: int) -> np.ndarray:
    """[layers, K] for the last one of `tokens`."""
    draw = np.random.default_rng(zlib.crc32(bytes(tokens)))
    return draw.integers(0, num_experts, (LAYERS, CHOSEN))


def answered(prompt: list[int], segments: list[Segment], num_experts: int) -> list[Segment]:
    """The segments with what a recording engine reports: of all tokens that it has not told of
    before, and never of the one that it sampled last.
    """
    made, dtype = list[Segment](), expert_dtype(num_experts)
    for one in segments:
        made.append(one)
        if one.kind == "environment":
            continue
        *earlier, _ = line = path_of(made)
        read = [] if line[0].follows == -1 else prompt
        tokens = [*read, *(token for part in line for token in part.arrays.token_ids.tolist())]
        rows = [experts_after(tokens[: n + 1], num_experts) for n in range(len(tokens))]
        experts = np.array(rows, dtype)
        experts[-1] = unreported_experts(dtype)
        experts = experts[reported_tokens(len(read), earlier) :]
        made[-1] = replace(one, arrays=one.arrays._replace(experts=experts))
    return made


def drawn(seed: int, num_experts: int = 8, count: int = 3) -> list[Group]:
    """Groups of two random trees; prompts often begin alike."""
    draw, groups = random.Random(seed), list[Group]()
    empty = Rollout(0, 0, [], Verdict(0.5, True), 0)
    for number in range(count):
        prompt = [1, 2, 3, 4, *range(draw.randint(5, 7), 8)]
        rollouts = [branched(draw, empty) for _ in range(2)]
        rollouts = [
            replace(one, segments=answered(prompt, one.segments, num_experts)) for one in rollouts
        ]
        groups.append(Group(number, Prompt(number, "", prompt, ""), rollouts))
    return groups


def samples_of(groups: list[Group]) -> Samples:
    (samples,) = dealt(groups, prefix_saves=0.0).share(0).samples
    return samples


def expected(samples: Samples, num_experts: int) -> np.ndarray:
    """[T, layers, K] by the tokens that each one attends to, -1 for those that nothing continues."""
    inner = {before(samples, token) for token in range(len(samples.token_ids))}
    rows = np.full((len(samples.token_ids), LAYERS, CHOSEN), -1)
    for token in inner - {-1}:
        rows[token] = experts_after(samples.token_ids[path(samples, token)].tolist(), num_experts)
    return rows


@pytest.mark.parametrize("share", ["off", "on"])
@pytest.mark.parametrize("num_experts", [8, 255, 256, 512])
def test_every_computed_token_has_the_experts_of_its_own_path(
    num_experts: int, share: SharePrefix
) -> None:
    branches = 0
    for seed in range(20):
        samples = samples_of(drawn(seed, num_experts))
        assert samples.experts is not None
        assert samples.experts.dtype == (np.uint8 if num_experts < 256 else np.uint16)
        wanted = expected(samples, num_experts)
        branches += len(samples.branches)
        micro = pack(samples, torch.device("cpu"), share=share)
        places = tree_of(samples, saves=must_save(share)).places
        assert micro.experts is not None
        assert np.array_equal(micro.experts.numpy(), wanted[places])
        # Whatever predicts a token is told of: nothing that training computes is guessed.
        assert (wanted[next_tokens(samples)[0] >= 0] >= 0).all()
    assert branches > 50


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("share", ["off", "on"])
def test_sequence_ranks_have_the_experts_of_their_own_tokens(size: int, share: SharePrefix) -> None:
    for seed in range(10):
        samples = samples_of(drawn(seed))
        if seed % 3 == 0:  # so few tokens that padding is needed
            samples = samples.select([0])
            samples = replace(samples.select([]), experts=None) if seed == 0 else samples

        def part(rank: int, samples: Samples = samples) -> MicroBatch:
            axis = Axis("sequence", size, rank, tuple(range(size)), None)
            return pack_shared(samples, torch.device("cpu"), axis, share=share)

        whole = pack(samples, torch.device("cpu"), share=share).experts
        for rank in range(size):
            micro = part(rank)
            if whole is None:
                assert micro.experts is None
                continue
            assert micro.experts is not None and len(micro.experts) == len(micro.token_ids)
            for row, position in zip(micro.experts, micro.indices[rank].tolist(), strict=True):
                is_padding = position >= len(whole)
                assert torch.equal(row, torch.full_like(row, -1) if is_padding else whole[position])


def test_samples_keep_their_experts_when_they_are_chosen_and_joined() -> None:
    one, other = (samples_of(drawn(seed, count=1)) for seed in range(2))
    silent = replace(other, experts=None)
    joined = Samples.concatenate([one, silent, other])
    again = joined.select([5, 0, 3])
    assert joined.experts is not None and again.experts is not None
    for samples in (joined, again):
        ends = samples.offsets.tolist()
        for (first, last), wanted in zip(
            pairwise(ends), [5, 0, 3] if samples is again else range(6), strict=True
        ):
            assert samples.experts is not None
            found = samples.experts[first:last]
            if wanted in (2, 3):
                assert (found == 255).all()
                continue
            source = one if wanted < 2 else other
            begin, end = source.offsets[wanted % 2 : wanted % 2 + 2].tolist()
            assert source.experts is not None
            assert np.array_equal(found, source.experts[begin:end])


@pytest.mark.parametrize("num_experts", [8, 512])
def test_files_of_batches_and_groups_keep_every_experts_bits(
    tmp_path: Path, num_experts: int
) -> None:
    groups = drawn(3, num_experts)
    silent = [replace(segment([7, 8, 1]), follows=-1)]
    groups[1].rollouts[1] = replace(groups[1].rollouts[1], segments=silent)
    batch = dealt(groups).share(0)
    file = batch_file(tmp_path, 0, 0)
    write_batch(file, batch, 1)
    (read,) = read_batch(file)[0].samples
    (written,) = batch.samples
    assert read.experts is not None and written.experts is not None
    assert read.experts.dtype == written.experts.dtype
    assert np.array_equal(read.experts, written.experts)

    write_groups(tmp_path / "groups" / "rank_00000.safetensors", groups, "made")
    found, _ = read_groups(tmp_path, "made", lambda ordinal: groups[ordinal].prompt)
    again = samples_of(found)
    assert again.experts is not None and np.array_equal(again.experts, written.experts)
    assert found[1].rollouts[1].segments[0].arrays.experts is None


def test_batches_without_experts_are_read_without(tmp_path: Path) -> None:
    groups = [Group(0, Prompt(0, "", [1, 2], ""), [Rollout(0, 0, [segment([3, 1])], RIGHT, 0)])]
    batch = dealt(groups).share(0)
    file = batch_file(tmp_path, 0, 0)
    write_batch(file, batch, 1)
    (read,) = read_batch(file)[0].samples
    assert read.experts is None


RIGHT = Verdict(1.0, True)


def test_what_cannot_be_replayed_is_refused_in_a_line(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3MoeConfig

    for value in ("rollout", "trainer"):
        with pytest.raises(ValueError, match=f"router_replay is '{value}'.*qwen3 has no experts"):
            refuse_expert_settings(TrainingConfig(), Qwen3Config(), value)
        refuse_expert_settings(TrainingConfig(), Qwen3MoeConfig(), value)
    refuse_expert_settings(TrainingConfig(), Qwen3Config())

    with pytest.raises(ValueError, match="computes no old log-probs"):
        AlgorithmConfig(router_replay="trainer", old_logprobs="engine")

    kind = f"{Path(__file__).parents[1] / 'support' / 'transformers_engine.py'}:TransformersEngine"
    check_engine_kind(kind, Qwen3MoeConfig())
    with pytest.raises(ValueError, match="does not report the experts of each token"):
        check_engine_kind(kind, Qwen3MoeConfig(), "rollout")

    routers = Routers(shape=(4, 2))
    wrong: Any = torch.zeros(5, 3, 2, dtype=torch.int16)
    with pytest.raises(ValueError, match="report 2 experts of a token in 3 layers"):
        routers.replay(wrong)
