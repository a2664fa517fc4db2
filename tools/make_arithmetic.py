"""Writes the arithmetic task: sums and differences of two numbers, asked in words.

    python tools/make_arithmetic.py FOLDER [--prompts 4096] [--held-out 256]

    FOLDER/train.jsonl     {prompt, answer}
    FOLDER/held_out.jsonl  {prompt, answer} of pairs of numbers in no row of train.jsonl

A pair of numbers belongs to the held-out rows if `crc32("47,38") % 10` is 0. The folder appears
whole or not at all; the same command again does nothing.
"""

from __future__ import annotations

import argparse
import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from make_addition import write_folder, write_rows

FORMS = {
    1: ("What is {} plus {}?", "Add {} and {}.", "What is the sum of {} and {}?"),
    -1: ("What is {} minus {}?", "Take {1} from {0}.", "What is the difference of {} and {}?"),
}
"""{sign of the second number: ways to ask}"""


def problems(count: int, is_held_out: bool) -> Iterator[dict[str, str]]:
    """`count` rows; the larger number comes first, so no answer is negative."""
    draw = random.Random(f"arithmetic {is_held_out}")
    while count > 0:
        large, small = sorted((draw.randint(2, 30), draw.randint(2, 30)), reverse=True)
        if (zlib.crc32(f"{large},{small}".encode()) % 10 == 0) != is_held_out:
            continue
        sign = draw.choice((1, -1))
        prompt = draw.choice(FORMS[sign]).format(large, small)
        yield {"prompt": prompt, "answer": str(large + sign * small)}
        count -= 1


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=4096)
    parser.add_argument("--held-out", type=int, default=256)
    args = parser.parse_args(argv)

    def write(unfinished: Path) -> None:
        write_rows(unfinished / "train.jsonl", problems(args.prompts, False))
        write_rows(unfinished / "held_out.jsonl", problems(args.held_out, True))

    counts = {"prompts": args.prompts, "held_out": args.held_out}
    try:
        write_folder(args.folder, counts, write, "arithmetic.json")
    except (ValueError, OSError) as error:
        print(f"make_arithmetic: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
