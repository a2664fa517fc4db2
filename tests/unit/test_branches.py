"""Rollouts that are trees: what is computed, what each token predicts and attends to, what it is
paid, and the way of a tree through the arrays and files of a step.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rollouts import dealt, segment
from support.sequence_cases import Case, assert_close, split_attention
from support.trees import before, branched, lineages, path

from megarl.apps.runs.show_rollouts import lines
from megarl.parallel.prefix_balance import FamilyBalance
from megarl.rollout.batch_files import batch_file, read_batch, write_batch
from megarl.rollout.transcripts import turns
from megarl.settings.training import SharePrefix
from megarl.trainer.packing import pack
from megarl.trainer.prefixes import must_save, saved_tokens, shareable, sizes_of, tree_of
from megarl.types import COLUMNS, Group, MicroBatch, Prompt, Rollout, Samples, Segment, Verdict

CPU = torch.device("cpu")


def environment(tokens: list[int], **more: Any) -> Segment:
    return replace(segment(tokens, finish="", versions=[], **more), kind="environment")


def group(ordinal: int, prompt: list[int], *trees: list[Segment]) -> Group:
    rollouts = [Rollout(n, n, tree, Verdict(n + 1.0, True), 0) for n, tree in enumerate(trees)]
    return Group(ordinal, Prompt(ordinal, "", prompt, ""), rollouts)


def samples_of(*groups: Group) -> Samples:
    (samples,) = dealt(list(groups)).share(0).samples
    return samples


def drawn(seed: int, count: int = 3, *, longest: int = 6) -> list[Group]:
    """Groups of random trees; prompts often begin alike."""
    draw = random.Random(seed)
    rollout = Rollout(0, 0, [], Verdict(0.5, True), 0)
    prompts = [[1, 2, 3, 4, *range(draw.randint(5, 7), 8)] for _ in range(count)]
    return [
        group(n, prompt, *(branched(draw, rollout, longest=longest).segments for _ in range(2)))
        for n, prompt in enumerate(prompts)
    ]


TWO_ANSWERS = [
    segment([11, 12], logprob=-1.0),
    environment([21, 22], reward=0.25),
    segment([13, 14, 15], logprob=-2.0),
    environment([], follows=1, reward=0.5),
    segment([16], logprob=-3.0),  # a second answer to the same observation
    environment([31, 32], follows=-1),  # a conversation of its own
    segment([17], logprob=-4.0),
    environment([23], follows=0, reward=0.125),  # another observation
    segment([18, 19], logprob=-5.0),
]


def test_a_tree_by_hand() -> None:
    samples = samples_of(group(0, [1, 2, 3], TWO_ANSWERS))
    tokens = [1, 2, 3, 11, 12, 21, 22, 13, 14, 15, 16, 31, 32, 17, 23, 18, 19]
    assert samples.token_ids.tolist() == tokens
    assert samples.branches.tolist() == [[10, 6], [11, -1], [14, 4]]
    paid = {4: 0.25, 9: 0.5, 13: 0.125, 16: 1.0}  # the model segment made last, in time
    assert dict(enumerate(samples.rewards.tolist())) == dict.fromkeys(range(17), 0.0) | paid
    micro = pack(samples, CPU)
    # Copied: 22, which predicts 13 and 16. The conversation of its own comes last.
    want = [[1, 2, 3, 11, 12, 21, 22, 13, 14, 15], [23, 18, 19], [22, 16], [31, 32, 17]]
    assert micro.token_ids.tolist() == [token for part in want for token in part]
    assert micro.starts.tolist() == [0, 10, 13, 15, 18]
    assert (micro.parents, micro.begins) == ((-1, 0, 0, -1), (0, 5, 6, 0))
    depths = [*range(10), *(5, 6, 7), *(6, 7), *(0, 1, 2)]
    assert micro.position_ids.tolist() == depths
    predicts = {2: 3, 3: 4, 6: 7, 7: 8, 8: 9, 10: 15, 11: 16, 13: 10, 16: 13}  # computed: given
    assert micro.mask.nonzero()[:, 0].tolist() == list(predicts)
    assert micro.places[micro.mask].tolist() == list(predicts.values())
    for name in ("token_ids", "engine_logprobs", "rewards"):
        column = getattr(micro, "targets" if name == "token_ids" else name)
        assert column[micro.mask].tolist() == getattr(samples, name)[[*predicts.values()]].tolist()
    assert micro.ends.tolist() == [12] and set(micro.sample_ids.tolist()) == {0}
    assert saved_tokens(micro.starts.tolist(), micro.parents, micro.begins) == 5 + 6


def test_a_turn_that_is_tried_twice_again_and_again_is_one_level_deep() -> None:
    """Two answers to each of 40 observations, the second of which is gone on with."""
    made = [environment([20])]
    for _ in range(40):
        seen = len(made) - 1
        made += [segment([11]), environment([], follows=seen), segment([12]), environment([21, 22])]
    micro = pack(samples_of(group(0, [5], [*made, segment([13])])), CPU)
    assert micro.parents == (-1, *[0] * 40)
    assert len(micro.token_ids) == 2 + 40 * (1 + 1 + 1 + 2) + 1  # with a copy for each second one


def test_what_may_be_shared_ends_at_the_first_branch() -> None:
    def one(*branches: tuple[int, int], prompt: int = -1) -> Samples:
        mask = [False] * 6 + [True] * 2
        return Samples.one(0, range(8), mask=mask, branches=branches, prompt=prompt)

    assert shareable(one()).tolist() == [5]
    assert shareable(one((5, 2))).tolist() == [3]  # the branch begins untrained
    assert shareable(one((6, 2))).tolist() == [2]  # and trained: token 2 predicts it
    assert shareable(one((4, -1))).tolist() == [4]
    assert shareable(one((7, 5), prompt=3)).tolist() == [2]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from(["off", "on"]))
def test_every_token_is_computed_once_and_every_sampled_one_predicted_once(
    seed: int, share: SharePrefix
) -> None:
    samples = samples_of(*drawn(seed))
    micro, tree = pack(samples, CPU, share=share), tree_of(samples, saves=must_save(share))
    trained = np.flatnonzero(samples.mask).tolist()
    # Of several trained tokens that continue the same one, each but the first needs a copy of it.
    copies = sum(n - 1 for n in Counter(before(samples, one) for one in trained).values())
    assert len(tree.places) == _computed_once(samples, share) + copies
    assert sorted(micro.places[micro.mask].tolist()) == trained
    tokens = samples.token_ids
    for node, nodes in enumerate(_paths(micro)):
        place = int(tree.places[node])
        assert tokens[tree.places[nodes]].tolist() == tokens[path(samples, place)].tolist()
        assert int(micro.position_ids[node]) == len(nodes) - 1
        if micro.mask[node]:
            target = int(micro.places[node])
            assert before(samples, target) == place and micro.targets[node] == tokens[target]
            assert micro.rewards[node] == samples.rewards[target]
            assert micro.engine_logprobs[node] == samples.engine_logprobs[target]
            assert micro.sample_ids[node] == np.searchsorted(samples.offsets, target, "right") - 1
    ends = tree.places[micro.ends.numpy()]
    assert sorted(ends.tolist()) == (samples.offsets[1:] - 1).tolist()


def _computed_once(samples: Samples, share: SharePrefix) -> int:
    """The tokens of all samples, or with shared prefixes each of these once."""
    if share == "off":
        return len(samples.token_ids)
    rows = zip(samples.offsets.tolist(), shareable(samples).tolist(), strict=False)
    prefixes = {tuple(samples.token_ids[at : at + n + 1]) for at, to in rows for n in range(to)}
    return len(samples.token_ids) - int(shareable(samples).sum()) + len(prefixes)


def _paths(micro: MicroBatch) -> list[list[int]]:
    """For each computed token, those that it attends to, in their order, itself last."""
    edges, found = micro.starts.tolist(), list[list[int]]()
    for document in range(len(edges) - 1):
        parent = micro.parents[document] if micro.parents else -1
        assert parent < document
        above = list[int]()
        if parent >= 0:
            above = found[edges[parent] + micro.begins[document] - micro.begins[parent] - 1]
        for node in range(edges[document], edges[document + 1]):
            found.append([*above, *range(edges[document], node + 1)])
    return found


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(1, 1, "ring"), (2, 1, "ring"), (2, 2, "ring"), (4, 2, "all_gather")]),
    st.sampled_from(["contiguous", "zigzag_document", "permuted"]),
    st.sampled_from([None, 3, 9]),
    st.sampled_from(["reference", "cpu"]),
)
def test_attention_is_that_of_a_mask_over_the_tree(
    seed: int, ranks: tuple[int, int, str], how: str, window: int | None, block: str
) -> None:
    """Of dense attention in float64 over all tokens in the order in which they were made, each
    there once. The gradients of copies add up to those of their tokens.
    """
    samples = samples_of(*drawn(seed, 1))
    micro, tree = pack(samples, CPU), tree_of(samples, saves=must_save("off"))
    lengths = tuple(micro.starts.diff().tolist())
    case = Case(
        lengths, *ranks[:2], how, (2, 2), 3, 0.35, seed, micro.parents, window, begins=micro.begins
    )
    draw = torch.Generator().manual_seed(seed)
    count, shape = len(samples.token_ids), (len(samples.token_ids), 2, 3)
    q, k, v, upstream = torch.randn(4, *shape, dtype=torch.float64, generator=draw)
    mask = torch.zeros(count, count, dtype=torch.bool)
    for token in range(count):
        mask[token, path(samples, token)[-(window or count) :]] = True
    inputs = [x.requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("ihd,jhd->hij", q, k).mul(0.35).masked_fill(~mask, -torch.inf)
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
    wanted = [out.detach(), *torch.autograd.grad(out, inputs, upstream)]

    places = torch.from_numpy(tree.places)
    is_first = torch.zeros(len(places), dtype=torch.bool)
    is_first[[tree.places.tolist().index(token) for token in range(count)]] = True
    given = [x.detach()[places] for x in (q, k, v)]
    found, _ = split_attention(
        case, block, ranks[2], [*given, upstream[places] * is_first[:, None, None]]
    )
    assert_close([found[0]], [wanted[0][places]], 1e-10)
    sums = [torch.zeros(shape, dtype=torch.float64).index_add(0, places, x) for x in found[1:]]
    assert_close(sums, wanted[1:], 1e-10)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1 / 16, np.inf]), st.integers(1, 3))
def test_budgets_count_what_is_computed(seed: int, saves: float, ranks: int) -> None:
    """The service, which has no tokens of trees, the trainer, and what `pack` makes agree."""
    groups = drawn(seed)
    options: Any = {"prefix_saves": saves, "micro_batch_tokens": 90, "num_data_ranks": ranks}
    plan = dealt(groups, **options)
    for rank in range(ranks):
        batch = plan.share(rank)
        (samples,), (rows,) = batch.samples, batch.micro_batches
        even = FamilyBalance(sizes_of(samples, "off" if np.isinf(saves) else "on"), saves)
        for row in rows:
            computed = len(tree_of(samples.select(row), saves=saves).places)
            assert even.tokens(row) == computed
            assert computed <= 90 or len(row) == 1


def test_trees_are_selected_joined_and_kept_in_files(tmp_path: Path) -> None:
    for seed in range(20):
        batch = dealt(drawn(seed)).share(0)
        (samples,) = batch.samples
        order = random.Random(seed).sample(range(len(samples)), len(samples))
        parts = [samples.select([number]) for number in order]
        for one in (samples.select(order), Samples.concatenate(parts)):
            back = one.select(np.argsort(order))
            for name in ("ids", "offsets", "prompts", "branches", *COLUMNS):
                assert np.array_equal(getattr(back, name), getattr(samples, name)), name
        for number, part in zip(order, parts, strict=True):
            one = Samples.one(
                int(part.ids[0]), part.token_ids, branches=samples.branches_of(number)
            )
            assert np.array_equal(one.branches, part.branches)
        write_batch(batch_file(tmp_path, 0, 0), batch, num_data_ranks=1)
        (found,) = read_batch(batch_file(tmp_path, 0, 0))[0].samples
        assert np.array_equal(found.branches, samples.branches)
        assert len(samples.branches)


def test_a_file_without_trees_has_no_branches(tmp_path: Path) -> None:
    batch = dealt([group(0, [1, 2], [segment([3, 4])])]).share(0)
    write_batch(batch_file(tmp_path, 0, 0), batch, num_data_ranks=1)
    assert read_batch(batch_file(tmp_path, 0, 0))[0].samples[0].branches.shape == (0, 2)


def test_transcripts_say_what_each_turn_follows_and_got() -> None:
    found = turns(TWO_ANSWERS, Verdict(1.0, True), [""] * 9)
    assert [turn.get("follows") for turn in found] == [*[None] * 3, 1, None, -1, None, 0, None]
    paid = [turn.get("reward") for turn in found]
    assert paid == [0.25, None, 0.5, None, 0.0, None, 0.125, None, 1.0]


def test_printed_turns_say_what_they_follow() -> None:
    """Of a tree, with the failure that ended it; a chain has no numbers."""
    found = turns(TWO_ANSWERS, Verdict(1.0, True), [f"text {n}" for n in range(9)])
    record: dict[str, Any] = {
        "prompt": "3+4", "response": "", "tokens": 9, "finish": "stop", "turns": found,
        "correct": False, "reward": 0.0, "answer": "7", "failure": "error", "detail": "it ended",
    }  # fmt: skip
    shown = "\n".join(lines(record, in_colour=False, environment="agent"))
    heads = [line for line in shown.splitlines() if line.startswith("---")]
    assert heads[1:8] == [
        "--- 0 model, 2 tokens, reward +0.25 ---",
        "--- 1 agent, 2 tokens ---",
        "--- 2 model, 3 tokens, reward +0.5 ---",
        "--- 3 agent, 0 tokens, a branch behind 1 ---",
        "--- 4 model, 1 tokens ---",
        "--- 5 agent, 2 tokens, a new conversation ---",
        "--- 6 model, 1 tokens, reward +0.125 ---",
    ]
    assert "--- wrong, reward +0, answer 7, failure error: it ended" in shown
    record["turns"] = found[:3]
    assert "--- model, 2 tokens, reward +0.25 ---\ntext 0\n--- environment, 2 tokens ---" in (
        "\n".join(lines(record, in_colour=False))
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from(["on", "auto", "off"]))
def test_a_computed_token_counts_for_each_sequence_that_it_is_in(
    seed: int, share: SharePrefix
) -> None:
    """As many tokens at each position as in sequences from the root to each leaf."""
    samples = samples_of(*drawn(seed))
    micro, apart = pack(samples, CPU, share=share), pack(lineages(samples)[0], CPU)
    assert apart.multiplicity.eq(1).all() and micro.multiplicity.ge(1).all()
    counts = [Counter[tuple[int, int]]() for _ in range(2)]
    for counter, packed in zip(counts, (micro, apart), strict=True):
        columns = (packed.token_ids, packed.position_ids, packed.multiplicity)
        for token, position, count in zip(*(column.tolist() for column in columns), strict=True):
            counter[token, position] += int(count)
    assert counts[0] == counts[1]
    assert pack(Samples.concatenate([]), CPU).multiplicity.eq(0).all()
