"""Numbers as short text for charts and tiles, and round numbers for axes."""

from __future__ import annotations

import math


def percent(value: float) -> str:
    """A share as percentage: 0.174 -> 17.4%."""
    return compact(100 * value) + "%"


def compact(value: float) -> str:
    """Three significant digits with a unit prefix: 20345 -> 20.3k.

    Tiny numbers become a power of ten.
    """
    if value == 0:
        return "0"
    size = abs(value)
    for bound, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= bound * 0.9995:
            return f"{value / bound:.3g}{letter}"
    if size < 1e-3:
        return power(value)
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")


def power(value: float) -> str:
    """A number as a power of ten: 3.1e-05 -> 3.1×10⁻⁵."""
    if value == 0:
        return "0"
    digits, exponent = f"{value:.1e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    digits = digits.removesuffix(".0")
    return (
        ("" if digits == "1" else digits.replace("-", "\N{MINUS SIGN}") + "\N{MULTIPLICATION SIGN}")
        + "10"
        + raised
    )


def duration(seconds: float) -> str:
    """Seconds as text: 3 -> 3 s, 84 -> 1 min 24 s, 7500 -> 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Axis marks from `low` to `high`: about `count` intervals of 1, 2 or 5 times 10^n.

    With `whole` only whole numbers.
    """
    if not high > low:
        low, high = (
            (low - 0.5, high + 0.5) if low == 0 else (low - abs(low) / 2, high + abs(low) / 2)
        )
    rough = max((high - low) / count, 1.0 if whole else 0.0)
    size = 10.0 ** math.floor(math.log10(rough))
    stride = next(m * size for m in (1, 2, 5, 10) if m * size >= rough * 0.999)
    first, last = math.floor(low / stride + 1e-9), math.ceil(high / stride - 1e-9)
    last = max(last, first + 1)
    return [i * stride for i in range(first, last + 1)]
