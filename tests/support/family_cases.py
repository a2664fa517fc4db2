"""Small configurations of every model type with a parameter table, and what may vary in each."""

from __future__ import annotations

from typing import Any

import transformers

SMALL: dict[str, Any] = dict(
    vocab_size=70, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2)
TIED: dict[str, Any] = {"tie_word_embeddings": True}
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2, tied, 200 words, one key head": ("qwen2",
     TIED | {"vocab_size": 200, "num_key_value_heads": 1}),
    "qwen3, wide heads": ("qwen3", {"head_dim": 32}),
    "qwen3, tied, four key heads": ("qwen3", TIED | {"head_dim": 16, "num_key_value_heads": 4}),
    "llama, key heads unsaid, 64 words": ("llama", {"num_key_value_heads": None, "vocab_size": 64}),
    "llama, biases, tied": ("llama", TIED | BIASES),
    "llama, biases of attention, wide heads": ("llama",
     {"attention_bias": True, "head_dim": 32, "num_key_value_heads": 1}),
    "mistral, wide heads": ("mistral", {"head_dim": 32}),
    "mistral, tied, eight key heads": ("mistral", TIED | {"num_key_value_heads": 8}),
    "gemma3_text, windows": ("gemma3_text",
     {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma3_text, biases, 200 words": ("gemma3_text",
     {"head_dim": 8, "attention_bias": True, "vocab_size": 200}),
    "gemma2": ("gemma2", {"head_dim": 16}),
    "gemma2, biases, 200 words": ("gemma2",
     {"head_dim": 8, "attention_bias": True, "vocab_size": 200}),
    "granite": ("granite", {}),
    "granite, biases, tied, four key heads": ("granite",
     TIED | BIASES | {"num_key_value_heads": 4}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "phi3, 200 words, four key heads": ("phi3",
     {"pad_token_id": 0, "vocab_size": 200, "num_key_value_heads": 4}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_moe, a dense layer, wide heads, tied": ("qwen3_moe",
     TIED | EXPERTS | {"mlp_only_layers": [1], "head_dim": 32}),
    "qwen3_moe, every second layer": ("qwen3_moe",
     EXPERTS | {"decoder_sparse_step": 2, "num_key_value_heads": 4, "num_hidden_layers": 4}),
}  # fmt: skip
"""{name: (model type, changes of SMALL)}"""


def small(case: str) -> transformers.PreTrainedConfig:
    """The configuration of a case."""
    kind, changes = CASES[case]
    return transformers.CONFIG_MAPPING[kind](**SMALL | changes)
