"""The smallest real things: a model folder, a tokenizer, groups of rollouts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from megarl.settings.config import SftConfig
from megarl.settings.data import DemonstrationsConfig
from megarl.settings.schema import replace
from megarl.settings.training import LoraConfig, ModelConfig
from megarl.types import Group, Prompt, Rollout, Segment, TokenArrays, Verdict

VOCABULARY = 40


def write_model(
    folder: Path,
    *,
    tied: bool = False,
    kind: str = "qwen2",
    seed: int = 0,
    biases: bool = False,
    **changes: object,
) -> Path:
    """A random model of a few thousand parameters with a character tokenizer, as a Hugging Face
    folder.

    With `biases`, vectors get random values as in a trained model: a bias of 0 has no norm to be
    compared with.
    """
    import torch
    import transformers

    write_tokenizer(folder)
    # Heads of 32: vLLM has no narrower ones on CPU.
    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        tie_word_embeddings=tied, initializer_range=0.15, bos_token_id=None, eos_token_id=1,
        pad_token_id=0,
    ) | changes  # fmt: skip
    torch.manual_seed(seed)
    made = transformers.CONFIG_MAPPING[kind]
    if kind == "mistral":
        sizes.setdefault("sliding_window", None)
    model = transformers.AutoModelForCausalLM.from_config(made(**sizes), dtype=torch.float32)
    if biases:
        for vector in (parameter for parameter in model.parameters() if parameter.dim() == 1):
            vector.data += 0.3 * torch.randn_like(vector)
    model.save_pretrained(folder)
    return folder


def write_classifier(folder: Path, *, seed: int = 0, **changes: object) -> Path:
    """A random reward model with the tokenizer of `write_model`, as transformers saves it."""
    import torch
    import transformers

    write_model(folder, seed=seed, **changes)  # pyright: ignore[reportArgumentType]
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1)
    torch.manual_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.score.weight.data.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def adapter_shapes(model: str, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """{name: whole shape} of the parameters of adapters of `lora` for the model in a folder."""
    from megarl.trainer.loading import empty_model
    from megarl.trainer.lora import A, B, chosen_layers

    whole, found = empty_model(ModelConfig(path=model)), {}
    for name in chosen_layers(whole, lora):
        rows, columns = whole.get_parameter(f"{name}.weight").shape
        found |= {name + A: (lora.rank, columns), name + B: (rows, lora.rank)}
    return found


def write_adapter(folder: Path, *args: Any, **more: Any) -> None:
    """Write an adapter into `folder`, which is made; see `adapter_bytes` for the other arguments."""
    from megarl.checkpoints.adapter_files import adapter_bytes

    folder.mkdir(parents=True, exist_ok=True)
    for name, content in adapter_bytes(*args, **more).items():
        (folder / name).write_bytes(content)


def random_adapter(folder: Path, model: str, lora: LoraConfig, size: float = 0.2) -> LoraConfig:
    """Write an adapter that changes the model in a folder; returns `lora` with it to start from.
    `size`: standard deviation of all numbers in it.
    """
    import torch

    from megarl.trainer.weights import base_digest

    draw = torch.Generator().manual_seed(1)
    tensors = {
        name: size * torch.randn(shape, generator=draw)
        for name, shape in adapter_shapes(model, lora).items()
    }
    write_adapter(folder, tensors, lora, base=model, base_digest=base_digest(model))
    return replace(lora, adapter=str(folder))


def sft_config(folder: Path | str = "run", **changes: Any) -> SftConfig:
    """A configuration of fine-tuning whose model and data are not there."""
    needed: dict[str, Any] = {"folder": str(folder), "model": ModelConfig(path="model")}
    needed["demonstrations"] = DemonstrationsConfig(source="rows.jsonl")
    return SftConfig(**needed | changes)


def write_tokenizer(folder: Path) -> None:
    """Characters: pad 0, eos 1, then digits and a few signs."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    signs = "0123456789+=,# abcdefghijklm"
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {
        sign: 3 + number for number, sign in enumerate(signs)
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(str(folder))


def groups(
    count: int, samples: int, *, seed: int = 0, first: int = 0, prompts: tuple[int, int] = (1, 7)
) -> list[Group]:
    """Groups of rollouts of uneven lengths with random tokens, log-probs and rewards; prompts of
    `prompts` tokens.
    """
    draw = random.Random(seed)

    def rollout(sample: int) -> Rollout:
        length = draw.randint(1, 24)
        # 0, the padding word, whose embedding never learns, too.
        tokens = [draw.randrange(VOCABULARY) for _ in range(length)]
        logprobs = [-draw.random() * 4 for _ in range(length)]
        arrays = TokenArrays(np.array(tokens, dtype=np.int32), np.array(logprobs, dtype=np.float32))
        segment = Segment("model", length, arrays, [(0, length)], "stop")
        verdict = Verdict(reward=draw.choice([-1.0, 0.25, 1.0]), correct=False)
        return Rollout(sample, sample, [segment], verdict, 0)

    def prompt(ordinal: int) -> Prompt:
        ids = [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(*prompts))]
        return Prompt(ordinal, "prompt", ids, "answer")

    return [
        Group(ordinal, prompt(ordinal), [rollout(sample) for sample in range(samples)])
        for ordinal in range(first, first + count)
    ]
