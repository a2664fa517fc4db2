"""One rank's part of the transfer plan: the same as in the whole plan, and small. Parts of
layers that buckets have cut come together again, and only complete layers are handed over.
"""

from __future__ import annotations

import time
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_ranks import model_table, whole_plan
from support.reshard_sides import GRAINS, LAYOUTS, TENSORS
from support.tables import Row, engine_table, training_shards

from megarl.parallel.layout import Layout
from megarl.parallel.reshard import plan as plan_module
from megarl.parallel.reshard.boxes import Box, Owned
from megarl.parallel.reshard.buckets import copies_of, make_buckets
from megarl.weights.bucket_receiver import Modules
from megarl.weights.route import Route, RouteSpec, table_fingerprint

FEW = settings(max_examples=25, deadline=None, derandomize=True)


@st.composite
def repeated(draw: st.DrawFn) -> tuple[list[Row], int]:
    """A model whose layers repeat, a vocabulary at both ends, and the ranks of its engines."""
    tensor = draw(TENSORS)
    heads = draw(st.sampled_from([1, tensor, 2 * tensor]))
    sizes = (draw(st.integers(1, 5)), 6, 2 * tensor, heads, 2, 3 * tensor, 67)
    table = model_table(sizes, draw(st.sampled_from([0, 2])), *(draw(st.booleans()) for _ in "tbn"))
    return table, tensor


def some(data: st.DataObject, count: int) -> list[int]:
    """At most four ranks of `count`."""
    return data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4, unique=True))


@FEW
@given(
    found=repeated(),
    layout=LAYOUTS,
    stage=st.integers(0, 3),
    engines=st.integers(1, 3),
    local=st.booleans(),
    grain=GRAINS,
    data=st.data(),
)
def test_a_rank_makes_its_own_part_of_the_whole_plan(
    found: tuple[list[Row], int],
    layout: Layout,
    stage: int,
    engines: int,
    local: bool,
    grain: int,
    data: st.DataObject,
) -> None:
    """Each rank's route, made alone, has the copies that the whole plan has for it."""
    rows, tensor = found
    table = engine_table(rows, tensor)
    spec = RouteSpec(
        layout, stage, training_shards(rows, layout.tensor), engines, tensor,
        "float32", 256, table_fingerprint(table), local=local,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "GRAIN", grain)
        plan = whole_plan(spec, table)
        senders = {rank: Route.of_source(spec, table, rank) for rank in some(data, layout.size)}
        receivers = {
            number: Route.of_destination(spec, table, number)
            for number in some(data, spec.num_destinations)
        }
    assert spec.num_destinations == len(plan.destinations)
    buckets = make_buckets(plan.destinations[0], 4, 256)
    for rank, route in senders.items():
        mine = [copy for copy in plan.copies if copy.source == rank]
        assert route.copies == copies_of(mine, buckets)
    for rank, route in receivers.items():
        mine = [copy for copy in plan.copies if copy.destination == rank]
        assert route.copies == copies_of(mine, buckets)
        assert route.owned == plan.destinations[rank]
    for route in (*senders.values(), *receivers.values()):
        assert route.buckets == buckets and route.written == plan.moved(4)
        assert len(route.first_tensor(len(buckets) // 2)) > 0


def test_a_plan_for_512_engines_is_small_and_quick() -> None:
    """Of 80 layers, 64 training ranks and engines of 8; the time is of a traced process, which is
    several times slower.
    """
    rows = model_table((80, 512, 64, 8, 64, 1024, 128_000), 0, False, False, False)
    table, shards = engine_table(rows, 8), training_shards(rows, 8)
    spec = RouteSpec(
        Layout(8, 1, 8), 3, shards, 512, 8, "bfloat16", 2**23, table_fingerprint(table)
    )
    for make in (Route.of_source, Route.of_destination):
        tracemalloc.start()
        started_at = time.process_time()
        route = make(spec, table, 7)
        seconds = time.process_time() - started_at
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50e6 and seconds < 5, (peak, seconds)
        assert sum(map(len, route.copies)) > 500


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 9), st.booleans()), min_size=1, max_size=6
    ),
    limit=st.integers(1, 900),
)
def test_each_layer_is_complete_once_with_its_own_numbers(
    rows: list[tuple[int, int, bool]], limit: int
) -> None:
    owned = Owned()
    for layer, (outputs, inputs, has_bias) in enumerate(rows):
        owned.add("t", Box(0, outputs, 0, inputs), f"layers.{layer}.weight")
        if has_bias:
            owned.add("t", Box(0, outputs, 0, 1), f"layers.{layer}.bias")
    numbers = {name: torch.randn(size) for name, size in owned.sizes.items()}
    modules, found = Modules(owned.sizes), {}
    buckets = make_buckets(owned, 4, limit)
    for bucket in buckets:
        image = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for name, flat in bucket.buffers(image, torch.float32).items():
            flat.copy_(numbers[name][bucket.starts[name] : bucket.starts[name] + len(flat)])
        for path, values in modules.complete(bucket.buffers(image, torch.float32), bucket):
            for leaf, flat in values.items():
                assert f"{path}.{leaf}" not in found, "handed over twice"
                found[f"{path}.{leaf}"] = flat.clone()
        image.fill_(255)  # what is kept is a copy: the image is written again
    assert found.keys() == numbers.keys()
    assert all(torch.equal(found[name], numbers[name]) for name in numbers)
    assert not modules._parts, "a part is kept after its layer was complete"
