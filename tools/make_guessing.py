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

import argparse
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from make_addition import CONFIG, write_folder, write_json, write_rows

LAST, GUESSES = 16, 5  # as in launch/environments/guessing.py
PAD, EOS = "<pad>", "<eos>"
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


def write_model(folder: Path) -> None:
    """The model's configuration, its tokenizer and its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    folder.mkdir()
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))  # without merges, characters stay apart
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in (PAD, EOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "padding_side": "left",
    }
    write_json(folder / "tokenizer_config.json", described)
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", {"eos_token_id": 1, "pad_token_id": 0})


def write_task(folder: Path, args: dict[str, int]) -> None:
    """All files of the task."""
    write_model(folder / "model")
    write_rows(folder / "sft.jsonl", demonstrations(args["demonstrations"], args["seed"]))
    write_rows(folder / "train.jsonl", numbers(args["games"], args["seed"]))
    every = [{"prompt": "?", "answer": str(number)} for number in range(1, LAST + 1)] * 8
    write_rows(folder / "held_out.jsonl", every)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--demonstrations", type=int, default=25600)
    parser.add_argument("--games", type=int, default=4000)
    args = vars(parser.parse_args(argv))
    folder = args.pop("folder")
    for name in ("demonstrations", "games"):
        if not 1 <= args[name] <= 10**6:
            parser.error(f"--{name} is {args[name]}; set it to 1 to 1000000")
    try:
        made = write_folder(folder, {"task": "guessing", **args}, lambda at: write_task(at, args))
    except ValueError as error:
        print(f"make_guessing: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {'written' if made else 'there already'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
