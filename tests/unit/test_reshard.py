"""The reshard plan on random models: each element once, where it belongs, for the fewest bytes and
with even work.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import ROOT, python
from support.reshard_sides import (
    ENDS,
    GRAINS,
    TENSORS,
    Side,
    draw_local,
    engine,
    fixed_digest,
    planned,
    same,
    sides,
    tables,
    training,
)

from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import (
    ZEROS,
    Box,
    Owned,
    Piece,
    empty_buffers,
    fills,
    scatter,
    tiles,
)
from megarl.parallel.reshard.buckets import ALIGN, copies_of, make_buckets
from megarl.parallel.reshard.owned import training_owned, whole_owned
from megarl.parallel.reshard.plan import make_plan
from megarl.parallel.tensor import Shard

FEW = settings(max_examples=25, deadline=None, derandomize=True)
MANY = settings(max_examples=60, deadline=None, derandomize=True)
ITEMSIZE = 2


@FEW
@given(found=sides())
def test_what_ranks_hold_is_what_torch_cuts(found: list[Side]) -> None:
    flat = found[-1].by_hand[0]
    whole = {
        piece.tensor: flat[piece.tensor].reshape(-1, piece.box.columns)
        for piece in found[-1].owned[0].pieces
    }
    for side in found:
        assert same([scatter(owned, whole) for owned in side.owned], side.by_hand), side.what
        assert [owned.sizes for owned in side.owned] == [
            {k: len(v) for k, v in rank.items()} for rank in side.by_hand
        ]
        assert not any(fills(owned) for owned in side.owned)


@FEW
@given(ends=ENDS, grain=GRAINS, data=st.data())
def test_every_element_is_written_once_and_padding_never(
    ends: tuple[Side, Side], grain: int, data: st.DataObject
) -> None:
    source, destination = ends
    plan = planned(source, destination, grain, draw_local(data, source, destination))
    counts = [empty_buffers(owned, torch.int64) for owned in destination.owned]
    for copy in plan.copies:
        assert copy.taken.box == copy.put.box and copy.area > 0
        copy.put.view(counts[copy.destination][copy.put.buffer]).add_(1)
    wanted = [
        {name: (flat > 0).long() for name, flat in one.items()} for one in destination.by_hand
    ]
    assert same(counts, wanted)


@FEW
@given(ends=ENDS, grain=GRAINS, data=st.data())
def test_values_arrive_and_come_back(
    ends: tuple[Side, Side], grain: int, data: st.DataObject
) -> None:
    """There and back is the identity: training, engines of any number, a checkpoint and another
    training layout.
    """
    buffers = ends[0].by_hand
    for source, destination in (ends, ends[::-1]):
        made = [empty_buffers(owned, torch.int64) for owned in destination.owned]
        plan = planned(source, destination, grain, draw_local(data, source, destination))
        for copy in plan.copies:
            taken = copy.taken.view(buffers[copy.source][copy.taken.buffer])
            copy.put.view(made[copy.destination][copy.put.buffer]).copy_(taken)
        assert same(made, destination.by_hand), (source.what, destination.what)
        buffers = made


@FEW
@given(ends=ENDS, grain=GRAINS, data=st.data())
def test_no_plan_moves_fewer_bytes(
    ends: tuple[Side, Side], grain: int, data: st.DataObject
) -> None:
    source, destination = ends
    local = draw_local(data, source, destination)
    plan = planned(source, destination, grain, local)
    fewest = 0
    for rank, buffers in enumerate(destination.by_hand):
        here = source.by_hand[local[rank]].values() if rank in local else ()
        have = {number for flat in here for number in flat.tolist()}
        wanted = {number for flat in buffers.values() for number in flat.tolist()}
        fewest += len(wanted - have - {0})
    assert plan.minimum(ITEMSIZE) == plan.moved(ITEMSIZE) == fewest * ITEMSIZE

    links, ports = Counter(), Counter()
    for copy in plan.copies:
        if (copy.destination, copy.source) not in local.items():
            links[copy.source, copy.destination] += copy.area * ITEMSIZE
            ports.update({("out", copy.source): copy.area, ("in", copy.destination): copy.area})
    assert plan.links(ITEMSIZE) == links
    busiest = max(ports.values(), default=0)
    assert plan.seconds(ITEMSIZE, bytes_per_s=8.0) == busiest * ITEMSIZE / 8.0


@FEW
@given(data=st.data(), stage=st.integers(0, 2), grain=GRAINS, engines=st.integers(1, 3))
def test_replicas_share_the_work(data: st.DataObject, stage: int, grain: int, engines: int) -> None:
    """The least loaded takes the next region, so none sends more than total / n + largest region *
    (1 - 1 / n).
    """
    tensor = data.draw(TENSORS)
    table = data.draw(tables(tensor))
    layout = Layout(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 2)), 1)
    source, destination = training(table, layout, stage), engine(table, tensor, engines)
    local = draw_local(data, source, destination)
    plan = planned(source, destination, grain, local)
    out = Counter({rank: 0 for rank in range(layout.size)})
    for (rank, _), count in plan.links(1).items():
        out[rank] += count
    size = sum(len(flat) for rank in destination.by_hand for flat in rank.values())
    dealt = max(grain, size // 1024)
    region = max(dealt, *(math.prod(row.shape[1:]) for row in table)) if layout.size > 1 else 0
    assert layout.size * max(out.values()) <= out.total() + region * (layout.size - 1)


def test_both_ends_make_the_same_plan() -> None:
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    code = "from support.reshard_sides import fixed_digest; print(fixed_digest())"
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": paths}
    child = python("-c", code, env=environment)
    assert fixed_digest() == fixed_digest() == child.stdout.strip(), child.stderr


@MANY
@given(
    data=st.data(),
    limit=st.integers(1, 3000),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    neighbours=st.booleans(),
)
def test_buckets_hold_modules_in_order(
    data: st.DataObject, limit: int, itemsize: int, neighbours: bool
) -> None:
    names = [
        f"{module}.{kind}"
        for module in data.draw(st.permutations(["a", "ab", "c.0", "c.1", "d"]))
        for kind in "wbs"
    ]
    names = names if neighbours else data.draw(st.permutations(names))
    owned = Owned()
    for name in names[: data.draw(st.integers(0, len(names)))]:
        width = data.draw(st.integers(1, 8))
        for _ in range(data.draw(st.integers(0, 2))):
            owned.add("t", Box(0, data.draw(st.integers(0, 30)), 0, width), name)
        owned.sizes.setdefault(name, 0)
    sizes, widths = owned.sizes, {piece.buffer: piece.stride for piece in owned.pieces}
    buckets = make_buckets(owned, itemsize, limit)
    order = list(dict.fromkeys(name for bucket in buckets for name in bucket.sizes))
    first = [name.rpartition(".")[0] for name in sizes]
    assert order == sorted(sizes, key=lambda name: first.index(name.rpartition(".")[0]))
    assert order == list(sizes) or not neighbours
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))

    reached = dict.fromkeys(sizes, 0)
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    for bucket in buckets:
        rows = [size // widths.get(name, 1) for name, size in bucket.sizes.items()]
        over = bucket.num_bytes - limit
        assert over <= 0 or len(rows) == 1 or over < ALIGN * len(rows)
        fits = sum(bucket.sizes.values()) * itemsize <= limit
        assert len(rows) > 1 or rows[0] <= 1 or fits, "larger than need be"
        image = torch.full((bucket.num_bytes + 8,), 255, dtype=torch.uint8)
        found = bucket.buffers(image, dtype)
        for place, (name, flat) in enumerate(found.items()):
            assert bucket.starts[name] == reached[name] and bucket.offsets[name] % ALIGN == 0
            assert len(flat) % widths.get(name, 1) == 0, "a row is cut"
            reached[name] += len(flat)
            flat.fill_(place)
        apart = [(flat == place).all() for place, flat in enumerate(found.values())]
        assert all(apart), "images overlap"
        assert (image[bucket.num_bytes :] == 255).all()
    assert reached == sizes, "each element of each buffer in one bucket"
    for path in set(first):
        mates = [name for name in sizes if name.rpartition(".")[0] == path]
        if sum(-(-sizes[name] * itemsize // ALIGN) * ALIGN for name in mates) <= limit:
            holders = sum(bool(set(mates) & set(bucket.sizes)) for bucket in buckets)
            assert holders == 1, "a module that fits is cut"


@FEW
@given(found=sides(), limit=st.integers(1, 20_000))
def test_what_travels_in_buckets_is_what_the_plan_copies(found: list[Side], limit: int) -> None:
    """Each bucket's copies, made into images of their own; parts put together are the buffers."""
    source, _, destination, _ = found
    plan = planned(source, destination, 5)
    for rank, owned in enumerate(destination.owned):
        buckets = make_buckets(owned, 8, limit)
        mine = replace(plan, copies=[copy for copy in plan.copies if copy.destination == rank])
        for bucket, copies in zip(buckets, copies_of(mine.copies, buckets), strict=True):
            parts = bucket.buffers(torch.zeros(bucket.num_bytes, dtype=torch.uint8), torch.int64)
            for copy in copies:
                assert copy.taken.box == copy.put.box
                copy.put.view(parts[copy.put.buffer]).copy_(
                    copy.taken.view(source.by_hand[copy.source][copy.taken.buffer])
                )
            for name, flat in parts.items():
                start = bucket.starts[name]
                assert torch.equal(flat, destination.by_hand[rank][name][start : start + len(flat)])


@st.composite
def boxes(draw: st.DrawFn, rows: int, columns: int) -> Box:
    top, left = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
    return Box(top, draw(st.integers(top + 1, rows)), left, draw(st.integers(left + 1, columns)))


def tiled(box: Box, data: st.DataObject) -> list[Box]:
    """Bands of the box, each cut at columns of its own."""
    ends = [(box.top, box.bottom), *[(box.left, box.right)] * box.rows]
    cuts = [
        sorted({low, high, *data.draw(st.lists(st.integers(low, high), max_size=2))})
        for low, high in ends
    ]
    bands = zip(pairwise(cuts[0]), cuts[1:])  # noqa: B905
    return [
        Box(top, bottom, left, right)
        for (top, bottom), columns in bands
        for left, right in pairwise(columns)
    ]


@MANY
@given(data=st.data(), whole=boxes(7, 7), how=st.sampled_from(["tiled", "moved", "random"]))
def test_tiles_counts_as_brute_force_does(data: st.DataObject, whole: Box, how: str) -> None:
    found = tiled(whole, data) if how != "random" else data.draw(st.lists(boxes(7, 7), max_size=6))
    # Within the whole, so that the area stays right: an overlap makes up for the gap.
    if how == "moved":
        box = found.pop(data.draw(st.integers(0, len(found) - 1)))
        top = data.draw(st.integers(whole.top, whole.bottom - box.rows))
        found.append(box._replace(top=top, bottom=top + box.rows))
    cells = Counter(
        (i, j)
        for box in found
        for i in range(box.top, box.bottom)
        for j in range(box.left, box.right)
    )
    wanted = {
        (i, j): 1 for i in range(whole.top, whole.bottom) for j in range(whole.left, whole.right)
    }
    assert tiles(data.draw(st.permutations(found)), whole) == (dict(cells) == wanted)


@MANY
@given(data=st.data(), parts=st.integers(1, 20))
def test_a_slice_is_what_flat_slicing_gives(data: st.DataObject, parts: int) -> None:
    """Several pieces in one buffer, fewer elements than slices among them."""
    owned, whole = Owned(), torch.arange(1, 50).reshape(7, 7)
    for _ in range(data.draw(st.integers(1, 4))):
        owned.add("w", data.draw(boxes(7, 7)), data.draw(st.sampled_from("ab")))
    flat = scatter(owned, {"w": whole})
    for part in range(parts):
        cut = owned.slice(dict.fromkeys(owned.sizes, (part, parts)))
        lengths = {name: -(-size // parts) for name, size in owned.sizes.items()}
        wanted = {
            name: flat[name][part * length : (part + 1) * length]
            for name, length in lengths.items()
        }
        assert same([scatter(cut, {"w": whole})], [wanted])
        assert cut.sizes == {name: len(some) for name, some in wanted.items()}
        assert not fills(cut) and len(cut.pieces) <= 3 * len(owned.pieces)


UPPER, LOWER, MIDDLE = Box(0, 2, 0, 3), Box(2, 4, 0, 3), Box(1, 3, 0, 3)


@pytest.mark.parametrize(
    "kept",
    [[Box(0, 3, 0, 3), LOWER], [UPPER, MIDDLE], [UPPER, MIDDLE, Box(3, 4, 0, 3)], [UPPER], []],
)
def test_sources_of_no_one_layout_are_refused(kept: list[Box]) -> None:
    sources = [Owned([Piece("model.w", box, "w", 0, 3)], {"w": box.area}) for box in kept]
    wanting = Owned([Piece("model.w", Box(0, 4, 0, 3), "flat", 0, 3)], {"flat": 12})
    missing = r"owns all of model\.w rows 0:4 that rank 1 needs"
    said = r"pieces of model\.w overlap" if len(kept) > 1 else missing
    with pytest.raises(ValueError, match=said):
        make_plan(sources, [Owned(), wanting])


FIRST, PADDING = Piece("w", UPPER, "flat", 0, 3), Piece(ZEROS, UPPER, "flat", 12, 3)
SECONDS = {
    "lost": [], "early": [(3, 3)], "late": [(9, 3)], "apart": [(6, 4)], "twice": [(6, 3), (6, 3)],
}  # fmt: skip


@pytest.mark.parametrize("how", [*SECONDS, "padded", "nothing"])
def test_a_buffer_that_is_not_filled_is_named(how: str) -> None:
    rest = [Piece("w", LOWER, "flat", *place) for place in SECONDS.get(how, [(6, 3)])]
    pieces = [] if how == "nothing" else [FIRST, *rest, *([PADDING] if how == "padded" else [])]
    source = whole_owned({"w": (4, 3)})
    with pytest.raises(ValueError, match="pieces of flat on destination rank 1 "):
        make_plan(source, [source[0], Owned(pieces, {"flat": 12})])


def test_a_cut_that_no_box_describes_is_refused() -> None:
    shards = {"conv.w": Shard.even(1, 2, 2)}
    with pytest.raises(ValueError, match=r"conv\.w"):
        training_owned({"conv.w": (4, 2, 3)}, shards, Layout(1, 1, 2), 0)
