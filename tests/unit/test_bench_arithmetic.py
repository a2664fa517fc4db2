"""The arithmetic of benchmarks: a line through the values of a metric."""

from __future__ import annotations

import importlib
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


def test_a_trend_is_the_least_squares_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    trend = importlib.import_module("mismatch_drift").trend
    values = 3.0 + 0.2 * np.arange(50) + np.random.default_rng(0).normal(size=50)
    slope, begin = statistics.linear_regression(range(50), values)
    places, found = np.arange(50), trend(values.tolist())
    error = math.sqrt(((values - begin - slope * places) ** 2).sum() / 48 / places.var() / 50)
    assert math.isclose(found["slope"], slope) and math.isclose(found["slope_error"], error)
    assert math.isclose(found["first_quarter"], values[:12].mean())
    assert math.isclose(found["last_quarter"], values[-12:].mean())
