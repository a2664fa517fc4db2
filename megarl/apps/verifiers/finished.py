r"""Whether a final answer is a finished value, such as `\frac{1}{2}` or `3 + 2\sqrt{5}`, or has
still to be evaluated, such as `67 + 63` or `2x + 3x`.

An expression is unfinished if it holds an operation on explicit rational numbers: a sum, product or
power, a quotient that is a whole number (`26/2`) or written with a sign of division, a factorial, a
binomial coefficient, a root that is a whole number; or if two of its terms differ in their
coefficients only. Notations of one number are finished: fractions of whole numbers, mixed numbers,
powers of ten and scientific notation, and powers with negative exponents.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import gcd

from megarl.apps.verifiers.expression import Node, key

MAX_RADICAND = 10**15
"""Roots of larger numbers are not computed; up to here floating point finds exact ones."""


def is_unfinished(node: Node, *, rational: bool = False) -> bool:
    """Whether an expression has still to be evaluated, such as `67 + 63`. With `rational`, its
    value is known to be a rational number; an expression with roots, functions, constants or
    variables then counts as unfinished too.
    """
    return to_simplify(node) is None or (rational and any(map(_is_computed, node.nodes())))


def _is_computed(node: Node) -> bool:
    return node.type in ("root", "call", "bar", "floor", "ceil", "name", "binom", "factorial") or (
        node.type == "power" and _plain(node.items[1]) is None
    )


def to_simplify(node: Node) -> list[Node] | None:
    """The parts of a finished expression that could be simplified: fractions not in lowest terms
    (`26/2`), powers of ten (`10^3`), numbers in scientific notation (`1.5*10^3`), powers with
    negative exponents and repeating decimals. None for an expression that is unfinished.
    """
    nodes: list[Node] = []
    try:
        _literal(node, nodes)
    except ValueError:
        return None
    return nodes


def _plain(node: Node) -> Fraction | None:
    """The value of a number without an operation but a sign; None for another expression."""
    if node.type == "negative":
        value = _plain(node.items[0])
        return None if value is None else -value
    return node.value if node.type == "number" else None


def _literal(node: Node, nodes: list[Node]) -> Fraction | None:
    """The value of a notation of one number; None for another finished expression. Adds the parts
    that could be simplified to `nodes`. Raises `ValueError` for an unfinished expression.
    """
    if node.type == "number":
        if "overline" in node.text:
            nodes.append(node)
        return node.value
    if node.type == "product":
        return _product(node, nodes)
    if node.type == "call" and node.text not in ("max", "min", "gcd", "lcm"):
        for item in node.items:
            _literal(item, nodes)
        return None
    values = [_literal(item, nodes) for item in node.items]
    if node.type == "negative":
        return values[0]
    if node.type == "sum":
        terms = [term for item in node.items if (term := _without_coefficient(item)) is not None]
        if len(terms) > len(set(terms)):
            raise ValueError
        return None
    if not values or any(value is None for value in values):
        return None
    if node.type == "quotient" or (node.type == "ratio" and len(values) == 2):
        return _quotient(node, nodes)
    if node.type == "power":
        return _power(node, nodes)
    if node.type in ("factorial", "binom", "bar", "floor", "ceil") or (
        node.type == "root" and _is_power(values[1], values[0])
    ):
        raise ValueError
    return None


def _factors(node: Node) -> Iterator[Node]:
    """The factors of a product, also of products and negative numbers in it, without units."""
    if node.type in ("product", "negative"):
        for item in node.items:
            yield from _factors(item)
    elif node.type != "unit" and not (node.type == "power" and node.items[0].type == "unit"):
        yield node


def _product(node: Node, nodes: list[Node]) -> Fraction | None:
    factors = list(_factors(node))
    values = [_literal(factor, nodes) for factor in factors]
    numbers = [factor for factor, value in zip(factors, values, strict=True) if value is not None]
    is_scientific = [item.type for item in numbers] == ["number", "power"]
    if is_scientific and numbers[1].items[0].text == "10":
        nodes.append(node)
        numbers.pop()
    if len(numbers) > 1:
        raise ValueError
    return values[0] if len(factors) == len(numbers) == 1 else None


def _quotient(node: Node, nodes: list[Node]) -> Fraction:
    over, under = (_plain(item) for item in node.items)
    if over and node.text == "frac" and under is None and node.items[1].type == "power":
        return over / _number(node.items[1], nodes)
    if over is None or not under or node.text == ":" or over.denominator * under.denominator != 1:
        raise ValueError
    whole = over % under == 0
    if whole and node.text != "frac" and node.type != "ratio":
        raise ValueError
    if whole or gcd(over.numerator, under.numerator) != 1:
        nodes.append(node)
    return over / under


def _number(node: Node, nodes: list[Node]) -> Fraction:
    value = _literal(node, nodes)
    if value is None:
        raise ValueError
    return value


def _power(node: Node, nodes: list[Node]) -> Fraction | None:
    base, exponent = node.items
    size = _plain(exponent)
    if size is not None and size.denominator != 1:
        return None
    is_ten = base.text == "10" and size is not None and size > 1
    if size is None or base.type != "number" or not (is_ten or size < 0):
        if _literal(exponent, []) is not None and size is None and exponent.type != "power":
            return None  # as in 2^{3/2}
        raise ValueError
    nodes.append(node)
    return base.value


def _without_coefficient(node: Node) -> str | None:
    """The key of a term without its number as factor or divisor, "" for a number alone."""
    parts = []
    for factor in _factors(node):
        if factor.type == "quotient":
            over = _without_coefficient(factor.items[0])
            under = _without_coefficient(factor.items[1])
            parts += [term for term in (over, under and f"1/{under}") if term]
        elif factor.type != "number":
            parts.append("" if _is_number(factor) else key(factor))
    return "*".join(sorted(term for term in parts if term))


def _is_number(node: Node) -> bool:
    try:
        return _literal(node, []) is not None
    except ValueError:
        return False


def _is_power(number: Fraction | None, degree: Fraction | None) -> bool:
    """Whether the root of a rational number is rational."""
    if number is None or degree is None or not 2 <= degree <= 10:
        return False
    return all(
        integer < MAX_RADICAND and round(integer ** (1 / degree)) ** degree == integer
        for integer in (abs(number.numerator), number.denominator)
    )
