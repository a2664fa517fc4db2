"""tools/bench/attention.py --device cuda, walked on the CPU: the kernels are replaced by the
reference, and what takes which time is made up.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.kernels.packed_attention import packed_reference

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"
SIZES: dict[str, Any] = {"tokens": 96, "packed": 4, "heads": 4, "kv_heads": 2, "width": 16}
SIZES |= {"rounds": 2, "block": "reference"}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with one second for each call and the reference for each kernel."""
    monkeypatch.syspath_prepend(BENCH)
    module = importlib.import_module("attention_cuda")

    def timed(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
        for run in runs.values():
            run()
        return {name: [1.0] * rounds for name in runs}

    monkeypatch.setattr(module, "timed", timed)
    monkeypatch.setattr(module, "OTHERS", {})  # they need a GPU, or the interpreter
    monkeypatch.setattr(module, "BLOCKS", module.BLOCKS | {"triton": module.BLOCKS["reference"]})
    return module


def reference(q: Any, k: Any, v: Any, starts: Any, longest: int, scale: float) -> torch.Tensor:
    """In the place of a kernel of variable length."""
    assert longest == int((starts[1:] - starts[:-1]).max()) and starts.dtype == torch.int32
    return packed_reference(q, k, v, starts, scale)


def test_the_kernels_that_training_takes_are_among_the_contenders(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, cpu = argparse.Namespace(**SIZES), torch.device("cpu")
    monkeypatch.setattr(bench, "torch_varlen", reference)
    found = bench.bench_kernels(args, cpu)
    rows = found["kernels"]
    wanted = {"reference, causal", "triton, causal", "torch varlen, causal"}
    assert wanted | {"torch varlen, 4 documents"} <= set(rows)
    assert "torch cuDNN" in found["missing"]  # it needs a GPU
    # One causal document: 96 * 97 / 2 pairs, of 4 * 16 products forward, 4 heads, one second.
    flop = 96 * 97 // 2 * 4 * 16 * 4
    for name in ("triton, causal", "torch varlen, causal"):
        assert rows[name]["forward"]["tflops"]["median"] == pytest.approx(flop / 1e12)
        assert rows[name]["backward"]["tflops"]["median"] == pytest.approx(2.5 * flop / 1e12)
    packed = rows["torch varlen, 4 documents"]["forward"]["tflops"]["median"]
    assert packed < 0.8 * flop / 1e12  # documents do not see each other
    rows["torch varlen, causal"]["backward"]["tflops"]["median"] = 1.0
    rows["torch varlen, 4 documents"]["backward"]["tflops"]["median"] = 2.0
    assert bench.best_of(rows)["backward"] == {"kernel": "torch varlen, causal", "tflops": 1.0}


@pytest.mark.parametrize("is_installed", [False, True])
def test_flash_attn_is_measured_where_it_is_installed(
    bench: Any, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    args, cpu = argparse.Namespace(**SIZES), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    packages = bench.packed_varlen
    monkeypatch.setattr(packages, "provider", lambda _: "FA2" if is_installed else "")
    monkeypatch.setattr(packages, "varlen_function", lambda _: reference)
    found = bench.bench_flash_attn(args, cpu)
    if is_installed:
        assert set(found["kernels"]) == {"flash-attn 2, causal", "flash-attn 2, 4 documents"}
    assert bool(found["missing"]) != is_installed


@pytest.mark.parametrize("knows_shared_heads", [False, True])
def test_torch_is_asked_only_what_it_knows(
    bench: Any, monkeypatch: pytest.MonkeyPatch, knows_shared_heads: bool
) -> None:
    """Torch 2.11 refuses `enable_gqa`; without it a later torch refuses shared key heads."""
    asked: dict[str, Any] = {}

    def old(*places: Any, scale: float, window_size: tuple[int, int]) -> None:
        asked.update(scale=scale, window_size=window_size)

    def new(*places: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool) -> None:
        asked.update(scale=scale, window_size=window_size, enable_gqa=enable_gqa)

    varlen = importlib.import_module("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", new if knows_shared_heads else old)
    bench.torch_varlen(None, None, None, None, 7, 0.5)
    wanted: dict[str, Any] = {"scale": 0.5, "window_size": (-1, 0)}
    assert asked == (wanted | {"enable_gqa": True} if knows_shared_heads else wanted)
