"""Layouts, balance: pure arithmetic."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.parallel import balance
from megarl.parallel.layout import Layout, resolve
from megarl.parallel.prefix_balance import FamilyBalance
from megarl.parallel.prefix_tree import Prefix, Size
from megarl.system.signals import AGENT

DEGREES = st.integers(1, 4)


@given(DEGREES, DEGREES, DEGREES)
def test_groups_are_the_slices_of_the_grid(data: int, sequence: int, tensor: int) -> None:
    layout = Layout(data, sequence, tensor)
    grid = torch.arange(layout.size).view(data, sequence, tensor)
    for rank in range(layout.size):
        assert layout.rank(**layout.coordinates(rank)) == rank
    for count in (1, 2, 3):
        for axes in itertools.combinations(Layout.AXES, count):
            found = layout.groups(*axes)
            assert sorted(rank for ranks in found for rank in ranks) == list(range(layout.size))
            for ranks in found:
                place = layout.coordinates(ranks[0])
                index = tuple(slice(None) if name in axes else place[name] for name in Layout.AXES)
                assert list(ranks) == grid[index].flatten().tolist()


def test_resolve_fills_in_data_and_refuses_what_does_not_match() -> None:
    assert resolve(data=0, sequence=2, tensor=2, num_ranks=8) == Layout(2, 2, 2)
    with pytest.raises(
        ValueError,
        match=r"tensor 2 = 16 ranks, but this run has 8; set training\.layout\.data to 1",
    ):
        resolve(data=2, sequence=4, tensor=2, num_ranks=8)
    with pytest.raises(ValueError, match="does not divide 6 ranks"):
        resolve(data=0, sequence=4, tensor=1, num_ranks=6)


@pytest.mark.parametrize(("variables", "option"), [
    ({}, "--ranks"),
    ({"TORCHELASTIC_RUN_ID": "1"}, "--nproc-per-node"),
    ({"TORCHELASTIC_RUN_ID": "1", AGENT: "1"}, "--ranks"),
])  # fmt: skip
def test_the_option_that_is_named_is_that_of_the_launcher(
    variables: dict[str, str], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a plain torchrun, or of megarl's own."""
    for name in ("TORCHELASTIC_RUN_ID", AGENT):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"start a multiple of 4 ranks \({option}\)"):
        resolve(data=0, sequence=4, tensor=1, num_ranks=6)
    with pytest.raises(ValueError, match=rf"start more ranks \({option}\)"):
        Layout(expert=2)


LENGTHS = st.lists(st.integers(1, 300), max_size=60)


@given(LENGTHS, st.integers(1, 8))
def test_split_deals_every_sample_once_evenly(lengths: list[int], parts: int) -> None:
    dealt = balance.split_by_work([balance.attention_work(length) for length in lengths], parts)
    assert sorted(position for rank in dealt for position in rank) == list(range(len(lengths)))
    counts = [len(rank) for rank in dealt]
    assert max(counts) - min(counts) <= 1


@given(LENGTHS, st.integers(1, 8), st.integers(50, 400))
def test_rows_keep_to_the_budget_and_are_equally_many(
    lengths: list[int], parts: int, budget: int
) -> None:
    works = [balance.attention_work(length) for length in lengths]
    dealt = [[lengths[i] for i in rank] for rank in balance.split_by_work(works, parts)]
    packed = balance.rows_in_step(dealt, budget)
    assert len({len(rows) for rows in packed}) == 1
    for mine, rows in zip(dealt, packed, strict=True):
        assert sorted(position for row in rows for position in row) == list(range(len(mine)))
        for row in rows:
            assert len(row) <= 1 or sum(mine[i] for i in row) <= budget


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 50))
def test_no_fewer_packed_sequences_would_do(lengths: list[int], budget: int) -> None:
    """The bounds from below leave out no number of packed sequences that the greedy way could
    fill."""
    found = balance.rows(lengths, budget)
    patch = pytest.MonkeyPatch()
    with patch.context() as changed:
        changed.setattr(balance, "MOST_BOUNDED", 0)
        assert balance.rows(lengths, budget) == found


def test_split_balances_work() -> None:
    """Long-tailed lengths over 8 ranks: the most loaded rank has little more than the mean."""
    draw = torch.Generator().manual_seed(0)
    lengths = (torch.rand(512, generator=draw) ** 3 * 4000 + 50).long().tolist()
    works = [balance.attention_work(length) for length in lengths]
    loads = [sum(works[i] for i in rank) for rank in balance.split_by_work(works, 8)]
    assert max(loads) / (sum(loads) / 8) < 1.02


@given(
    st.lists(st.one_of(st.none(), st.integers(1, 50)), min_size=1, max_size=4),
    st.integers(0, 120),
)
def test_work_counts_the_keys_within_windows(windows: list[int | None], length: int) -> None:
    """As many as the masks of the layers leave, but for half a key of each token."""
    query, key = torch.arange(length)[:, None], torch.arange(length)
    pairs = 0.0
    for window in windows:
        mask = (query >= key) & (query - key < (length if window is None else window))
        # The diagonal counts half, as in length * length / 2; a token at the window's edge has
        # another half key there.
        far = 0 if window is None else max(0, length - window)
        pairs += (int(mask.sum()) - (length - far) / 2) / len(windows)
    wanted = length + pairs / balance.ATTENTION_TOKENS
    assert balance.work_within(windows)(length) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("windows", "beside"), [((), 4), ((None, None), 4), ((256, 256), 9), ((256, None), 6)]
)
def test_windows_decide_what_is_even(windows: tuple[int | None, ...], beside: int) -> None:
    """A sample of 16K tokens and 27 of 2K on two ranks. With causal attention the long one is as
    much work as 19 others, within windows of 256 tokens as 8: so many are `beside` it.
    """
    # A first token in common, so that ranks may have different numbers of samples.
    sizes = [Size(length, (Prefix(1, "a"),)) for length in (16384, *[2048] * 27)]
    dealt = FamilyBalance(sizes, windows=windows).split(2, 2**20)
    assert sorted(map(len, dealt)) == sorted([1 + beside, 27 - beside])
    assert len(dealt[0] if 0 in dealt[0] else dealt[1]) == 1 + beside
