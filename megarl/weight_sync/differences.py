"""What vLLM computes differently from transformers, by model family: functions of the settings in
config.json that name the difference, or return an empty string.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def no_difference(settings: Mapping[str, Any]) -> str:
    """An empty string: no known difference between vLLM and transformers."""
    return ""


def head_width_difference(settings: Mapping[str, Any]) -> str:
    """How vLLM's head width differs from config.json's `head_dim`, or an empty string."""
    if settings["head_dim"] * settings["num_attention_heads"] == settings["hidden_size"]:
        return ""
    return (
        f"head_dim is {settings['head_dim']}, but vLLM takes hidden_size / num_attention_heads,"
        " whatever head_dim says"
    )


def output_bias_difference(settings: Mapping[str, Any]) -> str:
    """How vLLM treats an attention output bias differently from transformers, or an empty string.
    vLLM's loader ignores surplus biases, so this is the only check.
    """
    return (
        "attention_bias is true, but vLLM has no bias on o_proj and drops the model's"
        if settings["attention_bias"]
        else ""
    )


def untied_difference(settings: Mapping[str, Any]) -> str:
    """How vLLM treats an output head of its own differently from transformers, or an empty
    string."""
    return "" if settings["tie_word_embeddings"] else "output head is not tied, but vLLM ties it"


def qwen2_difference(settings: Mapping[str, Any]) -> str:
    """How vLLM's Qwen2 differs from this model, or an empty string."""
    return head_width_difference(settings) or mixed_windows_difference(settings)


def qwen3_difference(settings: Mapping[str, Any]) -> str:
    """How vLLM's Qwen3 differs from this model, or an empty string."""
    return output_bias_difference(settings) or mixed_windows_difference(settings)


def mixed_windows_difference(settings: Mapping[str, Any]) -> str:
    """An empty string unless some layers, but not all, have a sliding window. vLLM's Qwen models
    then end at the start, or attend to everything in every layer.
    """
    kinds = settings.get("layer_types")
    if kinds is None:
        if not settings.get("use_sliding_window") or settings.get("sliding_window", 0) is None:
            return ""
        # As transformers does: the first `max_window_layers` layers have no window.
        without = settings.get("max_window_layers", 28)
        kinds = [layer >= without for layer in range(settings["num_hidden_layers"])]
    if len(set(kinds)) < 2:
        return ""
    return "layers have a sliding window in part, but vLLM has it in all layers or in none"
