"""Whether two expressions are equal: by exact arithmetic, or by their values at random points.

Trees of `expression.read` --equal--> bool. A value at a point takes time linear in the size of the
expression; a value that would take long, such as a tower of powers, is never computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from random import Random
from typing import Any

from mpmath import MPContext

from megarl.apps.verifiers.expression import Node, key, replaced

MAX_BITS = 20_000
"""A number is not computed if it, its numerator or denominator would have more bits."""
MAX_ARGUMENT = 10_000
"""Largest argument of a factorial, binomial coefficient or function that is computed."""
MAX_ITEMS = 50
"""Longer lists are not compared."""
PRECISIONS = (200, 400)
"""Bits with which a value is computed twice. The difference of two equal expressions is an error of
rounding, which becomes smaller with more bits."""
LARGEST_ERROR = Fraction(5, 10**6)
"""Largest relative difference between a decimal number and the exact one that it stands for."""
POINTS = ((0.3, 0.9), (1.2, 3.1), (-2.7, -0.4))
"""(lowest, highest) value of the variables at each point."""


def exact_value(node: Node) -> Fraction | None:
    """The value of an expression of rational numbers; None for others, and for a division by zero
    or a number that is too large.
    """
    try:
        return _exact(node)
    except ArithmeticError:
        return None


def _exact(node: Node) -> Fraction:
    value = _combined(node, [_exact(item) for item in node.items])
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise OverflowError
    return value


def _arithmetic(node: Node, values: Sequence[Any]) -> Any:
    """The value of an operation that is the same for exact and for complex numbers; None for
    others.
    """
    match node.type:
        case "unit":
            return Fraction(1)
        case "negative":
            return -values[0]
        case "sum":
            return sum(values)
        case "product":
            return math.prod(values)
        case "bar":
            return abs(values[0])
        case "quotient" | "ratio" if len(values) == 2:
            return values[0] / values[1]
    return None


def _combined(node: Node, values: Sequence[Fraction]) -> Fraction:
    first, last = (values[0], values[-1]) if values else (Fraction(), Fraction())
    match node.type:
        case "number":
            return node.value
        case "power" if last.denominator == 1:
            bits = max(first.numerator.bit_length(), first.denominator.bit_length())
            if bits * abs(last) > MAX_BITS:
                raise OverflowError
            return first**last.numerator
        case "factorial" if first.denominator == 1 and 0 <= first <= MAX_ARGUMENT:
            if first * first.numerator.bit_length() > MAX_BITS:
                raise OverflowError
            return Fraction(math.factorial(first.numerator))
        case "binom" if first.denominator == last.denominator == 1 and 0 <= last <= first:
            if first > MAX_ARGUMENT:
                raise OverflowError
            return Fraction(math.comb(first.numerator, last.numerator))
        case "floor" | "ceil":
            return Fraction(getattr(math, node.type)(first))
    value = _arithmetic(node, values)
    if value is None:
        raise OverflowError
    return value


@lru_cache(maxsize=1024)
def at_points(node: Node) -> tuple[tuple[Any, Any], ...] | None:
    """The complex values of an expression at each of the `POINTS`, with each of the `PRECISIONS`;
    one point only if it has no variables. None if one value cannot be computed.
    """
    try:
        return tuple(
            (_value(node, point, PRECISIONS[0]), _value(node, point, PRECISIONS[1]))
            for point in range(len(POINTS) if variables(node) else 1)
        )
    except (ArithmeticError, ValueError, NotImplementedError):  # the last two are of mpmath
        return None


def variables(node: Node) -> frozenset[str]:
    """The variables of an expression."""
    return frozenset(
        key(item) for item in node.nodes()
        if item.type == "name" and item.text not in ("\\pi", "e", "i", "\\infty")
    )  # fmt: skip


def _value(node: Node, point: int, bits: int) -> Any:
    context = MPContext()
    context.prec = bits

    def value(node: Node) -> Any:
        number = _value_at(context, node, [], point) if node.type in ("name", "number") else None
        if number is None:
            number = _value_at(context, node, [value(item) for item in node.items], point)
        size = context.mag(number)
        if not context.isfinite(number) or size > MAX_BITS:
            raise OverflowError
        return number

    return value(node)


def _value_at(mp: Any, node: Node, values: Sequence[Any], point: int) -> Any:
    """`node`'s value by mpmath context `mp`, from its items' `values`. Variables are random, seeded
    by name and `point` (index in `POINTS`). Raises `OverflowError`.
    """
    first, last = (values[0], values[-1]) if values else (mp.zero, mp.zero)
    match node.type:
        case "number":
            return mp.mpf(node.value.numerator) / node.value.denominator
        case "name" if node.text in ("\\pi", "e", "i"):
            return {"\\pi": +mp.pi, "e": +mp.e, "i": mp.j}[node.text]
        case "name" if node.text != "\\infty":
            low, high = POINTS[point]
            return mp.mpf(Random(key(node) + str(point)).uniform(low, high))
        case "unit":
            return mp.one
        case "power":
            if first == 0:
                if mp.re(last) < 0:
                    raise OverflowError
                return mp.one if last == 0 else first
            if abs(last * mp.log(first)) > MAX_BITS:
                raise OverflowError
            return first**last
        case "root":
            return last ** (1 / first)
        case "factorial" if abs(first) <= MAX_ARGUMENT:
            return mp.factorial(first)
        case "binom" if max(abs(first), abs(last)) <= MAX_ARGUMENT:
            return mp.binomial(first, last)
        case "floor" | "ceil":
            return getattr(mp, node.type)(first)
        case "call" if all(abs(value) <= MAX_ARGUMENT for value in values):
            return _called(mp, node.text, values)
    value = _arithmetic(node, values)
    if value is None:  # or not defined, as \infty
        raise OverflowError
    return value


def _called(mp: Any, name: str, values: Sequence[Any]) -> Any:
    if name in ("log", "ln", "lg"):
        base = values[1] if len(values) > 1 else {"lg": mp.mpf(10)}.get(name, mp.e)
        return mp.log(values[0]) / mp.log(base)
    name = name.replace("arc", "a")
    if len(values) != 1 or name in ("max", "min", "gcd", "lcm"):
        raise OverflowError
    return getattr(mp, name)(values[0])


def same_term(first: Node, second: Node, *, rounded: bool) -> bool:
    """Whether two expressions have one value. `rounded`: whether a relative difference of 5e-6 is
    allowed.
    """
    if key(first) == key(second):
        return True
    if all(_is_plain(term) for term in (first, second)):
        rounded = False
    values = exact_value(first), exact_value(second)
    if values[0] is not None and values[1] is not None:
        size = max(abs(values[0]), abs(values[1]))
        return abs(values[0] - values[1]) <= (LARGEST_ERROR * size if rounded else 0)
    ones, others = at_points(first), at_points(second)
    if ones is None or others is None:
        return False
    if len(ones) != len(others):  # one has no variables, or they cancel
        ones, others = ((list(row) * len(POINTS))[: len(POINTS)] for row in (ones, others))
    return all(_near(*pair, rounded=rounded) for pair in zip(ones, others, strict=True))


def _is_plain(node: Node) -> bool:
    """Whether a number is written in digits that do not repeat, so that it is not rounded."""
    number = next((item for item in node.nodes() if item.type not in ("negative", "product")), node)
    return number.type == "number" and not re.search(r"overline|[ /]", number.text)


def _near(first: tuple[Any, Any], second: tuple[Any, Any], *, rounded: bool) -> bool:
    rough, fine = (abs(value - other) for value, other in zip(first, second, strict=True))
    size = max(abs(first[1]), abs(second[1]))
    if rounded and fine <= float(LARGEST_ERROR) * size:
        return True
    return bool(fine <= size * 2.0 ** -(PRECISIONS[1] // 2)) or (
        0 < rough < 1 and bool(fine <= rough * 2.0 ** -(PRECISIONS[0] // 2))
    )


def proportional(first: Node, second: Node) -> bool:
    """Whether two equations or inequalities `lhs - rhs` are the same up to a factor; a positive one
    between inequalities.
    """
    ends = [
        Node("sum", (node.items[0], Node("negative", node.items[1:2]))) for node in (first, second)
    ]
    ones, others = at_points(ends[0]), at_points(ends[1])
    if first.text != second.text or ones is None or others is None or len(ones) != len(others):
        return False
    if any(abs(value) < 1e-30 for pair in others for value in pair):
        return False
    ratios = [
        (item[0] / other[0], item[1] / other[1]) for item, other in zip(ones, others, strict=True)
    ]
    return all(_near(ratios[0], ratio, rounded=False) for ratio in ratios) and (
        first.text in "=\u2260" or ratios[0][0].real > 0
    )


def alternatives(node: Node) -> list[Node]:
    """The expressions that one with plus or minus signs stands for; `node` itself without any."""
    if not any(item.type == "pm" for item in node.nodes()):
        return [node]
    return [replaced(node, partial(_signed, sign=sign)) for sign in "+-"]


def _signed(node: Node, sign: str) -> Node:
    if node.type != "pm":
        return node
    return node.items[0] if node.text == sign else Node("negative", node.items)


def equal(first: Node, second: Node, *, rounded: bool) -> bool:
    """Whether two answers are equal: expressions, or lists, sets, tuples, intervals, unions,
    ratios, matrices and equations of them. `rounded`: as in `same_term`.
    """
    first, second = _interval(first), _interval(second)
    unordered = [_items(node) for node in (first, second)]
    if any(len(items) != 1 for items in unordered):
        return _matched(*unordered, rounded=rounded)
    first, second = unordered[0][0], unordered[1][0]
    if "relation" in (first.type, second.type):
        return first.type == second.type and (
            key(first) == key(second)
            or (len(first.items) == len(second.items) == 2 and proportional(first, second))
        )
    ordered = ("tuple", "matrix", "union", "ratio")
    if first.type in ordered or second.type in ordered:
        if first.type != second.type:
            return {first.type, second.type}.isdisjoint(("tuple", "matrix", "union")) and (
                same_term(first, second, rounded=rounded)
            )
        if first.type == "ratio":
            return _in_proportion(first, second)
        if first.text != second.text or len(first.items) != len(second.items):
            return False
        if first.type == "union" and first.text == "\\cup":
            return _matched(first.items, second.items, rounded=rounded)
        return all(
            equal(*pair, rounded=rounded) for pair in zip(first.items, second.items, strict=True)
        )
    return same_term(first, second, rounded=rounded)


def _items(node: Node) -> Sequence[Node]:
    """What a list or set holds, with each sign of plus or minus as two items."""
    items = node.items if node.type in ("list", "set") and not node.text[:1].isupper() else (node,)
    return [choice for item in items for choice in alternatives(item)]


def _matched(first: Sequence[Node], second: Sequence[Node], *, rounded: bool) -> bool:
    """Whether the items of both are equal, in any order."""
    if len(first) != len(second) or len(first) > MAX_ITEMS:
        return False
    left = list(second)
    for item in first:
        same = next(
            (n for n, other in enumerate(left) if equal(item, other, rounded=rounded)), None
        )
        if same is None:
            return False
        left.pop(same)
    return True


def _in_proportion(first: Node, second: Node) -> bool:
    if len(first.items) != len(second.items):
        return False
    ratios = set[Fraction]()
    for item, other in zip(first.items, second.items, strict=True):
        numerator, denominator = exact_value(item), exact_value(other)
        if not (numerator and denominator):
            return False
        ratios.add(numerator / denominator)
    return len(ratios) == 1


INFINITE = Node("name", text="\\infty")
RISING, FALLING = "<\u2264", ">\u2265"


def _interval(node: Node) -> Node:
    """Inequalities of one variable as an interval, `0 <= x < 1` as `[0, 1)`; with `or` between
    them, as a union; the real numbers as an interval. Other answers as they are.
    """
    if node.type == "list" and node.items and "or" in node.text:
        parts = [_interval(item) for item in node.items]
        are_intervals = all(item.type == "tuple" for item in parts)
        return Node("union", tuple(parts), "\\cup") if are_intervals else node
    if node.type == "set" and node.text == "R":
        return Node("tuple", (Node("negative", (INFINITE,)), INFINITE), "()")
    if node.type != "relation":
        return node
    signs, items = node.text.split(" "), node.items
    if all(sign in FALLING for sign in signs):
        signs, items = [RISING[FALLING.index(sign)] for sign in signs[::-1]], items[::-1]
    if not all(sign in RISING for sign in signs):
        return node
    is_name = [bool(variables(item)) for item in items]
    if is_name == [True, False]:
        items, signs = (Node("negative", (INFINITE,)), *items), ["<", *signs]
    elif is_name == [False, True]:
        items, signs = (*items, INFINITE), [*signs, "<"]
    if len(items) != 3 or items[1].type != "name" or variables(items[0]) or variables(items[2]):
        return node
    brackets = ("[" if signs[0] == "\u2264" else "(") + ("]" if signs[1] == "\u2264" else ")")
    return Node("tuple", (items[0], items[2]), brackets)


def pairs_of(items: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """Neighbours in a sequence."""
    return zip(items, items[1:], strict=False)
