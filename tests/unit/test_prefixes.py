"""Shared prefixes: the tree of samples, the tokens that are computed, and what a model makes of them;
groups whose prompts begin alike, divided by the rollout service.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rollouts import dealt, segment
from support.sequence_cases import Case, assert_close, cases, dense

from megarl.parallel.prefix_balance import FamilyBalance
from megarl.parallel.prefix_tree import Prefix, Size
from megarl.settings.training import SharePrefix, TrainingConfig
from megarl.trainer.packing import pack
from megarl.trainer.prefixes import (
    balance_of,
    must_save,
    saved_tokens,
    shareable,
    sizes_of,
    tree_of,
)
from megarl.trainer.step import computed_tokens
from megarl.types import Group, Prompt, Rollout, Samples, Verdict

CPU = torch.device("cpu")


def samples_of(rows: list[tuple[list[int], int]]) -> Samples:
    """Samples of (token ids, number of leading tokens that are not trained on)."""

    def one(number: int, tokens: list[int], untrained: int) -> Samples:
        places = np.arange(len(tokens))
        return Samples.one(
            number, tokens, mask=places >= untrained, engine_logprobs=places / -8, reward=number
        )

    return Samples.concatenate([one(number, *row) for number, row in enumerate(rows)])


@st.composite
def rows(draw: st.DrawFn, most: int = 12) -> list[tuple[list[int], int]]:
    """Token sequences of few different tokens, which often begin alike."""
    found = []
    for _ in range(draw(st.integers(1, most))):
        if found and draw(st.booleans()):
            start = draw(st.sampled_from(found))[0][: draw(st.integers(0, 12))]
        else:
            start = []
        tokens = start + draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
        found.append((tokens, draw(st.integers(0, len(tokens)))))
    return found


def count_by_hand(samples: Samples) -> int:
    """The fewest tokens: each shareable prefix once, counted as a set, and what nobody shares."""
    prefixes, alone = set(), 0
    for number, limit in enumerate(shareable(samples).tolist()):
        tokens = samples.token_ids[samples.offsets[number] : samples.offsets[number + 1]].tolist()
        prefixes |= {tuple(tokens[:length]) for length in range(1, limit + 1)}
        alone += len(tokens) - limit
    return len(prefixes) + alone


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows())
def test_every_sample_is_a_path_of_the_tree_with_the_fewest_tokens(
    drawn: list[tuple[list[int], int]],
) -> None:
    samples = samples_of(drawn)
    tree = tree_of(samples, saves=0.0, deepest=99)
    wanted = count_by_hand(samples)
    assert len(tree.places) == wanted
    if not tree.parents:
        assert wanted == len(samples.token_ids)
        return
    assert wanted < len(samples.token_ids)
    saved = saved_tokens(tree.starts.tolist(), tree.parents, tree.begins.tolist())
    assert saved == len(samples.token_ids) - wanted
    assert sorted(tree.owners[tree.owners >= 0].tolist()) == list(range(len(samples)))
    for document, owner in enumerate(tree.owners.tolist()):
        parent = tree.parents[document]
        assert parent < document
        between = [d for d in range(parent + 1, document)] if parent >= 0 else []
        assert all(parent in chain(tree.parents, d) for d in between), "not depth first"
        if owner >= 0:
            path = [*reversed(chain(tree.parents, document)), document]
            spans = [slice(*tree.starts[d : d + 2]) for d in path]
            places = np.concatenate([tree.places[span] for span in spans])
            first, last = samples.offsets[owner : owner + 2]
            assert np.array_equal(samples.token_ids[places], samples.token_ids[first:last])


def chain(parents: tuple[int, ...], document: int) -> list[int]:
    """The ancestors of a document, the nearest first."""
    found = []
    while (document := parents[document]) >= 0:
        found.append(document)
    return found


def members(
    even: FamilyBalance, dealt: Sequence[Sequence[int]], budget: int
) -> list[list[list[int]]]:
    """By rank, the members of each packed sequence: each once, and no rank has more sequences."""
    packed = even.rows_in_step(dealt, budget)
    assert len({len(rows) for rows in packed}) == 1
    found = [
        [[mine[place] for place in row] for row in rows]
        for mine, rows in zip(dealt, packed, strict=True)
    ]
    everything = [n for rows in found for row in rows for n in row]
    assert sorted(everything) == sorted(n for one in dealt for n in one)
    return found


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    rows(most=24), st.sampled_from([0.0, 1 / 16, 1 / 4]), st.integers(1, 2), st.integers(1, 4),
    st.integers(8, 80),
)  # fmt: skip
def test_the_balance_counts_what_is_computed(
    drawn: list[tuple[list[int], int]], saves: float, together: int, ranks: int, budget: int
) -> None:
    """In every packed sequence, of samples or of pairs, which are within their budget."""
    samples = samples_of(drawn[: len(drawn) // together * together])
    even = FamilyBalance(sizes_of(samples, "on"), saves, together=together)
    dealt = even.split(ranks, budget)
    numbers = [n for one in dealt for n in one]
    assert sorted(numbers) == list(range(len(samples) // together))
    for row in members(even, dealt, budget):
        for units in row:
            chosen = [n * together + part for n in units for part in range(together)]
            computed = len(tree_of(samples.select(chosen), saves=saves).places)
            assert even.tokens(units) == computed
            assert computed <= budget or len(units) == 1


def nested(systems: int, groups: int, samples: int, lengths: tuple[int, int, int]) -> Samples:
    """Random conversations: system prompts of so many tokens, groups with a question each, and
    samples with a response each.
    """
    draw, made = np.random.default_rng(0), []
    system, question, response = lengths
    for _ in range(systems):
        rules = draw.integers(0, 50_000, system).tolist()
        for _ in range(groups):
            prompt = rules + draw.integers(0, 50_000, question).tolist()
            made += [
                (prompt + draw.integers(0, 50_000, response).tolist(), len(prompt))
                for _ in range(samples)
            ]
    return samples_of(made)


def test_groups_behind_one_system_prompt_fill_few_packed_sequences() -> None:
    """64 groups of 8 behind 2,000 tokens. Without the system prompt's 7,707 tokens a packed
    sequence could hold three groups.
    """
    samples = nested(1, 64, 8, (2000, 50, 64))
    even = balance_of(samples, "auto")
    (rows,) = even.rows_in_step(even.split(1, 8192), 8192)
    assert len(rows) <= 7
    # The system prompt in each, and the rest at most once more for every group that is divided.
    own = 64 * (49 + 8 * 65)
    assert sum(map(even.tokens, rows)) <= own + len(rows) * (2001 + 49)


def test_conversations_stay_on_one_rank() -> None:
    """Eight system prompts of four groups each: on four ranks, each is computed by one or two."""
    samples = nested(8, 4, 4, (1000, 50, 64))
    even = balance_of(samples, "auto")
    dealt = even.split(4, 2**20)
    works = list(map(even.work, dealt))
    assert max(works) < 1.05 * sum(works) / 4
    assert sum(map(even.tokens, dealt)) <= even.tokens(range(128)) + 3 * 1050


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows(), st.sampled_from(["auto", "on"]))
def test_every_trained_token_is_in_the_packed_sequence_once(
    drawn: list[tuple[list[int], int]], share: str
) -> None:
    samples = samples_of(drawn)
    shared, repeated = pack(samples, CPU, share=share), pack(samples, CPU)

    def trained(micro):
        fields = ("places", "targets", "sample_ids", "engine_logprobs", "rewards", "position_ids")
        columns = [getattr(micro, name)[micro.mask] for name in (*fields, "token_ids")]
        order = columns[0].argsort()
        return [column[order] for column in columns]

    for mine, wanted in zip(trained(shared), trained(repeated), strict=True):
        assert torch.equal(mine, wanted)
    assert torch.equal(shared.members, repeated.members)
    assert int(shared.starts[-1]) == len(shared.token_ids) <= len(repeated.token_ids)


def test_a_prompt_and_instructions_before_it_are_computed_once() -> None:
    """Two prompts that begin with the same 40 tokens, three responses each."""
    rules, responses = list(range(40)), ([1, 2, 3], [4], [5, 6])
    prompts = [[*rules, *question] for question in ([7] * 10, [8] * 10)]
    samples = samples_of([([*one, *answer], 50) for one in prompts for answer in responses])
    tree = tree_of(samples)
    assert tree.parents == (-1, 0, 1, 1, 1, 0, 5, 5, 5)
    # The last token of a prompt is in every response's part: it predicts the first token.
    assert np.diff(tree.starts).tolist() == [40, 9, 4, 2, 3, 9, 4, 2, 3]
    # With one level, the whole prompt of each group, and nothing of both.
    shallow = tree_of(samples, deepest=1)
    assert shallow.parents == (-1, 0, 0, 0, -1, 4, 4, 4)


def test_metrics_count_what_is_computed_and_what_sharing_saved() -> None:
    """A rank with a packed sequence of two samples and, since other ranks have more, one of padding."""
    samples = samples_of([([*range(40), 1, 2], 41), ([*range(40), 3], 41)])
    micro_batches = [pack(samples, CPU, share="on"), pack(Samples.concatenate([]), CPU)]
    alone = SimpleNamespace(rank=0, size=1)
    mesh, training = SimpleNamespace(sequence=alone, gradient=alone), TrainingConfig()
    role: Any = SimpleNamespace(device=CPU, mesh=mesh, training=training)
    found = computed_tokens([micro_batches], role)
    assert found == {"tokens/computed": 40 + 2 + 1 + 2, "tokens/shared_saved": 40}
    role.training = TrainingConfig(epochs_per_step=2)
    twice = computed_tokens([micro_batches], role)
    assert twice == {name: 2 * value for name, value in found.items()}


def test_small_savings_are_not_worth_a_call_of_attention() -> None:
    samples = samples_of([([1, 2, *[3] * 200], 2), ([1, 2, *[4] * 200], 2)])
    assert tree_of(samples).parents == () and len(tree_of(samples).places) == 404
    assert len(tree_of(samples, saves=0.0).places) == 403


def test_trained_and_last_tokens_are_never_shared() -> None:
    """The state at a trained token's predecessor has a loss, and a reward model reads the last."""
    alike = samples_of([([1, 2, 3, 4, 5], 3)] * 2)
    assert shareable(alike).tolist() == [2, 2]
    unscored = samples_of([([1, 2, 3, 4, 5], 5)] * 2)
    assert shareable(unscored).tolist() == [4, 4]
    first_trained = samples_of([([1, 2, 3], 0)] * 2)
    assert shareable(first_trained).tolist() == [0, 0] and not tree_of(first_trained).parents


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.lists(st.integers(1, 40), min_size=1, max_size=9)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 6),
    st.integers(8, 200),
    st.sampled_from([0.0, 1 / 16, 1 / 4]),
)
@example([(2, [1, 30]), (2, [1, 1, 1, 1, 1])], 1, 34, 1 / 4)
def test_families_are_dealt_out_whole_within_the_budget(
    families: list[tuple[int, list[int]]], ranks: int, budget: int, saves: float
) -> None:
    sizes = [
        Size(prefix + length, (Prefix(prefix, number),))
        for number, (prefix, lengths) in enumerate(families)
        for length in lengths
    ]
    even = FamilyBalance(sizes, saves)
    dealt = even.split(ranks, budget)
    assert sorted(n for one in dealt for n in one) == list(range(len(sizes)))
    for row in members(even, dealt, budget):
        assert all(even.tokens(some) <= budget or len(some) == 1 for some in row)
    # Sharing never asks for more than repeating the prefixes, but for what keeps ranks even.
    assert sum(map(even.tokens, dealt)) <= sum(size.length for size in sizes)


def test_a_long_response_leaves_the_others_their_prompt() -> None:
    """One response takes most of a row, another one more than a row: the rest stays together."""
    sizes = [Size(4000 + n, (Prefix(3999, 0),)) for n in [500] * 15 + [12000, 20000]]
    (rows,) = FamilyBalance(sizes).rows_in_step([range(17)], 16384)
    assert [row for row in rows if 16 in row] == [[16]]
    assert len(rows) == 3 and max(map(len, rows)) == 15


@pytest.mark.parametrize(("prompts", "responses", "groups", "ranks", "budget"), [
    ([300, 1000, 3000, 7000], (100, 1000), 32, 8, 8192),
    ([500, 1000, 2000, 24000], (500, 4000), 32, 8, 32768),
    ([1000, 5000, 20000, 40000], (500, 8000), 32, 8, 65536),
    ([4000], (50, 500), 9, 8, 32768), ([4000], (50, 500), 32, 6, 32768),
])  # fmt: skip
def test_packed_sequences_are_even_over_ranks(
    prompts: list[int], responses: tuple[int, int], groups: int, ranks: int, budget: int
) -> None:
    """The work of what is packed: a prefix is computed in every packed sequence that needs it, and
    a micro-batch lasts as long as that of the rank with the most work.
    """
    for seed in range(3):
        draw = np.random.default_rng(seed)
        prefixes = [(Prefix(int(draw.choice(prompts)), group),) for group in range(groups)]
        sizes = [
            Size(one[0].length + 1 + int(n), one)
            for one in prefixes
            for n in draw.integers(*responses, 16)
        ]
        even = FamilyBalance(sizes, saves=1 / 16)
        dealt = even.split(ranks, budget)
        works = np.array([list(map(even.work, row)) for row in members(even, dealt, budget)])
        of_rank = works.sum(1)
        print(of_rank.max() / of_rank.mean(), works.max(0).sum() / of_rank.mean())
        assert of_rank.max() < 1.06 * of_rank.mean()
        assert works.max(0).sum() < 1.15 * of_rank.mean()


def test_attention_over_a_tree_is_that_of_each_sample_alone() -> None:
    """The masks of the other tests come from `Positions`; here whole samples are computed."""

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(cases())
    def check(case: Case) -> None:
        case = replace(case, cap=None, has_sinks=False)
        q, k, v = (x.requires_grad_() for x in case.tensors()[:3])
        upstream, edges, outputs = case.tensors()[3], case.starts.tolist(), []
        parents = case.parents or (-1,) * len(case.lengths)
        for document in range(len(parents)):
            path = [*reversed(chain(parents, document)), document]
            ends = [edges[d + 1] for d in path]
            for place, (one, below) in enumerate(itertools.pairwise(path) if case.begins else ()):
                ends[place] = edges[one] + case.begins[below] - case.begins[one]
            spans = zip((edges[d] for d in path), ends, strict=True)
            index = torch.cat([torch.arange(*span) for span in spans])
            heads: Any = [x[index].transpose(0, 1)[None] for x in (q, k, v)]
            distance = torch.arange(len(index))[:, None] - torch.arange(len(index))
            mask = (distance >= 0) & (distance < (case.window or len(index)))
            options: Any = {"attn_mask": mask, "scale": case.scale, "enable_gqa": True}
            out = F.scaled_dot_product_attention(*heads, **options)
            outputs.append(out[0].transpose(0, 1)[-case.lengths[document] :])
        joined = torch.cat(outputs)
        wanted = [joined.detach(), *torch.autograd.grad(joined, (q, k, v), upstream)]
        assert_close(dense(case, case.tensors()), wanted, 1e-10)

    check()


def rollout(draw: random.Random, number: int, length: int) -> Rollout:
    """A response of tokens 0 and 1."""
    tokens = [draw.randint(0, 1) for _ in range(length)]
    return Rollout(number, 0, [segment(tokens)], Verdict(0.0, False), 0)


def group(draw: random.Random, ordinal: int, tokens: list[int], lengths: list[int]) -> Group:
    """A group of responses of these `lengths`, the last of which is greedy."""
    *made, greedy = [rollout(draw, number, length) for number, length in enumerate(lengths)]
    return Group(ordinal, Prompt(ordinal, "", tokens, ""), made, greedy)


def computed(samples: Samples, saves: float) -> int:
    """Tokens of a packed sequence of `samples` in training."""
    return len(tree_of(samples, saves=saves).places)


def packed(groups: list[Group], *, budget: int, saves: float, ranks: int = 1) -> list[list[int]]:
    """By rank, the tokens that each packed sequence computes; those of more samples than one are
    within the budget.
    """
    settings: dict[str, Any] = {"micro_batch_tokens": budget, "prefix_saves": saves}
    made = dealt(groups, num_data_ranks=ranks, sends_untrained=True, **settings)
    found = []
    for rank in range(ranks):
        batch = made.share(rank)
        (samples,), (rows,) = batch.samples, batch.micro_batches
        found.append([computed(samples.select(row), saves) for row in rows])
        for row, tokens in zip(rows, found[-1], strict=True):
            assert tokens <= budget or len(row) == 1
    return found


@pytest.mark.parametrize("share", ["auto", "on"])
def test_greedy_responses_share_what_the_service_counted(share: SharePrefix) -> None:
    """Prompts that have little of their own behind long instructions, in a budget of exactly what
    they need: 100 tokens of instructions, and 2 + 2 x 21 of each group.
    """
    draw = random.Random(0)
    groups = [group(draw, n, [2] * 100 + [n, 4, 5], [20, 20]) for n in range(4)]
    assert packed(groups, budget=276, saves=must_save(share)) == [[276]]


@pytest.mark.parametrize("share", ["auto", "on"])
def test_conversations_with_greedy_responses_stay_within_the_budget(share: SharePrefix) -> None:
    """Each turn is a prompt too; the next turn may begin as the greedy response did."""
    for seed in range(40):
        draw, tokens, groups = random.Random(seed), list[int](), []
        for ordinal in range(12):
            tokens = tokens + [draw.randint(0, 1) for _ in range(draw.choice([2, 20]))]
            lengths = [draw.choice([1, 5, 20, 100]) for _ in range(draw.choice([2, 3, 5]))]
            groups.append(group(draw, ordinal, tokens, lengths))
        rows = packed(groups, budget=300, saves=must_save(share), ranks=draw.choice([1, 2, 4]))
        assert len({len(row) for row in rows}) == 1
