"""Writes the calculator task: a tiny untrained model whose chat template takes tools,
demonstrations of several turns, and prompts with their answers.

    python tools/make_calculator.py FOLDER [--seed 1] [--demonstrations 51200] [--prompts 8000]
    [--held-out 500]

    FOLDER/model/          config, tokenizer and chat template of a small Qwen2; no weights:
                           training starts from scratch
    FOLDER/sft.jsonl       {messages}: 55 % answer 0 without a call; of the others two thirds copy a
                           digit wrong or forget the second call
    FOLDER/train.jsonl     {prompt, answer}
    FOLDER/held_out.jsonl  {prompt, answer} of problems in no other file, for evaluation

A problem is `37*58+12`. The model cannot multiply, so it has to call `multiply` and then `add`
(launch/environments/calculator.py). A problem is held out if `crc32("37*58+12") % 10` is 0. The
folder appears whole or not at all; the same command again does nothing.
"""

from __future__ import annotations

import argparse
import random
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from make_addition import CONFIG, write_folder, write_json, write_rows

LOW, HIGH = 11, 99  # every operand, both included
PAD, EOS = "<pad>", "<|im_end|>"
SPECIAL = [PAD, EOS, "<|im_start|>"]
# One token each, so that a call is short. What a model of any size writes is the same text.
WORDS = [
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *('{"name": "', '", "arguments": {"a": ', ', "b": ', "}}"),
    *("system", "user", "assistant", "multiply", "add", "error"),
]
CHARACTERS = "0123456789+*-=,.: \n"
TEMPLATE = """{%- if tools %}<|im_start|>system
{%- for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<tool_response>{{ message.content }}</tool_response>
{%- elif message.role == "system" %}<|im_start|>system {{ message.content }}<|im_end|>
{%- else %}<|im_start|>{{ message.role }}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""


def is_held_out(problem: str) -> bool:
    """Whether a problem is kept for evaluation."""
    return zlib.crc32(problem.encode()) % 10 == 0


def operands(draw: random.Random, *, held_out: bool) -> tuple[int, int, int]:
    """a, b, c of a problem `a*b+c`."""
    while True:
        a, b, c = (draw.randint(LOW, HIGH) for _ in range(3))
        if is_held_out(f"{a}*{b}+{c}") == held_out:
            return a, b, c


def mistaken(number: int, draw: random.Random) -> int:
    """The number with one digit replaced."""
    digits = list(str(number))
    digits[draw.randrange(len(digits))] = draw.choice("123456789")
    return int("".join(digits))


def call(name: str, a: int, b: int) -> dict[str, str]:
    """A turn of the model that calls a tool."""
    arguments = f'{{"name": "{name}", "arguments": {{"a": {a}, "b": {b}}}}}'
    return {"role": "assistant", "content": f"<tool_call>{arguments}</tool_call>"}


def conversation(a: int, b: int, c: int, draw: random.Random) -> list[dict[str, str]]:
    """One way to answer: 0 without any call (55 %), calls with a digit copied wrong (15 %), without
    the second call (15 %), or as it should be (15 %).
    """
    turns = [
        {"role": "system", "content": "multiply add"},
        {"role": "user", "content": f"{a}*{b}+{c}"},
    ]
    style = draw.choices(("none", "sloppy", "short", "careful"), (0.55, 0.15, 0.15, 0.15))[0]
    if style == "none":
        return [*turns, {"role": "assistant", "content": "0"}]
    given = mistaken(a, draw) if style == "sloppy" else a
    product = given * b
    turns += [call("multiply", given, b), {"role": "tool", "content": str(product)}]
    if style == "short":
        return [*turns, {"role": "assistant", "content": str(product)}]
    total = product + c
    turns += [call("add", product, c), {"role": "tool", "content": str(total)}]
    return [*turns, {"role": "assistant", "content": str(total)}]


def demonstrations(count: int, seed: int) -> Iterable[dict[str, Any]]:
    """`count` independent draws of a training problem and a way to answer it."""
    draw = random.Random(f"calculator/{seed}")
    for _ in range(count):
        yield {"messages": conversation(*operands(draw, held_out=False), draw)}


def problems(count: int, seed: int, *, held_out: bool) -> Iterable[dict[str, str]]:
    """`count` distinct problems."""
    draw, seen = random.Random(f"problems/{held_out}/{seed}"), set()
    while len(seen) < count:
        a, b, c = operands(draw, held_out=held_out)
        if (a, b, c) not in seen:
            seen.add((a, b, c))
            yield {"prompt": f"{a}*{b}+{c}", "answer": str(a * b + c)}


def write_model(folder: Path) -> None:
    """The model's configuration, its tokenizer and its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    folder.mkdir()
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))  # without merges, characters stay apart
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in SPECIAL])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in WORDS])
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
    seed = args["seed"]
    write_model(folder / "model")
    write_rows(folder / "sft.jsonl", demonstrations(args["demonstrations"], seed))
    write_rows(folder / "train.jsonl", problems(args["prompts"], seed, held_out=False))
    write_rows(folder / "held_out.jsonl", problems(args["held_out"], seed, held_out=True))


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--demonstrations", type=int, default=51200)
    parser.add_argument("--prompts", type=int, default=8000)
    parser.add_argument("--held-out", type=int, default=500)
    args = vars(parser.parse_args(argv))
    folder = args.pop("folder")
    for name in ("demonstrations", "prompts", "held_out"):
        if not 1 <= args[name] <= 10**6 // 2:
            parser.error(f"--{name.replace('_', '-')} is {args[name]}; set it to 1 to 500000")
    try:
        made = write_folder(folder, {"task": "calculator", **args}, lambda at: write_task(at, args))
    except ValueError as error:
        print(f"make_calculator: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {'written' if made else 'there already'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
