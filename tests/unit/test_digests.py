"""Digests of regions: the same at both ends however a tensor is cut, and another where anything
differs.
"""

from __future__ import annotations

import random
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.parallel.reshard.boxes import Box
from megarl.weights import checksums as digests
from megarl.weights.checksums import _on_device, _seed, carry, digest, signed

MODULO = 2**64
EXAMPLES = settings(max_examples=30, deadline=None, derandomize=True)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SIDES = st.integers(1, 40)


def numbers(
    rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(tensor: torch.Tensor) -> Box:
    return Box(0, tensor.shape[0], 0, tensor.shape[1])


def on_device(view: torch.Tensor, box: Box) -> int:
    """What a GPU would compute, on the CPU."""
    return _on_device(view, _seed(box))


BOTH = pytest.mark.parametrize("made", [digest, on_device])


def by_hand(data: bytes, seed: int) -> int:
    """The weighted sum in Python's integers."""
    data += bytes(-len(data) % 8)
    total = seed
    for number, word in enumerate(struct.unpack(f"<{len(data) // 8}q", data)):
        place = signed(number + seed)
        place = signed((place ^ (place >> 30)) * 0xBF58476D1CE4E5B9)
        place = signed((place ^ (place >> 27)) * 0x94D049BB133111EB)
        total += word * (signed(place ^ (place >> 31)) | 1)
    return signed(total)


@EXAMPLES
@given(SIDES, SIDES, DTYPES, st.integers(1, 7), st.randoms(use_true_random=False))
def test_sums_over_bands_are_the_same_at_both_ends(
    rows: int, columns: int, dtype: torch.dtype, band: int, order: random.Random
) -> None:
    source, target = numbers(rows, columns), torch.empty(rows, columns, dtype=dtype)
    boxes = [
        half
        for box in whole(source).bands(band)
        for half in (box._replace(right=columns // 2), box._replace(left=columns // 2))
    ]
    boxes = [box for box in boxes if box.area]

    def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
        return tensor[box.top : box.bottom, box.left : box.right]

    sent = sum(carry(part(source, box), part(target, box), box) for box in boxes)
    order.shuffle(boxes)
    assert torch.equal(target, source.to(dtype))
    assert (sent - sum(digest(part(target, box), box) for box in boxes)) % MODULO == 0
    ranks = [boxes[rank::3] for rank in range(3)]
    shares = torch.tensor(
        [signed(sum(digest(part(target, box), box) for box in mine)) for mine in ranks]
    )
    assert int(shares.sum()) == signed(sent)


@BOTH
@EXAMPLES
@given(rows=SIDES, columns=SIDES, dtype=DTYPES, data=st.data())
def test_one_bit_changes_it(
    made, rows: int, columns: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    owned = numbers(rows, columns, dtype)
    before, flat = made(owned, whole(owned)), owned.view(torch.uint8).view(-1)
    place = data.draw(st.integers(0, flat.numel() - 1))
    flat[place] ^= 1 << data.draw(st.integers(0, 7))
    assert made(owned, whole(owned)) != before


@BOTH
def test_place_is_part_of_it(made) -> None:
    owned, box = numbers(6, 8), Box(0, 6, 0, 8)
    others = [
        box._replace(top=1),
        box._replace(bottom=7),
        box._replace(left=1),
        box._replace(right=9),
        Box(6, 12, 0, 8),
    ]
    assert len({made(owned, other) for other in [box, *others]}) == 6
    first, second = box.bands(3)
    assert made(owned[:3], first) + made(owned[3:], second) != made(owned[3:], first) + made(
        owned[:3], second
    )


@BOTH
def test_two_words_that_change_places_change_it(made) -> None:
    owned = numbers(1, 64).view(torch.int64)
    swapped = owned.clone()
    swapped[0, [3, 17]] = owned[0, [17, 3]]
    assert made(owned, whole(owned)) != made(swapped, whole(owned))


@BOTH
@EXAMPLES
@given(rows=SIDES, columns=SIDES, dtype=DTYPES, more=st.integers(1, 9))
def test_strided_regions_equal_contiguous_ones(
    made, rows: int, columns: int, dtype: torch.dtype, more: int
) -> None:
    wide = numbers(rows, columns + more, dtype)
    view = wide[:, more:]
    assert made(view, whole(view)) == made(
        view.clone(memory_format=torch.contiguous_format), whole(view)
    )


@pytest.mark.parametrize("chunk_bytes", [1, 100, 4096])
def test_chunks_do_not_show(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, box = (
        numbers(37, 50)[:, 3:],
        torch.empty(37, 47, dtype=torch.bfloat16),
        Box(2, 39, 5, 52),
    )
    expected = carry(source, target, box)
    target.zero_()
    monkeypatch.setattr(digests, "CHUNK_BYTES", chunk_bytes)
    assert carry(source, target, box) == expected == digest(target, box)
    assert torch.equal(target, source.bfloat16())


@EXAMPLES
@given(SIDES, SIDES, DTYPES, st.integers(-(2**63), 2**63 - 1))
def test_a_gpu_s_arithmetic_is_what_it_says(
    rows: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    owned = numbers(rows, columns, dtype, seed=rows)
    assert _on_device(owned, seed % MODULO) == by_hand(
        owned.view(torch.uint8).numpy().tobytes(), seed
    )


@pytest.mark.parametrize("words", [1, 7, 64])
def test_a_gpu_s_portions_do_not_show(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    owned = numbers(9, 31)
    expected = on_device(owned, whole(owned))
    monkeypatch.setattr(digests, "NUM_WORDS", words)
    assert on_device(owned, whole(owned)) == expected


@pytest.mark.parametrize(("device", "read"), [("cuda", "source"), ("cpu", "target")])
def test_a_gpu_digests_what_it_sends_and_not_the_memory_of_another(
    device: str, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target may be on a GPU that an engine's cache has filled."""

    class Region(SimpleNamespace):
        def copy_(self, source: Any) -> None:
            self.copied = source

        def to(self, dtype: str) -> Any:
            assert dtype == "bfloat16"
            return self

    source: Any = Region(device=torch.device(device), name="source")
    target: Any = Region(device=torch.device("cuda", 1), name="target", dtype="bfloat16")
    monkeypatch.setattr(digests, "_on_device", lambda region, seed: region.name)
    assert carry(source, target, Box(0, 1, 0, 1)) == read and target.copied is source


@pytest.mark.gpu
def test_a_gpu_and_the_arithmetic_agree() -> None:
    source, box = numbers(33, 65), Box(0, 33, 0, 65)
    target = torch.empty(33, 65, dtype=torch.bfloat16, device="cuda")
    sent = carry(source.cuda(), target, box)
    assert sent == digest(target, box) == _on_device(target.cpu(), _seed(box))
