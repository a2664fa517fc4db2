"""What tools/bench/e2e.py gives to both systems: model, tokenizer, prompts and reward; and the form
of what it measures. Imports the standard library only: TRL's environment reads this file as well.
"""

from __future__ import annotations

import json
import os
import random
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
PAD, EOS = "<pad>", "<eos>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
REWARD = '''"""A checksum of the text, from 0 to 1: differs within a group, and teaches nothing."""

import zlib


def score(prompt: object, response: str) -> float:
    return zlib.crc32(response.encode()) % 1000 / 999
'''
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


@dataclass(frozen=True)
class Measured:
    """Measurements of one benchmark run. `step_s`, `tokens` and `truncated_share` cover only the
    measured steps: not the first, nor with staleness the extra step at either end.
    """

    step_s: list[float]
    tokens: float
    """Generated in these steps."""
    truncated_share: float
    weight_change: float
    """Largest change of any weight, over the whole run."""
    others: float
    """Share of the CPU taken by processes outside of the run."""
    cpu_s: float
    """CPU time of the whole run, start-up included."""

    @property
    def samples_per_s(self) -> float:
        return BATCH * len(self.step_s) / sum(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / sum(self.step_s)

    @property
    def mean_length(self) -> float:
        return self.tokens / (BATCH * len(self.step_s))


def write_task(folder: Path, vocabulary: int) -> int:
    """Model, tokenizer, prompts and reward into `folder`; returns the model's number of
    parameters.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, **MODEL)).float()
    model.save_pretrained(folder / "model")
    characters = [
        *LETTERS,
        *(chr(0x4E00 + number) for number in range(vocabulary - 2 - len(LETTERS))),
    ]
    table = {token: index for index, token in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(models.BPE(table, []))  # without merges: a token a character
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, EOS)]
    )
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(described))
    draw = random.Random(SEED)
    texts = (
        "".join(draw.choices(LETTERS, k=draw.randint(MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS)))
        for _ in range(ROWS)
    )
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "answer": "none"}) + "\n" for text in texts)
    )
    (folder / "reward.py").write_text(REWARD)
    return sum(parameter.numel() for parameter in model.parameters())
