"""Writes the guessing game: a tiny untrained model, demonstrations that mostly play badly, and the
numbers to guess.

    python tools/make_guessing.py FOLDER [--seed 1] [--demonstrations 25600] [--games 4000]

    FOLDER/model/          config, tokenizer and chat template of a small Qwen2; no weights:
                           training starts from scratch
    FOLDER/sft.jsonl       {messages}: of the guesses 45 % count up from the lowest number that is
                           still possible, 40 % are any possible number, 15 % halve what is left
    FOLDER/train.jsonl     {prompt, answer}: the prompt is always `?`
    FOLDER/held_out.jsonl  each number from 1 to 16 eight times, for evaluation: the prompt does not
                           show it, so no number is easier for having been met in training

The folder appears whole or not at all; the same command again does nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from make_addition import task_main, write_model, write_rows

LAST, GUESSES = 16, 5  # as in launch/environments/guessing.py
CHARACTERS = "0123456789?<>"
TEMPLATE = (
    "{% for turn in messages %}{{ turn.content }}{% if turn.role == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
)


def guess_of(low: int, high: int, draw: random.Random) -> int:
    """A guess while the number may be from `low` to `high`."""
    style = draw.choices(("count", "any", "halve"), (0.45, 0.40, 0.15))[0]
    if style == "count":
        return low
    return draw.randint(low, high) if style == "any" else (low + high) // 2


def game(number: int, draw: random.Random) -> list[dict[str, str]]:
    """A whole game as a chat."""
    turns, low, high = [{"role": "user", "content": "?"}], 1, LAST
    for left in range(GUESSES - 1, -1, -1):
        guess = guess_of(low, high, draw)
        turns.append({"role": "assistant", "content": str(guess)})
        if guess == number or left == 0:
            break
        turns.append({"role": "user", "content": ">" if number > guess else "<"})
        low, high = (guess + 1, high) if number > guess else (low, guess - 1)
    return turns


def demonstrations(count: int, seed: int) -> Iterable[dict[str, Any]]:
    """`count` games."""
    draw = random.Random(f"games/{seed}")
    for _ in range(count):
        yield {"messages": game(draw.randint(1, LAST), draw)}


def numbers(count: int, seed: int) -> Iterable[dict[str, str]]:
    """`count` numbers to guess."""
    draw = random.Random(f"numbers/{seed}")
    for _ in range(count):
        yield {"prompt": "?", "answer": str(draw.randint(1, LAST))}


def write_task(folder: Path, args: dict[str, int]) -> None:
    """All files of the task."""
    write_model(folder / "model", CHARACTERS, chat_template=TEMPLATE)
    write_rows(folder / "sft.jsonl", demonstrations(args["demonstrations"], args["seed"]))
    write_rows(folder / "train.jsonl", numbers(args["games"], args["seed"]))
    every = [{"prompt": "?", "answer": str(number)} for number in range(1, LAST + 1)] * 8
    write_rows(folder / "held_out.jsonl", every)


if __name__ == "__main__":
    COUNTS = {"seed": (1, 0), "demonstrations": (25600, 10**6), "games": (4000, 10**6)}
    sys.exit(task_main(__doc__, COUNTS, write_task, task="guessing"))
