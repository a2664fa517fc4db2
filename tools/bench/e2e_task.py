"""What the comparisons with TRL give to both systems: sizes of a step, model, tokenizer, prompts
and rewards. Imports the standard library only: TRL's environment and megarl's verifier read this
file as well.
"""

from __future__ import annotations

import json
import os
import random
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES = 32, 8
BATCH = PROMPTS * SAMPLES
PROMPT_TOKENS = int(os.environ.get("BENCH_PROMPT_TOKENS", "0"))
"""Tokens of every prompt; 0 for 12 to 24."""
MAX_PROMPT_TOKENS = PROMPT_TOKENS or 24
MIN_PROMPT_TOKENS = PROMPT_TOKENS or 12
ROWS = 4096
SEED = 1
LEARNING_RATE = 1e-4
MICRO_BATCH_TOKENS = 8192  # of megarl's packed rows; TRL gets as many padded rows as fit into it
VOCABULARY = 512
PAD, EOS = "<pad>", "<eos>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUMBER = re.compile(r"\d+")
MODEL: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 480,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Setting:
    """How a system spreads over the cores."""

    processes: int
    """Data-parallel trainer processes; TRL's generate as well."""
    threads: int
    """Torch threads of each."""
    engines: int = 0
    """megarl's vLLM engines."""
    engine_threads: int = 0

    def __str__(self) -> str:
        engines = f" + {self.engines} engine x {self.engine_threads}" if self.engines else ""
        return f"{self.processes} process x {self.threads} thread{engines}"


def checksum(completions: list[str], **_: Any) -> list[float]:
    """A checksum of each text, from 0 to 1: differs within a group, and teaches nothing."""
    return [zlib.crc32(text.encode()) % 1000 / 999 for text in completions]


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for each completion whose last number is the answer of its row, else 0. Both systems call
    it: a completion is a text or a list of messages.
    """
    found = []
    for completion, wanted in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        found.append(float(NUMBER.findall(text)[-1:] == [wanted]))
    return found


def write_task(folder: Path, vocabulary: int = VOCABULARY) -> int:
    """Model, tokenizer and prompts into the new `folder`; returns the model's number of
    parameters.
    """
    import torch
    from make_addition import write_tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, **MODEL)).float()
    model.save_pretrained(folder / "model")
    others = (chr(0x4E00 + number) for number in range(vocabulary - 2 - len(LETTERS)))
    write_tokenizer(folder / "model", [*LETTERS, *others], special=[PAD, EOS])
    draw = random.Random(SEED)
    lengths = (draw.randint(MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS) for _ in range(ROWS))
    texts = ("".join(draw.choices(LETTERS, k=length)) for length in lengths)
    rows = (json.dumps({"prompt": text, "answer": "none"}) + "\n" for text in texts)
    (folder / "prompts.jsonl").write_text("".join(rows))
    return sum(parameter.numel() for parameter in model.parameters())
