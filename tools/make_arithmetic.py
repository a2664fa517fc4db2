"""Writes the arithmetic task: sums and differences of two numbers, asked in words.

    python tools/make_arithmetic.py FOLDER [--prompts 4096] [--held-out 256]

    FOLDER/train.jsonl     {prompt, answer}
    FOLDER/held_out.jsonl  {prompt, answer} of pairs of numbers in no row of train.jsonl

A pair of numbers belongs to the held-out rows if `crc32("47,38") % 10` is 0. The folder appears
whole or not at all; the same command again does nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from make_addition import is_held_out, task_main, write_rows

FORMS = {
    1: ("What is {} plus {}?", "Add {} and {}.", "What is the sum of {} and {}?"),
    -1: ("What is {} minus {}?", "Take {1} from {0}.", "What is the difference of {} and {}?"),
}
"""{sign of the second number: ways to ask}"""


def problems(count: int, held_out: bool) -> Iterator[dict[str, str]]:
    """`count` rows; the larger number comes first, so no answer is negative."""
    draw = random.Random(f"arithmetic {held_out}")
    while count > 0:
        large, small = sorted((draw.randint(2, 30), draw.randint(2, 30)), reverse=True)
        if is_held_out(f"{large},{small}") != held_out:
            continue
        sign = draw.choice((1, -1))
        prompt = draw.choice(FORMS[sign]).format(large, small)
        yield {"prompt": prompt, "answer": str(large + sign * small)}
        count -= 1


def write_task(folder: Path, args: dict[str, int]) -> None:
    """Both files of the task."""
    write_rows(folder / "train.jsonl", problems(args["prompts"], False))
    write_rows(folder / "held_out.jsonl", problems(args["held_out"], True))


COUNTS = {"prompts": (4096, 10**6), "held_out": (256, 10**6)}
main = partial(task_main, __doc__, COUNTS, write_task, name="arithmetic.json")

if __name__ == "__main__":
    sys.exit(main())
