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

import itertools
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import make_addition
from make_addition import distinct, is_held_out, task_main, write_rows

LOW, HIGH = 11, 99  # every operand, both included
SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>"]
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
    said = {"system": "multiply add", "user": f"{a}*{b}+{c}"}
    turns = [{"role": role, "content": content} for role, content in said.items()]
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
    draw = random.Random(f"problems/{held_out}/{seed}")
    drawn = (operands(draw, held_out=held_out) for _ in itertools.count())
    for a, b, c in distinct(count, drawn):
        yield {"prompt": f"{a}*{b}+{c}", "answer": str(a * b + c)}


def write_model(folder: Path) -> None:
    """The model's configuration, its tokenizer and its chat template."""
    settings: Any = {"special": SPECIAL, "words": WORDS, "chat_template": TEMPLATE}
    make_addition.write_model(folder, CHARACTERS, **settings)


def write_task(folder: Path, args: dict[str, int]) -> None:
    """All files of the task."""
    seed = args["seed"]
    write_model(folder / "model")
    write_rows(folder / "sft.jsonl", demonstrations(args["demonstrations"], seed))
    write_rows(folder / "train.jsonl", problems(args["prompts"], seed, held_out=False))
    write_rows(folder / "held_out.jsonl", problems(args["held_out"], seed, held_out=True))


if __name__ == "__main__":
    COUNTS = {
        "seed": (1, 0),
        "demonstrations": (51200, 500_000),
        "prompts": (8000, 500_000),
        "held_out": (500, 500_000),
    }
    sys.exit(task_main(__doc__, COUNTS, write_task, task="calculator"))
