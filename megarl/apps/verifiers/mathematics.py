r"""The verifier `math`: is the final expression of a response equal to the reference answer?

    response --final expression--> LaTeX --read--> tree --equal, finished--> right or not

Percent is a unit, as dollars are, and units do not count: `50%`, `50\%` and `50 percent` equal 50
and do not equal 0.5. This is the rule of the grader of the MATH data set (arXiv:2103.03874,
`math_equivalence.py`), which removes `\%`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from fractions import Fraction

from megarl.apps.verifiers.expression import MAX_CHARACTERS, VULGAR, Node, key, parse_expression
from megarl.apps.verifiers.finished import is_unfinished, to_simplify
from megarl.apps.verifiers.notation import cleaned, plain_number
from megarl.apps.verifiers.prose import (
    HEDGE_BEHIND,
    HEDGED,
    NEGATED,
    NEGATED_BEHIND,
    NEW_ANSWER,
    expression,
    runs,
    stated_answer,
    stated_words,
    without_words,
)
from megarl.apps.verifiers.textual import compared_as_text, same_part
from megarl.apps.verifiers.values import (
    at_points,
    equal,
    exact_value,
    pairs_of,
    same_term,
    variables,
)
from megarl.settings.environments import EnvironmentConfig
from megarl.types import Prompt

FINAL = "####"  # GSM8K's mark of a final answer
BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=[^\s{]))")
BETWEEN_BOXES = re.compile(
    r"[\s$]*(?:,|\b(?:or|and|maybe|perhaps|possibly)\b)(?:[\s$,]|or|and|maybe)*"
)
TAGS = ("<answer>", "</answer>")
OTHER = re.compile(
    rf"\d[\d.,/]*(?<![.,])|[{VULGAR}$]|\\(?:boxed|fbox|frac)|\b(?:not|none|no|wrong)\b"
    r"|(?<![\w'\u2019])[A-HJ-Zb-z](?![\w'\u2019])"
)
"""What counts as another answer beside a hedge."""
SENTENCE = re.compile(r"\b(?:is|are|be|equals?|answer|therefore|thus|so)\b", re.IGNORECASE)
"""Words that mark a line as a sentence, which is searched for its answer; a line without them is
the answer."""
MAX_LINE = 200
"""Only so many characters of a line are searched for such words."""


def math(config: EnvironmentConfig) -> Callable[[Prompt, str], Awaitable[float]]:
    r"""Make the verifier `math` from the recipe: an async function (prompt, response) that returns
    1.0 if the final expression of the response equals the reference answer mathematically, else 0.

    The final expression is what follows the last `####` or is inside the last `\boxed{}`, whichever
    comes later; without either, the expression that a sentence calls the answer, or the last one of
    the response. Of a response with the tags `<answer>` and `</answer>` only the content of the
    last pair is read. Numbers are compared exactly, words and the like as text, other expressions
    by their values at random points. An expression counts as wrong if it has more than 1000
    characters, brackets nested more than 50 deep or a value too large to compute; if the words
    beside it name another one or negate it; and if it has still to be evaluated (`67 + 63`, `2x +
    3x`) or stands in the question, unless the reference answer is such an expression, or with
    `math.allow_unevaluated`. The function raises `ValueError` for a reference answer that is not
    mathematics.
    """

    async def verify(prompt: Prompt, response: str) -> float:
        text = cleaned(final_expression(prompt.answer) or prompt.answer)
        is_known = compared_as_text(text, text) is not None or parse_expression(text) is not None
        if not text or not (is_known or re.search(r"[\\^!]", text)):
            raise ValueError(
                f"the reference answer {prompt.answer!r:.200} of row {prompt.index} is not"
                " mathematics; set environment.verifier to 'exact_match' or to a function of your"
                " own"
            )
        asked = "" if config.math.allow_unevaluated else prompt.text
        answer = marked_answer(response)
        if answer is None:
            factorial = "!" in text or config.math.allow_unevaluated
            answer = stated_answer(in_tags(response)[0], factorial=factorial)
            if compared_as_text(text, text):  # words
                answer = stated_words(in_tags(response)[0]) or answer
        if not answer or len(answer) > MAX_CHARACTERS:
            return 0.0
        return float(verdict(text, cleaned(answer), asked, config.math.allow_unevaluated))

    return verify


def verdict(reference: str, answer: str, question: str, allow_unevaluated: bool) -> bool:
    """Whether `answer` is a right answer to `question`; it and the `reference` are LaTeX."""
    reference, answer = same_part(reference, answer)
    by_text = compared_as_text(reference, answer)
    if by_text is not None:
        return by_text
    gold, reply = parse_expression(reference), parse_expression(answer)
    if gold is None:
        return re.sub(r"\s", "", reference) == re.sub(r"\s", "", answer)
    if reply is None or (gold.type != "list" and reply.type == "list"):
        again = parse_expression(without_words(answer))
        if again is None and re.search(r"[A-Za-z]{2}", answer):
            alone = stated_answer(re.sub(r"\\text\w*\s*\{([^{}]*)\}", r" \1 ", answer), alone=True)
            again = None if alone is None else parse_expression(alone)
        reply = again
    if reply is None:
        return False
    whole, (gold, reply) = reply, _comparable(gold, reply)
    if gold is None or reply is None:
        return False
    rounded = any("." in item.text for node in (gold, reply) for item in node.nodes()
                  if item.type == "number")  # fmt: skip
    if key(gold) == key(reply) and key(whole) == key(reply):
        return True
    if not equal(gold, reply, rounded=rounded):
        return False
    return allow_unevaluated or is_answer(reply, gold, whole, question)


def _comparable(gold: Node, reply: Node) -> tuple[Node | None, Node | None]:
    """Two answers without the names of their values, `5` for `x = 5`."""
    gold_side = _side(gold, None) or gold
    given_side = _side(reply, gold_side)
    if given_side is None:
        return gold_side, None
    if gold_side.type not in ("relation", "list", "union", "tuple") and _is_equation(given_side):
        given_side = given_side.items[-1]
    elif given_side.type != "relation" and _is_equation(gold_side) and _is_name(gold_side.items[0]):
        gold_side = gold_side.items[-1]
    return gold_side, given_side


def _is_equation(node: Node) -> bool:
    return node.type == "relation" and set(node.text.split()) == {"="}


def _side(node: Node, gold: Node | None) -> Node | None:
    """The value in equations such as `x = 67 + 63 = 130` and `1/3 \\approx 0.333`; None if two
    sides have different values. An equation without a name and one value is returned as it is.
    """
    if node.type == "list":
        sides = [_side(item, None) for item in node.items]
        items = tuple(side for side in sides if side is not None)
        return Node("list", items, node.text) if len(items) == len(sides) else None
    if node.type != "relation":
        return node
    signs = node.text.split(" ")
    if signs == ["\u2208"]:
        return node.items[1]
    if set(signs) - {"=", "\u2248"}:
        return node
    groups: list[list[Node]] = [[node.items[0]]]
    for sign, item in zip(signs, node.items[1:], strict=True):
        groups.append([item]) if sign == "\u2248" else groups[-1].append(item)
    lasts = [group[-1] for group in groups]
    if not all(_rounds(*pair) for pair in pairs_of(lasts)):
        return None
    last = exact_value(lasts[-1])
    is_last = gold is not None and last is not None and last == exact_value(gold)
    sides = groups[-1] if is_last else groups[0]
    values = [side for side in sides if not variables(side) and side.type != "unit"]
    rounded = any("." in leaf.text for value in values for leaf in value.nodes())
    if any(not equal(*pair, rounded=rounded) for pair in pairs_of(values)):
        return None
    others = [side for side in sides if side not in values]
    if values and all(_is_name(side) for side in others):
        return next((side for side in reversed(values) if not is_unfinished(side)), values[-1])
    if len(sides) == 1:
        return sides[0]
    if len(sides) > 2 and not all(same_term(*pair, rounded=False) for pair in pairs_of(sides[1:])):
        return None
    ends = (sides[0], sides[-1])
    if _is_name(ends[1]) and not _is_name(ends[0]):
        ends = ends[::-1]
    return Node("relation", ends, "=")


def _is_name(node: Node) -> bool:
    """Whether an expression is the name of a value: x, x_1, f(2), AB, (x, y)."""
    if node.type in ("product", "tuple"):
        return _is_name(node.items[0]) and all(
            item.type in ("name", "number", "tuple", "product") for item in node.items[1:]
        )
    return node.type in ("name", "unit")


def _rounds(first: Node, second: Node) -> bool:
    """Whether one of two values is the other one, rounded."""
    sizes = [_size(node) for node in (first, second)]
    decimal = next((node for node in (second, first) if node.type in ("number", "negative")
                    and _size(node) is not None), None)  # fmt: skip
    if decimal is None or sizes[0] is None or sizes[1] is None:
        return False
    written = decimal.text or decimal.items[0].text
    return abs(sizes[0] - sizes[1]) <= Fraction(1, 2 * 10 ** len(written.partition(".")[2]))


def _size(node: Node) -> Fraction | None:
    value = exact_value(node)
    if value is None and not variables(node) and (points := at_points(node)) is not None:
        return Fraction(float(points[0][1].real)) if abs(points[0][1].imag) < 1e-30 else None
    return value


def is_answer(answer: Node, gold: Node, whole: Node, question: str) -> bool:
    """Whether `answer`, which equals the reference answer `gold`, counts as an answer: it is a
    finished value, not one still to be evaluated such as `67 + 63`, or `gold` is unfinished too. An
    expression that could be simplified, or has variables, and stands in the text `question` was
    only copied, so that it is no answer. `whole`: the answer with the names of its values.
    """
    rational = exact_value(gold) is not None
    if is_unfinished(answer, rational=rational):
        return is_unfinished(gold, rational=rational)
    unreduced = to_simplify(answer) or []
    if to_simplify(gold):
        unreduced = []
    wholes = [x for x in (answer, whole) if key(x) != key(gold) and exact_value(x) is None]
    unreduced += [node for node in wholes if node.type != "relation" or not _is_name(node.items[0])]
    if not unreduced or not question:
        return True
    copied = {
        key(node)
        for run in runs(question[-MAX_CHARACTERS * 10 :])
        if (tree := parse_expression(expression(run[0]))) is not None
        for node in tree.nodes()
    }
    return copied.isdisjoint(key(node) for node in unreduced)


def final_expression(text: str) -> str | None:
    r"""The marked answer in `text`: what follows the last `####` on its line, or is inside the last
    `\boxed{}`, whichever comes later. None without either; empty if the last box is not closed.
    Boxes with a comma, `and` or `or` between them are one answer: `5 or 7`.
    """
    hashed = text.rfind(FINAL)
    boxes = list(BOX.finditer(text, max(hashed, 0)))[-10:]
    if boxes:
        contents = [_content(text, box) for box in boxes]
        answer, start = contents[-1][0], boxes[-1].start()
        for box, (inside, end) in zip(boxes[-2::-1], contents[-2::-1], strict=True):
            if not BETWEEN_BOXES.fullmatch(text, end, start):
                break
            joined, start = inside + " or " + answer, box.start()
            answer = answer if inside == answer or len(answer) > MAX_CHARACTERS else joined
        return answer
    if hashed >= 0:
        line = text[hashed + len(FINAL) :].strip().split("\n", 1)[0].strip()
        if len(line) <= 3 or re.search(
            rf"[\d\\{VULGAR}]", line
        ):  # else it is a heading, as in "#### Conclusion"
            return line
    return None


def _content(text: str, box: re.Match[str]) -> tuple[str, int]:
    """(What is in a box, "" if it is not closed; the position behind it)."""
    if not box[1]:  # as in "\boxed 5"
        inside = re.split(r"[\s$]", text[box.end() : box.end() + MAX_CHARACTERS], maxsplit=1)[0]
        return inside, box.end() + len(inside)
    level = 1
    for end in range(box.end(), len(text)):
        level += {"{": 1, "}": -1}.get(text[end], 0)
        if level == 0:
            return text[box.end() : end].strip(), end + 1
    return "", len(text)  # an open box is not an answer


def marked_answer(response: str) -> str | None:
    """The answer that a model's `response` marks: behind `####` or in a `\\boxed{}`, the later of
    both; else a single line between `<answer>` tags; None without a mark; "" if the words beside
    the box negate it or name another answer.
    """
    text, tagged_line = in_tags(response)
    answer = final_expression(text)
    box = next(reversed(list(BOX.finditer(text))), None)
    if box is None or answer is None or text.rfind(FINAL) > box.start():
        return tagged_line if answer is None else answer
    before = text[max(0, box.start() - 60) : box.start()]
    behind = text[_content(text, box)[1] :][:80]
    if NEGATED.search(before) or NEGATED_BEHIND.match(behind) or _is_hedged(answer, before, behind):
        return ""
    return answer


def _is_hedged(answer: str, before: str, behind: str) -> bool:
    """Whether the words around a box name another answer: `or 7`. A hedge alone does not count
    beside a number.
    """
    behind = without_words(behind)
    match = HEDGE_BEHIND.match(behind)
    if not re.search(r"\d", answer):
        return bool(match or (HEDGED.search(before) and " or " not in answer))
    others = []
    if match:
        others = OTHER.findall(re.split(r"[.!?](?:\s|\Z)|\n", behind[match.end() :], maxsplit=1)[0])
    elif again := NEW_ANSWER.match(behind):
        others = OTHER.findall(behind[again.end() :])[:1]
    if HEDGED.search(before) and " or " not in answer:
        others += OTHER.findall(without_words(re.split(r"[.!?]\s|\n", before)[-1]))
    value = plain_number(answer)
    return any(value is None or plain_number(text) != value for text in others)


def in_tags(response: str) -> tuple[str, str | None]:
    """The part of a model's response in which the answer is looked for. Returns (what the last
    `<answer>` and `</answer>` hold; the same text if it is one line and no sentence, otherwise
    None), or (`response`, None) without such tags.
    """
    end = response.rfind(TAGS[1])
    start = response.rfind(TAGS[0], 0, max(end, 0))
    if start < 0:
        return response, None
    inside = response[start + len(TAGS[0]) : end].strip()
    is_line = bool(inside) and "\n" not in inside and not SENTENCE.search(inside[:MAX_LINE])
    return inside, inside if is_line else None


__all__ = ["final_expression", "math", "plain_number"]
