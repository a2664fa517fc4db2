"""Parts of layers that buckets have cut come together again, and only complete layers are handed
over.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.parallel.reshard.boxes import Box, Owned
from megarl.parallel.reshard.buckets import make_buckets
from megarl.weight_sync.bucket_receiver import Modules


@settings(max_examples=100, deadline=None, derandomize=True)
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
