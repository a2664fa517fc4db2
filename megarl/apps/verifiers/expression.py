r"""The grammar of final answers: numbers, expressions, equations, intervals, sets, tuples, lists.

LaTeX --read--> tree of `Node`        `2\frac{2}{3}\text{ cm}` -> the number 8/3 with a unit

Reading takes time linear in the length of the text, at any nesting up to `MAX_DEPTH`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MAX_CHARACTERS = 1000
"""Longer texts are not read."""
MAX_DEPTH = 50
"""Texts with deeper nested brackets are not read."""

VULGAR = (
    "\u00bc\u00bd\u00be\u2150\u2151\u2152\u2153\u2154\u2155\u2156\u2157\u2158\u2159"
    "\u215a\u215b\u215c\u215d\u215e"
)  # one quarter, a half, ..., seven eighths
FUNCTIONS = frozenset(
    [arc + name + h for arc in ("", "arc") for name in ("sin", "cos", "tan", "cot", "sec", "csc")
     for h in ("", "h")]
    + ["log", "ln", "lg", "exp", "gcd", "lcm", "max", "min"]
)  # fmt: skip
CONSTANTS = {"pi": "\\pi", "inf": "\\infty", "infinity": "\\infty", "infty": "\\infty"}
KNOWN = FUNCTIONS | CONSTANTS.keys() | {"sqrt"}
"""Words that are names of functions or constants."""
MULTIPLES = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12,
}  # fmt: skip
NOT_UNITS = frozenset([
    "half", "halves", "quarter", "quarters", "third", "thirds", "pi", "times", "plus", "minus",
    "over", "or", "by", "mod", "factorial", "not", "than", "more", "less", "at", "about", "maybe",
    "perhaps", "possibly", "either", "between", "but", "though", "alternatively", "otherwise",
    "unless", "from", "each",
])  # fmt: skip
"""Words that change the value beside which they stand, so that they are no units."""
NO_UNIT = re.compile(r"\d{2}|\d\s|[.?!]")
TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mbox|operatorname|rm)\*?"
THOUSANDS = r"(?:,\\!|\{,\}|\\text\{,\}|\\[,!;: ]|[,~ \u00a0\u2009\u202f])"
DECIMAL = rf"(?:\d{{1,3}}(?:{THOUSANDS}\d{{3}})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
LENGTHS = r"(?:[kcdm]?m|in|ft|yd|mi|[km]?g|lbs?|oz|[mc]?[lL]|m?s|sec|min|h|hr|hours?|mph|miles?)"
POWER = r"(?:\s?\^\s?(?:\d|\{\s?-?\d\s?\}))?"
_TH = r"(?:st|nd|rd|th)"
REPEATED = r"\\(?:overline|bar|dot)\s?"
WORDS_OF_SIGNS = (
    ("+", r"plus|added\sto"), ("-", r"minus|negative"), ("*", r"times|multiplied\sby"),
    ("\u00f7", r"divided\sby|over"), ("^", r"(?:raised\s)?to\sthe\spower(?:\sof)?|raised\sto"),
)  # fmt: skip
TOKEN = re.compile(
    # What means nothing: spaces, sizes and colours, degrees, percent, currencies, ordinals
    r"\s+|\\(?:left|right|[bB]igg?[lmr]?)(?![A-Za-z])\.?|\\[,;:! ]|~|\\q?quad(?![A-Za-z])"
    r"|\\(?:displaystyle|textstyle|underline|boldsymbol|bm|mathit|limits)(?![A-Za-z])"
    r"|\\(?:text)?color\s?\{[^{}]*\}"
    r"|\^\s?(?:\\circ|\{\s?\\circ\s?\})|\\circ(?![A-Za-z])|\\degree(?![A-Za-z])|\u00b0"
    rf"|\\?[%$]|{TEXT}\s?\{{\s?\\?[%$]\s?\}}|[\u20ac\u00a3]"
    rf"|(?<=\d)\s?(?:\^\s?)?(?:\{{\s?{TEXT}\s?\{{\s?{_TH}\s?\}}\s?\}}|\{{\s?{_TH}\s?\}}"
    rf"|{TEXT}\s?\{{\s?{_TH}\s?\}}|(?<=\d){_TH}(?![A-Za-z]))"
    rf"|(?P<repeating>\d*\.\d*(?:\\dot\s?\{{?\d\}}?\d*\\dot\s?\{{?\d\}}?"
    rf"|{REPEATED}(?:\{{\d+\}}|\d)|\(\d+\)))"
    rf"|(?P<mixed>\d+\s(?:\d+\s?/\s?\d+(?![\d./])|[{VULGAR}])|\d*[{VULGAR}])"
    rf"|(?P<number>{DECIMAL}(?:[eE][-+]?\d{{1,3}}(?![\w.]\w))?)"
    r"|(?P<frac>\\[cdt]?frac(?![A-Za-z]))|(?P<binom>\\[dt]?binom(?![A-Za-z]))"
    r"|(?P<root>\\sqrt(?![A-Za-z])|\u221a|sqrt(?![A-Za-z]))"
    r"|(?P<matrix>\\begin\s?\{(?P<type>[A-Za-z]*matrix|array|cases)\}(?:\{[lcr|]*\})?"
    r".*?\\end\s?\{(?P=type)\})"
    rf"|(?P<unit>(?<=[\d}}\])]\s){LENGTHS}(?![A-Za-z]){POWER}(?:\s?/\s?{LENGTHS}{POWER})?"
    r"(?![A-Za-z]))"
    rf"|(?P<text>{TEXT}\s?\{{[^{{}}]*\}})"
    r"|(?P<separator>[,;\uff0c\u3001]|\\(?:lor|vee|land|wedge)(?![A-Za-z])"
    r"|(?:and|or)(?![A-Za-z]))"
    r"|(?P<relation>[<>=\u2264\u2265\u2260\u2248\u2208]|\\(?:[lg]e|[lg]eq|[lg]eqslant|[lg]t|neq?|in"
    r"|approx|simeq|doteq)(?![A-Za-z]))"
    r"|(?P<union>\\(?:cup|cap|setminus|backslash)(?![A-Za-z])|[\u222a\u2229])"
    r"|(?P<times>\\(?:cdot|times|ast)(?![A-Za-z])|\*(?!\*)|[\u00d7\u00b7\u22c5]"
    r"|(?<=[\d)}\]]\s)[xX](?=\s[-\d({\\]))"
    r"|(?P<over>\\div(?![A-Za-z])|[/\u00f7\u2215])|(?P<ratio>:|\\colon(?![A-Za-z])|to(?![A-Za-z]))"
    r"|(?P<pm>\\(?:pm|mp)(?![A-Za-z])|\u00b1)|(?P<sign>[-+\u2212\u2013])"
    r"|(?P<power>\^|\*\*)|(?P<raised>\u207b?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+)"
    r"|(?P<below>_)|(?P<factorial>!)|(?P<prime>')|(?P<fraction>\\over(?![A-Za-z]))"
    r"|(?P<bar>\||\\[lr]?vert(?![A-Za-z]))|(?P<floor>\\[lr](?:floor|ceil)(?![A-Za-z])"
    r"|[\u230a\u230b\u2308\u2309])"
    r"|(?P<open>\\\{|[({\[])|(?P<close>\\\}|[)}\]])"
    r"|(?P<set>\\mathbb\s?\{?[A-Z]\}?|\\(?:emptyset|varnothing)(?![A-Za-z])|\u2205)"
    r"|(?P<word>[A-Za-z]{2,})|(?P<name>\\[A-Za-z]+|[^\W\d_])|(?P<other>.)",
    re.DOTALL,
)
CALCULUS = re.compile(r"\\(?:o?i{0,3}nt|lim|sum|prod)(?![A-Za-z])")
"""Integrals, limits and sums, which are compared as text."""
PRODUCTS = re.compile(r"[abcxyz]{2,3}|[b-df-hj-np-tv-z]{2,3}|[A-Z]{2,4}")
"""Letters that are read as a product of variables, such as xy or mn."""
VARIABLE = re.compile(r"[abcefijknopqrtuvwxyzA-Z]")
"""A variable in text mode; other single letters in text mode are units."""
CLOSING = {"(": ")", "{": "}", "[": "]", "\\{": "\\}"}
RELATIONS = {
    "\\lt": "<", "\\gt": ">", "\\le": "\u2264", "\\leq": "\u2264", "\\leqslant": "\u2264",
    "\\ge": "\u2265", "\\geq": "\u2265", "\\geqslant": "\u2265",
    "\\ne": "\u2260", "\\neq": "\u2260",
    "\\approx": "\u2248", "\\simeq": "\u2248", "\\doteq": "\u2248", "\\in": "\u2208",
}  # fmt: skip
CHARACTERS = {
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # of full width
    **{chr(0x660 + digit): str(digit) for digit in range(10)},  # Arabic digits
    "\u221e": "\\infty ", "\u03c0": "\\pi ", "\u3002": ". ",
}  # fmt: skip
WRITTEN = str.maketrans(CHARACTERS)


@dataclass(frozen=True, slots=True)
class Node:
    """An expression. `type`: number, name, unit, negative, sum, product, quotient, power,
    factorial, binom, root (degree, radicand), call, bar, floor, ceil, pm, list, tuple, set, matrix,
    union, ratio, relation. `text`: the name, sign or brackets. `value`: that of a number.
    """

    type: str
    items: tuple[Node, ...] = ()
    text: str = ""
    value: Fraction = Fraction()

    def nodes(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for item in self.items:
            yield from item.nodes()


@lru_cache(maxsize=1024)
def parse_expression(text: str) -> Node | None:
    """The tree of `text`, an expression in LaTeX; None if the text is longer than
    `MAX_CHARACTERS`, nested deeper than `MAX_DEPTH` or no expression.
    """
    if len(text) > MAX_CHARACTERS or CALCULUS.search(text):
        return None
    try:
        reader = _Reader(list(_tokens(text)))
        answer = reader.list(0)
        return answer if reader.type == "end" else None
    except SyntaxError:
        return None


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """(type, text) of each token that has a meaning."""
    text = re.sub(r"\s+", " ", text.translate(WRITTEN)).strip()
    for sign, words in WORDS_OF_SIGNS:
        text = re.sub(rf"(?:{TEXT}\s?\{{\s?)?(?<![A-Za-z\\])(?:{words})(?![A-Za-z])(?:\s?\}})?",
                      sign, text)  # fmt: skip
    text = re.sub(r"(?<=[\d)}])\ssquared\b", "^2", re.sub(r"(?<=[\d)}])\scubed\b", "^3", text))
    for match in TOKEN.finditer(text):
        type, written = match.lastgroup or "", match[0]
        if type == "type":
            type = "matrix"
        if type in ("text", "word"):
            yield from _words(written.partition("{")[2][:-1] if type == "text" else written, type)
        elif type:
            yield type, written


def _words(text: str, type: str) -> Iterator[tuple[str, str]]:
    """The tokens of words, in text mode or, with the `type` word, outside of it."""
    text = text.strip(" ~.\\")
    lower = text.lower()
    if lower in ("and", "or", "to"):
        yield ("ratio" if lower == "to" else "separator"), lower
    elif lower in MULTIPLES or lower.removesuffix("s") in MULTIPLES:
        yield "multiple", lower.removesuffix("s")
    elif lower in KNOWN:
        yield ("root" if lower == "sqrt" else "name"), CONSTANTS.get(lower, f"\\{lower}")
    elif type == "word" and PRODUCTS.fullmatch(text):
        yield from (("name", letter) for letter in text)
    elif VARIABLE.fullmatch(text):
        yield "name", text
    elif re.search(r"\d", text) and not re.search(r"[A-Za-z]{2}", text):
        yield from _tokens(text)
    elif NOT_UNITS.isdisjoint(re.findall("[a-z]+", lower)) and not NO_UNIT.search(text):
        multiples = MULTIPLES.keys() & set(lower.split())
        if multiples:  # as in "million dollars"
            yield "multiple", min(multiples)
        if text:
            yield "unit", text
    else:
        yield "other", text


FACTORS = frozenset([
    "number", "mixed", "repeating", "frac", "binom", "root", "matrix", "unit", "multiple",
    "floor", "open", "set", "name",
])  # fmt: skip


def _joined(type: str, items: Sequence[Node], text: str = "") -> Node:
    """An expression of several items; a single one as it is. Raises `SyntaxError` for none."""
    if not items:
        raise SyntaxError
    return items[0] if len(items) == 1 else Node(type, tuple(items), text)


class _Reader:
    """A recursive-descent parser. `depth` in its methods is the number of open brackets; with
    `bars`, a bar closes what is read.
    """

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.place = [*tokens, ("end", "")], 0

    @property
    def type(self) -> str:
        """The type of the next token; "end" after the last."""
        return self.tokens[self.place][0]

    def take(self) -> str:
        """Consume the next token; returns its text."""
        self.place += 1
        return self.tokens[self.place - 1][1]

    def list(self, depth: int) -> Node:
        """One expression, or several with commas, `and` or `or` between."""
        if depth > MAX_DEPTH:
            raise SyntaxError
        items, words = [self._relation(depth)], set()
        while self.type == "separator":
            while self.type == "separator":  # as in ", and"
                words.add(self.take())
            if self.type in ("end", "close") and words <= {",", ";"}:
                break
            items.append(self._relation(depth))
        return _joined("list", items, "".join(sorted(words)))

    def _relation(self, depth: int) -> Node:
        sides, signs = [], []
        if self.type == "relation" and self.tokens[self.place][1] in ("=", "\\approx", "\u2248"):
            self.take()  # as in "= 5"
        while not sides or self.type == "relation":
            if sides:
                signs.append(RELATIONS.get(self.tokens[self.place][1], self.take()))
                if signs[-1] == "=" and self.type in ("end", "close"):  # as in "5 ="
                    signs.pop()
                    break
            sides.append(self._union(depth))
        return sides[0] if not signs else Node("relation", tuple(sides), " ".join(signs))

    def _union(self, depth: int) -> Node:
        items, sign = [self._ratio(depth)], ""
        while self.type == "union":
            sign = self.take().replace("\u222a", "\\cup").replace("\u2229", "\\cap")
            items.append(self._ratio(depth))
        return _joined("union", items, sign)

    def _ratio(self, depth: int) -> Node:
        items = [self._sum(depth)]
        while self.type == "ratio":
            self.take()
            items.append(self._sum(depth))
        return _joined("ratio", items)

    def _sum(self, depth: int, *, bars: bool = False) -> Node:
        """Parse a sum of terms signed +, - or plus-minus. `bars`: a bar ends it, as in |x|."""
        terms: list[Node] = []
        while not terms or self.type in ("sign", "pm"):
            negative, pm = False, ""
            while self.type in ("sign", "pm"):
                sign = self.take()
                negative ^= sign in "-\u2212\u2013"
                pm = sign if sign not in "+-\u2212\u2013" else pm
            term = self._product(depth, bars=bars)
            if negative:
                term = Node("negative", (term,))
            terms.append(Node("pm", (term,), "-" if "mp" in pm else "+") if pm else term)
        return _joined("sum", terms)

    def _product(self, depth: int, *, bars: bool) -> Node:
        factor = self._power(depth)
        factors, quotients = [factor], 0
        while True:
            if self.type in ("times", "over"):
                role, sign = self.type, self.take()
                negative = False
                while self.type == "sign":
                    negative ^= self.take() != "+"
                factor = self._power(depth)
                factor = Node("negative", (factor,)) if negative else factor
                if role == "over":
                    quotients += 1
                    if quotients > MAX_DEPTH:
                        raise SyntaxError
                    before = _joined("product", factors)
                    factors = [Node("quotient", (before, factor), "/" if sign == "/" else ":")]
                    continue
            elif self.type == "multiple":
                factor = factors.pop()
                size = MULTIPLES[self.take()]
                if factor.type != "number":
                    raise SyntaxError
                factor = Node("number", text=f"{factor.text}*{size}", value=factor.value * size)
            elif self.type in FACTORS or (self.type == "bar" and not bars):
                factor = self._power(depth)
                whole = factors[-1]
                if _is_mixed(whole, factor):
                    fraction = factor.items
                    share = fraction[0].value / fraction[1].value
                    text = f"{whole.text} {fraction[0].text}/{fraction[1].text}"
                    factors[-1] = Node("number", text=text, value=whole.value + share)
                    continue
            else:
                break
            factors.append(factor)
        if len(factors) > 1 and factors[0].type == "unit":
            raise SyntaxError
        return _joined("product", factors)

    def _power(self, depth: int) -> Node:
        base, start = self._atom(depth), self.place
        while self.type in ("power", "raised", "factorial", "below", "prime"):
            if self.place - start > MAX_DEPTH:  # each is one level of the tree
                raise SyntaxError
            role, sign = self.type, self.take()
            if role == "factorial":
                base = Node("factorial", (base,))
            elif role == "raised":
                digits = unicodedata.normalize("NFKC", sign).replace("\u2212", "-")
                base = Node("power", (base, _number(digits)))
            elif role == "power":
                base = Node("power", (base, self._signed(depth)))
            elif role == "prime":
                base = Node("name", (base,), "'")
            else:
                base = Node("name", (base, self._signed(depth)), "_")
        return base

    def _signed(self, depth: int) -> Node:
        """Parse an exponent or index with its signs, such as the -2 of x^-2."""
        negative = False
        while self.type == "sign":
            negative ^= self.take() != "+"
        value = self._atom(depth + (self.type != "open"))  # a bracket adds its own level
        if self.type == "power":  # 2^3^2 is 2^(3^2)
            self.take()
            value = Node("power", (value, self._signed(depth + 1)))
        return Node("negative", (value,)) if negative else value

    def _argument(self, depth: int) -> Node:
        """An argument of a LaTeX command: a group, or one digit or letter."""
        type, text = self.tokens[self.place]
        if type == "number" and len(text) > 1 and text[0].isdigit():
            self.tokens[self.place] = ("number", text[1:])
            return _number(text[0])
        return self._signed(depth)

    def _atom(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise SyntaxError
        type, text = self.type, self.take()
        if type in NUMBERS:
            return NUMBERS[type](text)
        if type in ("frac", "binom"):
            over, under = self._argument(depth), self._argument(depth)
            return Node("quotient" if type == "frac" else "binom", (over, under), "frac")
        if type == "root":
            degree = Node("number", text="2", value=Fraction(2))
            if self.tokens[self.place][1] == "[":
                degree = self._group(depth)
            radicand = self._argument(depth) if text == "\\sqrt" else self._atom(depth)
            return Node("root", (degree, radicand))
        if type == "set":
            return Node("set", text="" if "math" not in text else text[-2:].strip("{} "))
        if type == "open":
            self.place -= 1
            return self._group(depth)
        if type in ("bar", "floor") and depth < MAX_DEPTH:
            inside = self._sum(depth + 1, bars=type == "bar")
            if self.type != type:
                raise SyntaxError
            self.take()
            is_ceil = type == "floor" and "floor" not in text and text != "\u230a"
            return Node("ceil" if is_ceil else type, (inside,))
        if type == "name" and text.startswith("\\") and text[1:] in FUNCTIONS:
            return self._call(text[1:], depth)
        if type in ("name", "unit"):
            return Node(type, text=text)
        raise SyntaxError

    def _call(self, name: str, depth: int) -> Node:
        base, exponent = None, None
        while self.type in ("below", "power"):
            if self.take() == "_":
                base = self._signed(depth)
            else:
                exponent = self._signed(depth)
        if self.type == "open":
            argument = self._power(depth)
        else:
            factors = []
            while self.type in FACTORS and not (
                factors and self.tokens[self.place][1].strip("\\") in FUNCTIONS
            ):
                factors.append(self._power(depth))
            argument = _joined("product", factors)
        if base is not None and base.text == "e" and base.type == "name":
            name, base = "ln", None
        if exponent is not None and exponent.type == "negative" and exponent.items[0].text == "1":
            name, exponent = "arc" + name, None
        call = Node("call", (argument,) if base is None else (argument, base), name)
        return call if exponent is None else Node("power", (call, exponent))

    def _group(self, depth: int) -> Node:
        opening = self.take()
        if self.type == "close" and self.tokens[self.place][1] == CLOSING[opening] == "\\}":
            self.take()
            return Node("set")
        inside = self.list(depth + 1)
        if self.type == "fraction":
            self.take()
            inside = Node("quotient", (inside, self.list(depth + 1)), "frac")
        closing = self.take()
        is_single = inside.type != "list" and opening != "\\{" and closing == CLOSING[opening]
        if opening == "{" or is_single:
            if closing != CLOSING[opening]:
                raise SyntaxError
            return inside
        items = inside.items if inside.type == "list" else (inside,)
        if opening == "\\{" and closing == "\\}":
            return Node("set", items)
        if closing not in (")", "]") or opening == "\\{" or len(items) < 2:
            raise SyntaxError
        return Node("tuple", items, opening + closing)


def _is_mixed(whole: Node, part: Node) -> bool:
    """Whether a whole number and the fraction behind it are one mixed number."""
    if whole.type != "number" or not whole.text.isdigit() or part.type != "quotient":
        return False
    over, under = part.items
    return part.text == "frac" and over.text.isdigit() and under.text.isdigit() and (
        over.value < under.value
    )  # fmt: skip


def _number(text: str) -> Node:
    digits = re.sub(rf"(?<=\d){THOUSANDS}(?=\d)", "", text)
    return Node("number", text=digits, value=Fraction(digits))


def _mixed(text: str) -> Node:
    """A mixed number such as `2 2/3`, or one with a character such as the half sign."""
    whole = re.match(r"(\d*)(?=[^\d/])", text)
    rest = text[whole.end() :] if whole else text
    over, _, under = unicodedata.normalize("NFKC", rest).replace("\u2044", "/").partition("/")
    if int(under or 1) == 0 or (whole and whole[1] and int(over) >= int(under or 1)):
        raise SyntaxError
    value = Fraction(whole[1] or 0 if whole else 0) + Fraction(int(over), int(under or 1))
    return Node("number", text=text, value=value)


def _repeating(text: str) -> Node:
    """The value of a decimal number whose last digits repeat, as in `0.1\\overline{6}`."""
    first, repeated = re.split(r"\\|\(", text, maxsplit=1)
    digits = re.sub(r"\D", "", repeated)
    places = len(first.partition(".")[2])
    value = Fraction(f"0{first}0") + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
    return Node("number", text=f"{first}overline{digits}", value=value)


def _matrix(text: str) -> Node:
    body = re.sub(r"^\\begin\s?\{\w+\}(?:\{[lcr|]*\})?|\\end\s?\{\w+\}$", "", text)
    rows = [row.split("&") for row in re.split(r"\\\\", body) if row.strip()]
    if "\\begin" in body or len({len(row) for row in rows}) != 1:
        raise SyntaxError
    cells = [parse_expression(cell.strip()) for row in rows for cell in row]
    if any(cell is None for cell in cells):
        raise SyntaxError
    return Node("matrix", tuple(cell for cell in cells if cell), str(len(rows)))


NUMBERS = {"number": _number, "mixed": _mixed, "repeating": _repeating, "matrix": _matrix}
"""{type of a token: function that makes a node of its text}"""


def replaced(node: Node, change: Callable[[Node], Node]) -> Node:
    """`node` with `change` applied to every node in it, from below."""
    items = tuple(replaced(item, change) for item in node.items)
    return change(Node(node.type, items, node.text, node.value))


def key(node: Node) -> str:
    """A text that is equal for expressions that differ in spaces, brackets and the order of terms
    and factors only.
    """
    items = [key(item) for item in node.items]
    if node.type in ("sum", "product", "set", "list"):
        items.sort()
    if node.type == "number":
        return str(node.value)
    return f"{node.type}{node.text}({','.join(items)})"
