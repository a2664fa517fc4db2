"""Writes the addition task: a tiny untrained model, its tokenizer, demonstrations, and prompts with
their answers.

    python tools/make_addition.py FOLDER [--seed 1] [--demonstrations 51200] [--prompts 20000]
    [--held-out 500] [--validation 500]

The installed package has it too: python -m megarl.recipes.make_addition FOLDER.

    FOLDER/model/            config and tokenizer of a 290,304-parameter Qwen2; no weights: training
                             starts from scratch
    FOLDER/experts/          the same of a 448,704-parameter Qwen3-MoE: 8 experts, 2 for each token
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
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
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

EXPERTS = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
}


def part_of(a: int, b: int) -> int:
    """0 held out, 1 validation, 2 to 9 training."""
    return zlib.crc32(f"{a}+{b}".encode()) % 10


def is_held_out(problem: str) -> bool:
    """Whether a problem of another task is kept for evaluation."""
    return zlib.crc32(problem.encode()) % 10 == 0


def distinct(count: int, drawn: Iterable[T]) -> Iterable[T]:
    """The first `count` of `drawn` that differ."""
    seen: set[T] = set()
    for one in drawn:
        if one not in seen:
            seen.add(one)
            yield one
        if len(seen) == count:
            return


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


STYLES: dict[str, tuple[float, Callable[[int, int, random.Random], str]]] = {
    "direct": (0.45, lambda a, b, draw: f"#{a + b}"),
    # Each carry is forgotten with probability 0.8, and the mistake carried through.
    "sloppy": (0.44, lambda a, b, draw: columns(a, b, lambda: draw.random() < 0.8)),
    "careful": (0.11, lambda a, b, draw: columns(a, b, lambda: False)),
}
"""{way to answer: (its share of the demonstrations, the answer)}"""


def demonstrations(count: int, seed: int) -> Iterable[dict[str, str]]:
    """`count` independent draws of a training problem and a style."""
    draw = random.Random(f"demonstrations/{seed}")
    weights, styles = zip(*STYLES.values(), strict=True)
    for _ in range(count):
        a, b = draw.randint(LOW, HIGH), draw.randint(LOW, HIGH)
        while part_of(a, b) < 2:
            a, b = draw.randint(LOW, HIGH), draw.randint(LOW, HIGH)
        style = draw.choices(styles, weights)[0]
        yield {"prompt": f"{a}+{b}=", "response": style(a, b, draw)}


def problems(count: int, parts: range, seed: int, name: str) -> Iterable[dict[str, str]]:
    """`count` distinct problems of `parts`."""
    draw = random.Random(f"{name}/{seed}")
    pairs = ((draw.randint(LOW, HIGH), draw.randint(LOW, HIGH)) for _ in itertools.count())
    for a, b in distinct(count, (pair for pair in pairs if part_of(*pair) in parts)):
        yield {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def write_tokenizer(
    folder: Path,
    characters: Iterable[str],
    *,
    special: Sequence[str] = (PAD, EOS),
    words: Iterable[str] = (),
    **settings: Any,
) -> None:
    """A tokenizer of one id for each of `special` (padding, end of sequence, others), of
    `characters` and of `words`. `settings`: more of its configuration.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))  # without merges, characters stay apart
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in special])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in words])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": special[0],
        "eos_token": special[1],
        # transformers 5 takes every tokenizer beside a Qwen2 for Qwen's, and would add its own
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    write_json(folder / "tokenizer_config.json", described | settings)


def write_model(
    folder: Path,
    characters: Iterable[str] = CHARACTERS,
    config: Mapping[str, Any] = CONFIG,
    **settings: Any,
) -> None:
    """The model's configuration, and a tokenizer; see `write_tokenizer`."""
    folder.mkdir()
    longest = CONFIG["max_position_embeddings"]
    write_tokenizer(folder, characters, model_max_length=longest, **settings)
    write_json(folder / "config.json", dict(config))
    write_json(folder / "generation_config.json", {"eos_token_id": 1, "pad_token_id": 0})


def write_json(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_task(folder: Path, args: dict[str, int]) -> None:
    """All files of the task."""
    seed = args["seed"]
    write_model(folder / "model")
    write_model(folder / "experts", config=EXPERTS)
    write_rows(folder / "sft.jsonl", demonstrations(args["demonstrations"], seed))
    parts = {"train": range(2, 10), "held_out": range(1), "validation": range(1, 2)}
    for name, own in parts.items():
        count = args["prompts" if name == "train" else name]
        write_rows(folder / f"{name}.jsonl", problems(count, own, seed, name))


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


def task_main(
    doc: str | None,
    counts: dict[str, tuple[int, int]],
    write: Callable[[Path, dict[str, int]], None],
    argv: list[str] | None = None,
    *,
    name: str = STAMP,
    **stamp: Any,
) -> int:
    """The command line of a tool that writes a task; returns the exit status. `counts`: {option:
    (default, most)}; `write` gets a folder and {option: value}. For `name` see `write_folder`,
    which gets `stamp` as well.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    for option, (default, _) in counts.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=int, default=default)
    args = vars(parser.parse_args(argv))
    folder = args.pop("folder")
    for option, (_, most) in counts.items():
        if option != "seed" and not 1 <= args[option] <= most:
            given = f"--{option.replace('_', '-')}"
            parser.error(f"{given} is {args[option]}; set it to a number from 1 to {most}")
    try:
        made = write_folder(folder, {**stamp, **args}, lambda aside: write(aside, args), name)
    except (ValueError, OSError) as error:
        print(f"{parser.prog.removesuffix('.py')}: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {'written' if made else 'there already'}", file=sys.stderr)
    return 0


COUNTS = {
    "seed": (1, 0),
    "demonstrations": (51200, 10**7),
    "prompts": (20000, 40000),  # every part has about twice as many problems
    "held_out": (500, 40000),
    "validation": (500, 40000),
}


main = partial(task_main, __doc__, COUNTS, write_task, models=2)

if __name__ == "__main__":
    sys.exit(main())
