"""The Triton kernels against float64: in Triton's interpreter on CPU, in a process of its own, and
on a GPU if there is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.block_pairs import LAYOUTS, LONG, ROW, STARTS, TOTAL, attention, compare
from support.commands import python
from support.sequence_cases import Case, assert_close, dense, split_attention

from megarl.kernels import logprobs_torch, tiles
from megarl.kernels.block import Positions
from megarl.kernels.tiles import Tile, visits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
here = pytest.mark.skipif(INTERPRETED, reason="runs in the process that starts this one")

# The interpreter multiplies the bits of bfloat16 as integers, and is slow.
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
SMALL = {name: Tile(32, 16, 4, 2) for name in ("forward", "grad_keys", "grad_queries")}


def nightly(*values: Any) -> Any:
    """A case that is interpreted only in `tests/run.sh nightly`; on a GPU it is one like others."""
    return pytest.param(*values, marks=pytest.mark.nightly if INTERPRETED else ())


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    return test if INTERPRETED else pytest.mark.gpu(test)


def triton_block(tile: tiles.Tiles | None = SMALL, **options: bool) -> Any:
    from megarl.kernels.block_triton import TritonBlock  # here: Triton reads the environment

    return TritonBlock(tile, **options)


@here
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("chosen", ["not nightly", pytest.param("", marks=pytest.mark.nightly)])
def test_these_tests_in_the_interpreter(chosen: str) -> None:
    schedules = "test_sequence_attention.py::test_every_schedule_equals_dense_attention"
    beside = Path(__file__).parent
    # Trees, windows, soft caps and sinks, in every schedule.
    files = [__file__, str(beside / schedules), str(beside / "test_elementwise.py")]
    files.append(str(beside / "test_expert_products.py"))
    options = ["-q", "-k", "not (cpu or reference)", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-m", chosen]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = python("-m", "pytest", *files, *options, env=environment, timeout=None)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "passed" in run.stdout


@here
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_visits_meet_every_visible_pair_once_and_heavy_tiles_first(
    name: str, by_keys: bool
) -> None:
    kinds = set()
    # In the last pair one tile's last place is another's first.
    for queries, keys in [
        *((a, b) for a in LAYOUTS[name] for b in LAYOUTS[name]),
        (ROW[:16], ROW[15:]),
    ]:
        positions_q, positions_k = Positions.of(queries, STARTS), Positions.of(keys, STARTS)
        mask = (positions_q.first[:, None] <= keys) & (keys <= queries[:, None])
        work, runs = visits(positions_q, positions_k, 16, 8, by_keys)
        mask = mask.T if by_keys else mask
        met = torch.zeros(mask.shape, dtype=torch.int64)
        weights = []
        for tile, *bounds in work.tolist():
            weight = 0
            for first, last, whole in [(*bounds[:2], True), (*bounds[2:], False)]:
                for begin, end in runs[first:last].tolist():
                    rows, columns = slice(tile * 16, tile * 16 + 16), slice(begin * 8, end * 8)
                    met[rows, columns] += 1
                    weight += end - begin
                    if whole:
                        assert mask[rows, columns].all() and mask[rows, columns].shape == (
                            16,
                            (end - begin) * 8,
                        )
                    kinds.add(whole)
            weights.append(weight)
        assert ((met == 1) | ((met == 0) & ~mask)).all()
        assert weights == sorted(weights, reverse=True) and 0 not in weights
        kinds.add("skipped" if (met == 0).any() else None)
    assert False in kinds and (name == "scattered" or {True, "skipped"} <= kinds)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, nightly(1)])
@pytest.mark.parametrize(
    "layout", ["zigzag", "scattered", nightly("contiguous"), nightly("striped")]
)
def test_attention_in_two_blocks(layout: str, rank: int, dtype: torch.dtype) -> None:
    compare(LAYOUTS[layout], rank, (2, 1), 16, dtype, triton_block(), DEVICE)


@on_device
@pytest.mark.parametrize("dtype", [torch.float16, *DTYPES[2:]])
@pytest.mark.parametrize(("heads", "width"), [
    ((4, 2), 24), ((1, 1), 136), *map(nightly, ((3, 1), (2, 2), (1, 1)), (8, 40, 72)),
])  # fmt: skip
def test_attention_with_odd_heads_and_widths(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], width: int, dtype: torch.dtype
) -> None:
    if heads == (4, 2):
        monkeypatch.setattr(tiles, "L2_BYTES", 1)  # one head after another
    compare(LAYOUTS["zigzag"], 0, heads, width, dtype, triton_block(), DEVICE)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("cap", "width"), [(0.8, 80), nightly(0.8, 16), nightly(50.0, 16), nightly(0.8, 96)]
)
def test_attention_with_a_soft_cap(cap: float, width: int, dtype: torch.dtype) -> None:
    compare(LAYOUTS["zigzag"], 1, (4, 2), width, dtype, triton_block(), DEVICE, cap=cap)


@on_device
@pytest.mark.parametrize(("name", "width"), [
    ("WideKeys", 128), *map(nightly, ("SmallPrograms",) * 2, (64, 128)),
])  # fmt: skip
def test_attention_with_another_backward(name: str, width: int) -> None:
    from megarl.kernels import block_triton

    block, q = getattr(block_triton, name)(), torch.zeros(1, 1, width, dtype=torch.float16)
    assert block._tile("grad_keys", q) != triton_block(None)._tile("grad_keys", q)
    assert block._tile("grad_keys", q.float()) == triton_block(None)._tile("grad_keys", q.float())
    compare(LAYOUTS["zigzag"], 1, (2, 1), width, torch.float16, block, DEVICE)


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_another_width_is_two_tiles(dtype: torch.dtype) -> None:
    known = {64: (64, 0), 72: (64, 16), 80: (64, 16), 96: (64, 32), 100: (128, 0), 160: (256, 0)}
    known[192] = (256, 0) if dtype == torch.float32 else (128, 64)
    assert {width: tiles.head_tiles(width, dtype) for width in known} == known
    for width in range(1, 257):
        first, rest = tiles.head_tiles(width, dtype)
        assert width <= first + rest <= tiles.padded_width(width)
        # Tiles are powers of 2 that a matrix product takes; all columns of the first exist.
        assert all(size & (size - 1) == 0 and size >= 16 for size in (first, rest) if size)
        assert rest < first and (not rest or first < width)


@pytest.mark.skipif(not INTERPRETED, reason="test_these_tests_in_the_interpreter runs it")
@pytest.mark.parametrize("width", [80, nightly(96)])
@pytest.mark.parametrize(("parents", "window", "cap", "has_sinks"), [
    nightly((), 20, None, False), nightly((-1, 0, 0), None, None, False),
    nightly((), None, 0.8, True), ((-1, 0, 0), 20, 0.8, True),
], ids=["window", "tree", "cap-and-sinks", "all"])  # fmt: skip
def test_every_kind_of_mask_over_two_tiles(
    parents: tuple[int, ...], window: int | None, cap: float | None, has_sinks: bool, width: int
) -> None:
    """Two ranks in a ring."""
    case = Case(
        (45, 30, 21), 2, 1, "zigzag", (2, 1), width, 0.2, 5, parents, window, cap, has_sinks
    )
    tensors = case.tensors(torch.float32)
    wanted = dense(case, [x.double() for x in tensors])
    assert_close(split_attention(case, "triton", "ring", tensors)[0], wanted, 1e-5)


@on_device
@pytest.mark.parametrize("dtype", [torch.float16, *DTYPES[2:]])
@pytest.mark.parametrize("width", [16, nightly(32)] if INTERPRETED else [16, 32, 64, 128, 256])
def test_attention_through_the_copy_engine(width: int, dtype: torch.dtype) -> None:
    if not INTERPRETED and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs Hopper or later")
    block = triton_block(SMALL if INTERPRETED else None, descriptors=True)
    row, starts = (
        (LAYOUTS["zigzag"], STARTS) if INTERPRETED else (LONG, torch.tensor([0, 290, 600]))
    )
    compare(row, 1, (4, 2), width, dtype, block, DEVICE, starts)


@on_device
@pytest.mark.parametrize("kib", [nightly(99), 227] if INTERPRETED else [0])
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(80, torch.float32), *(nightly(w, torch.float16) for w in (64, 80, 96, 128))]
    + [nightly(w, torch.float32) for w in (96, 128)]
    if INTERPRETED
    else [(w, dtype) for w in (64, 80, 96, 128, 192, 256) for dtype in DTYPES],
)
def test_attention_with_the_shapes_of_programs_it_would_choose(
    width: int, dtype: torch.dtype, kib: int
) -> None:
    """In the interpreter those for GPUs with so many KiB of shared memory, on a GPU its own."""
    block = triton_block(tiles.tiles_for(kib * 1024, dtype, width) if kib else None)
    compare(LONG, 1, (2, 1), width, dtype, block, DEVICE, torch.tensor([0, 290, 600]))


@on_device
def test_rows_that_see_nothing_stay_as_they_were() -> None:
    """The second rank's queries and the first rank's keys: most queries are of documents that begin
    later.
    """
    queries, keys = Positions.of(ROW[30:90], STARTS), Positions.of(ROW[:30], STARTS)
    block = triton_block()
    work = block.prepare(queries, keys, DEVICE)
    assert work is not None and block.prepare(keys, Positions.of(ROW[30:], STARTS), DEVICE) is None
    q, k, v = (torch.randn(length, 2, 16, device=DEVICE) for length in (60, 30, 30))
    out, lse = torch.zeros(60, 2, 16, device=DEVICE), torch.full((2, 60), -torch.inf, device=DEVICE)
    block.forward(q, k, v, work, 0.3, out, lse)
    assert out[23:].abs().max() == 0 and (lse[:, 23:] == -torch.inf).all()
    assert out[:23].abs().min() > 0 and lse[:, :23].isfinite().all()
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    block.backward(torch.randn_like(q), q, k, v, out, lse, work, 0.3, *grads)
    assert grads[0][23:].abs().max() == 0 and all(grad.isfinite().all() for grad in grads)
    # Nor does a row give anything that is said to have seen nothing.
    again = [torch.zeros_like(x) for x in (q, k, v)]
    block.backward(
        torch.randn_like(q), q, k, v, out, torch.full_like(lse, -torch.inf), work, 0.3, *again
    )
    assert all(grad.abs().max() == 0 for grad in again)
    # A row that has seen much larger scores elsewhere is not moved by this block, nor is one that
    # has seen nothing.
    kept, lse[:] = out.clone(), 500.0
    block.forward(q, k, v, work, 0.3, out, lse)
    assert (out - kept).abs().max() < 1e-6 and (lse == 500).all()


@on_device
def test_equal_inputs_give_equal_bits() -> None:
    positions = [Positions.of(index, STARTS) for index in LAYOUTS["zigzag"]]
    tensors = [
        torch.randn(len(positions[i].index), heads, 16, device=DEVICE)
        for i, heads in ((0, 2), (0, 1), (1, 1), (0, 1), (1, 1))
    ]
    once, again = (
        attention(triton_block(), tensors, positions, 0, 0.25, tensors[0]) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@on_device
def test_what_the_triton_block_cannot_do_is_refused() -> None:
    positions = Positions.of(ROW, STARTS)
    block = triton_block(None)
    work = block.prepare(positions, positions, DEVICE)
    for dtype, width, scale, message in [
        (torch.float64, 16, 1.0, "float64"),
        (torch.float32, 257, 1.0, "head widths up to 256"),
        (torch.float32, 16, -1.0, "scales over 0"),
    ]:
        x = torch.zeros(TOTAL, 1, width, dtype=dtype, device=DEVICE)
        with pytest.raises(ValueError, match=message):
            block.forward(x, x, x, work, scale, x.float(), torch.zeros(1, TOTAL, device=DEVICE))


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, nightly(torch.bfloat16)])
@pytest.mark.parametrize("first", [nightly(0), 4000, nightly(9001)])
def test_logprob_passes_equal_their_twins(first: int, dtype: torch.dtype) -> None:
    from megarl.kernels import logprobs_triton

    draw = torch.Generator().manual_seed(0)
    vocabulary, temperature = 9001, 0.7
    logits = (torch.randn(6, vocabulary + 3, generator=draw) * 3)[:, :vocabulary].to(dtype)
    logits[0, :5000] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 77] = 3e4
    targets = torch.randint(0, vocabulary, (6,), generator=draw)
    targets[3] = 4000
    wanted = logprobs_torch.statistics(logits.double(), targets, first, temperature)
    twin = logprobs_torch.statistics(logits, targets, first, temperature)
    found = logprobs_triton.statistics(logits.to(DEVICE), targets.to(DEVICE), first, temperature)
    for a, b, c in zip(found, twin, wanted, strict=True):
        torch.testing.assert_close(a.cpu().double(), c, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(b.double(), c, rtol=2e-6, atol=2e-6)

    m, s, t, _ = wanted
    # The row of -inf: another shard holds what is likely.
    m, s = m.clamp_min(-9.0), s.clamp_min(1.0)
    upstream = torch.randn(2, 6, generator=draw, dtype=torch.float64)
    rows = [m, s.log(), s.log() - t / s, *upstream]
    wanted, twin, found = logits.double(), logits.clone(), logits.to(DEVICE)
    logprobs_torch.gradient_(wanted, targets, first, temperature, *rows)
    rows = [x.float() for x in rows]
    logprobs_torch.gradient_(twin, targets, first, temperature, *rows)
    logprobs_triton.gradient_(
        found, targets.to(DEVICE), first, temperature, *(x.to(DEVICE) for x in rows)
    )
    assert wanted.isfinite().all() and found.dtype == dtype
    tolerance = 3e-6 if dtype == torch.float32 else 8e-3
    for a in (found.cpu(), twin):
        torch.testing.assert_close(a.double(), wanted, rtol=tolerance, atol=3e-6)


@here
@pytest.mark.parametrize("descriptors", [False, True])
def test_kernels_compile_for_hopper(descriptors: bool) -> None:
    """No GPU is needed for it: they use Hopper's own matrix instructions and fit into its shared
    memory.
    """
    from compile_table import compiling, launch_attention, launch_logprobs

    with compiling(90) as found:
        launch_attention(90, torch.bfloat16, 128, descriptors)
        launch_logprobs(torch.bfloat16)
    attention = {"forward_kernel", "row_sums_kernel", "grad_keys_kernel", "grad_queries_kernel"}
    assert set(found) == attention | {"_statistics", "_gradient"}
    for name in ("forward_kernel", "grad_keys_kernel", "grad_queries_kernel"):
        made, _ = found[name]
        code = made.asm["ptx"]
        assert "wgmma.mma_async" in code and ("cp.async.bulk.tensor" in code) == descriptors
        assert made.metadata.shared <= 227 * 1024
