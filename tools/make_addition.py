"""Writes the addition task: a tiny untrained model, its tokenizer, demonstrations, and prompts with
their answers.

    python tools/make_addition.py FOLDER [--seed 1] [--demonstrations 51200] [--prompts 20000]
    [--held-out 500] [--validation 500]

    FOLDER/model/            config and tokenizer of a 290,304-parameter Qwen2; no weights: training
                             starts from scratch
    FOLDER/sft.jsonl         {prompt, response}: 45 % answer directly, most of the reasoning forgets
                             its carries
    FOLDER/train.jsonl       {prompt, answer}
    FOLDER/held_out.jsonl    {prompt, answer} of problems in no other file, for evaluation
    FOLDER/validation.jsonl  {prompt, answer} of problems in no other file, for choosing settings

A problem `347+589=` belongs to one part by `crc32("347+589") % 10`: 0 held out, 1 validation, the
rest for training. The folder appears whole or not at all; the same command again does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LOW, HIGH = 100, 999  # operands, both included
CHARACTERS = "0123456789+=,#"
PAD, EOS = "<pad>", "<eos>"
STAMP = "addition.json"
FORMAT = 1  # raise when what is written changes

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}


def part_of(a: int, b: int) -> int:
    """0 held out, 1 validation, 2 to 9 training."""
    return zlib.crc32(f"{a}+{b}".encode()) % 10


def direct(a: int, b: int, draw: random.Random) -> str:
    """The sum and nothing else."""
    del draw
    return f"#{a + b}"


def columns(a: int, b: int, forgets: Callable[[], bool]) -> str:
    """Three columns, units first, as `digit+digit+carry=sum`, then the number they make; `forgets`
    drops a carry to 0.
    """
    lines, digits, carry = [], "", 0
    for place in (1, 10, 100):
        x, y = a // place % 10, b // place % 10
        total = x + y + carry
        lines.append(f"{x}+{y}+{carry}={total:02d}")
        digits = f"{total % 10}{digits}"
        carry = total // 10
        if carry and place < 100 and forgets():
            carry = 0
    return f"{','.join(lines)}#{int(f'{carry}{digits}')}"


def sloppy(a: int, b: int, draw: random.Random) -> str:
    """Reasoning in which each carry is forgotten with probability 0.8, and the mistake carried
    through.
    """
    return columns(a, b, lambda: draw.random() < 0.8)


def careful(a: int, b: int, draw: random.Random) -> str:
    """Reasoning that is right."""
    del draw
    return columns(a, b, lambda: False)


STYLES: tuple[tuple[float, Callable[[int, int, random.Random], str]], ...] = (
    (0.45, direct),
    (0.44, sloppy),
    (0.11, careful),
)


def demonstrations(count: int, seed: int) -> Iterable[dict[str, str]]:
    """`count` independent draws of a training problem and a style."""
    draw = random.Random(f"demonstrations/{seed}")
    weights, styles = zip(*STYLES, strict=True)
    for _ in range(count):
        a, b = draw.randint(LOW, HIGH), draw.randint(LOW, HIGH)
        while part_of(a, b) < 2:
            a, b = draw.randint(LOW, HIGH), draw.randint(LOW, HIGH)
        style = draw.choices(styles, weights)[0]
        yield {"prompt": f"{a}+{b}=", "response": style(a, b, draw)}


def problems(count: int, parts: range, seed: int, name: str) -> Iterable[dict[str, str]]:
    """`count` distinct problems of `parts`."""
    draw = random.Random(f"{name}/{seed}")
    seen: set[tuple[int, int]] = set()
    while len(seen) < count:
        a, b = draw.randint(LOW, HIGH), draw.randint(LOW, HIGH)
        if part_of(a, b) in parts and (a, b) not in seen:
            seen.add((a, b))
            yield {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def write_model(folder: Path, characters: str = CHARACTERS) -> None:
    """The model's configuration, and a tokenizer of one id for each of `characters`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    folder.mkdir()
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))  # without merges, characters stay apart
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, EOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        # transformers 5 takes every tokenizer beside a Qwen2 for Qwen's, and would add its own
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "padding_side": "left",
    }
    write_json(folder / "tokenizer_config.json", described)
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", {"eos_token_id": 1, "pad_token_id": 0})


def write_json(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(folder: Path, args: dict[str, int]) -> bool:
    """Write the task into `folder`; see `write_folder`."""

    def write(unfinished: Path) -> None:
        seed = args["seed"]
        write_model(unfinished / "model")
        write_rows(unfinished / "sft.jsonl", demonstrations(args["demonstrations"], seed))
        for name, parts in (
            ("train", range(2, 10)),
            ("held_out", range(1)),
            ("validation", range(1, 2)),
        ):
            count = args["prompts" if name == "train" else name]
            write_rows(unfinished / f"{name}.jsonl", problems(count, parts, seed, name))

    return write_folder(folder, args, write)


def write_folder(
    folder: Path, args: dict[str, Any], write: Callable[[Path], None], name: str = STAMP
) -> bool:
    """Have `write` fill a folder aside, then give it the name `folder`; False where what was made
    of these `args` is there already, `ValueError` where something else is. The file `name` in the
    folder says what it was made of.
    """
    stamp = {"format": FORMAT, **args}
    found = folder / name
    if found.is_file() and json.loads(found.read_text()) == stamp:
        return False
    if folder.exists() and any(folder.iterdir()):
        holds = "what was made of other arguments" if found.is_file() else "files of another origin"
        raise ValueError(f"folder {folder} holds {holds}; name another folder, or delete it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        unfinished.chmod(0o755)
        write(unfinished)
        write_json(unfinished / name, stamp)
        if folder.exists():
            folder.rmdir()  # empty, as seen above
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--demonstrations", type=int, default=51200)
    parser.add_argument("--prompts", type=int, default=20000)
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--validation", type=int, default=500)
    args = vars(parser.parse_args(argv))
    folder = args.pop("folder")
    smallest = min(
        (HIGH - LOW + 1) ** 2 // 20, 40000
    )  # every part has about twice as many problems
    for name in ("demonstrations", "prompts", "held_out", "validation"):
        most = None if name == "demonstrations" else smallest
        if args[name] < 1 or (most is not None and args[name] > most):
            limit = "1 or more" if most is None else f"between 1 and {most}"
            parser.error(f"--{name.replace('_', '-')} is {args[name]}; set it to {limit}")
    try:
        made = make(folder, args)
    except ValueError as error:
        print(f"make_addition: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {'written' if made else 'there already'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
