"""Writes the task of programs: a tiny untrained model, demonstrations, and prompts with the tests
that a program must pass.

    python tools/make_programs.py FOLDER [--seed 1] [--demonstrations 25600] [--prompts 4000]
    [--held-out 80]

    FOLDER/model/          config and tokenizer of a small Qwen2; no weights: training starts from
                           scratch
    FOLDER/sft.jsonl       {prompt, response}: 80 % of the programs are wrong, most of them because
                           they apply the operators from left to right
    FOLDER/train.jsonl     {prompt, input_output}
    FOLDER/held_out.jsonl  {prompt, input_output} of expressions in no other file, for evaluation

A prompt is an expression such as `7-2*x+3=`, to be compiled to the stack language of
launch/environments/tiny_language.py: `72x*-3+.`. `input_output` holds two tests, each of two
values of x and the values of the expression. In every expression a `*` follows a `+` or a `-`, and
operators applied from left to right give another value. An expression is held out if
`crc32("7-2*x+3") % 10` is 0. The folder appears whole or not at all; the same command again does
nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from make_addition import distinct, is_held_out, task_main, write_model, write_rows

OPERANDS = (3, 4)  # how many operands an expression may have
DIGITS = "23456789"  # by 1, `x+x*1` would be the same from left to right
TESTS, LINES = 2, 2  # tests of a row, values of x in a test
SMALLEST_X, LARGEST_X = 11, 99  # values of x in tests
CHARACTERS = "0123456789x+-*.="

Terms = list[str]
"""Operands and operators in turn: ["7", "-", "2", "*", "x"]."""


def value(terms: Sequence[str], x: int) -> int:
    """The value of an expression, with the usual precedence."""
    return eval("".join(terms), {"x": x})  # noqa: S307 - of characters that are ours


def from_left(terms: Terms) -> str:
    """A program that applies the operators from left to right, without precedence."""
    pairs = zip(terms[1::2], terms[2::2], strict=True)
    return terms[0] + "".join(operand + operator for operator, operand in pairs) + "."


def compiled(terms: Terms) -> str:
    """A program for the expression, with the usual precedence."""
    program, waiting = terms[0], ""
    for operator, operand in zip(terms[1::2], terms[2::2], strict=True):
        if operator == "*":
            program += operand + operator
        else:
            program, waiting = program + waiting + operand, operator
    return program + waiting + "."


def mistaken(terms: Terms, draw: random.Random) -> Terms:
    """The expression with one operand replaced by another."""
    place = draw.randrange(0, len(terms), 2)
    others = [operand for operand in ("x", *DIGITS) if operand != terms[place]]
    return [*terms[:place], draw.choice(others), *terms[place + 1 :]]


def expressions(draw: random.Random, *, held_out: bool) -> Iterable[Terms]:
    """Endless draws of expressions that hold an x and need precedence."""
    while True:
        operands = [draw.choice((draw.choice(DIGITS), "x")) for _ in range(draw.choice(OPERANDS))]
        terms = operands[:1]
        for operand in operands[1:]:
            terms += [draw.choice("+-*"), operand]
        has_late_product = "*" in "".join(terms[1::2]).lstrip("*")
        # `x-x+2*3` is one of the few whose operators give the same value from left to right.
        needs_precedence = has_late_product and operands[0] != operands[1]
        if "x" in operands and needs_precedence and is_held_out("".join(terms)) == held_out:
            yield terms


def response(terms: Terms, draw: random.Random) -> str:
    """A program: operators from left to right (50 %), the last operator and operand forgotten
    (15 %), one operand wrong (15 %), or right (20 %).
    """
    style = draw.choices(("from_left", "short", "sloppy", "right"), (0.5, 0.15, 0.15, 0.2))[0]
    if style == "from_left":
        return from_left(terms)
    if style == "short":
        return compiled(terms[:-2])
    return compiled(mistaken(terms, draw) if style == "sloppy" else terms)


def demonstrations(count: int, seed: int) -> Iterable[dict[str, str]]:
    """`count` independent draws of a training expression and a program."""
    draw = random.Random(f"programs/{seed}")
    for terms in islice(expressions(draw, held_out=False), count):
        yield {"prompt": f"{''.join(terms)}=", "response": response(terms, draw)}


def tests(terms: Sequence[str], draw: random.Random) -> dict[str, list[str]]:
    """Tests of an expression, as column `input_output` holds them: in each input a few values of x,
    one a line, in its output the values of the expression.
    """
    drawn = draw.sample(range(SMALLEST_X, LARGEST_X + 1), TESTS * LINES)
    parts = [drawn[at : at + LINES] for at in range(0, len(drawn), LINES)]
    return {
        "inputs": ["".join(f"{x}\n" for x in part) for part in parts],
        "outputs": ["".join(f"{value(terms, x)}\n" for x in part) for part in parts],
    }


def problems(count: int, seed: int, *, held_out: bool) -> Iterable[dict[str, Any]]:
    """`count` distinct expressions with their tests."""
    draw = random.Random(f"problems/{held_out}/{seed}")
    for terms in distinct(count, map(tuple, expressions(draw, held_out=held_out))):
        yield {"prompt": f"{''.join(terms)}=", "input_output": tests(terms, draw)}


def write_task(folder: Path, args: dict[str, int]) -> None:
    """All files of the task."""
    seed = args["seed"]
    write_model(folder / "model", CHARACTERS)
    write_rows(folder / "sft.jsonl", demonstrations(args["demonstrations"], seed))
    write_rows(folder / "train.jsonl", problems(args["prompts"], seed, held_out=False))
    write_rows(folder / "held_out.jsonl", problems(args["held_out"], seed, held_out=True))


COUNTS = {
    "seed": (1, 0),
    "demonstrations": (25600, 10**6),
    "prompts": (4000, 20000),
    "held_out": (80, 2000),
}
main = partial(task_main, __doc__, COUNTS, write_task, task="programs")

if __name__ == "__main__":
    sys.exit(main())
