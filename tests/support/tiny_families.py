"""Models of two layers in the code of transformers, by model type."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

SMALL: dict[str, Any] = dict(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
)  # fmt: skip


def small_model(kind: str, seed: int = 0) -> nn.Module:
    """A model of this type, in float32, with random weights, also of its norms."""
    changes = {"head_dim": 8} if kind in ("qwen3", "gemma2", "gemma3_text") else {}
    config = transformers.CONFIG_MAPPING[kind](**SMALL | changes)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # norms begin as ones or zeros
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model
