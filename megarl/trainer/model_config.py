"""A model's config.json, refused where its numbers are no model's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from megarl.data.hub import FIX, hub_state, read_model_folder, why_absent
from megarl.settings.config import RunConfig
from megarl.settings.limits import MOST_TOKENS
from megarl.settings.rl import longest_request
from megarl.settings.schema import require, shortened
from megarl.settings.training import ModelConfig
from megarl.system.third_party import opening
from megarl.trainer.attention import refuse_unsupported

COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""Settings that every model has, at least 1."""
OTHER_COUNTS = (
    *("num_key_value_heads", "intermediate_size", "head_dim", "max_position_embeddings"),
    "sliding_window",
)
"""Settings that are at least 1 where a model has them."""
LARGEST_COUNT = 2**31 - 1
POSITIVE = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "factor"),
    "attn_logit_softcapping",
)
"""Settings that are above 0 where a model has them."""


def positions(hf: transformers.PretrainedConfig) -> int | None:
    """Tokens that a model can read, if it has a limit."""
    return getattr(hf.get_text_config(), "max_position_embeddings", None)


def longest_sequence(config: RunConfig, hf: transformers.PretrainedConfig) -> int:
    """Most tokens of a sequence in an engine: prompt and response of the recipe, within the model's
    limit.
    """
    return min(longest_request(config), positions(hf) or MOST_TOKENS)


def load_model_config(
    config: ModelConfig, *, setting: str = "model"
) -> transformers.PretrainedConfig:
    """Read config.json of the folder or hub name `config.path`. Raises `ValueError`, which names
    the setting to change, if it cannot be read or a number in it cannot be right. `setting`: the
    recipe's section, for messages.
    """
    model, online, fix = f"{setting}.path {config.path!r}", True, FIX
    if not read_model_folder(config.path, f"{setting}.path"):
        online = hub_state() == "online"
        fix = f"'{config.path}' is not on this machine {why_absent(config.path)}"
    with opening(f"{model} cannot be loaded", fix=fix):
        hf = AutoConfig.from_pretrained(
            config.path, trust_remote_code=config.trust_remote_code, local_files_only=not online
        )
        hf.get_text_config()
    is_uneven = getattr(hf.get_text_config(), "is_heterogeneous", False)
    problem = "" if is_uneven else config_problem(hf)
    if is_uneven or problem:  # Gemma 4, Qwen2-MoE, Bamba: no other file would help
        refuse_unsupported(hf)
        require(
            problem != _problem_of_type(type(hf)),
            f"model type {hf.model_type} of {model} is not supported ({problem}); choose another"
            " model",
        )
    require(not problem, f"config.json of {model}: {problem}; {FIX}")
    return hf


def _problem_of_type(kind: type[transformers.PretrainedConfig]) -> str:
    """The `config_problem` of what a configuration class is without a file."""
    with suppress(Exception):  # some classes have no default, or refuse their own
        return config_problem(kind())
    return ""


def config_problem(hf: transformers.PretrainedConfig) -> str:
    """What is wrong with a model's numbers, such as "hidden_size is 0, not a number from 1 to
    2147483647", or "".
    """
    text = hf.get_text_config()
    for name in (*COUNTS, *OTHER_COUNTS):
        value = getattr(text, name, None)
        if value is None and name not in COUNTS:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            return f"{name} is {shortened(repr(value))}, not a whole number"
        if not 1 <= value <= LARGEST_COUNT:
            return f"{name} is {value}, not a number from 1 to {LARGEST_COUNT}"
    for name, value in _numbers(hf.to_dict()):
        if isinstance(value, float) and not math.isfinite(value):
            return f"{name} is {value}"
        if name.rpartition(".")[2] in POSITIVE and value <= 0:
            return f"{name} is {value:g}, not above 0"
    dtype = getattr(hf, "dtype", None)
    if dtype is not None and not isinstance(dtype, str | torch.dtype):
        return f"dtype is {shortened(repr(dtype))}, not the name of one"
    names = hf.architectures
    if names is not None and not (
        isinstance(names, list) and all(isinstance(n, str) for n in names)
    ):
        return f"architectures is {shortened(repr(names))}, not a list of class names"
    heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    if kv_heads is not None and heads % kv_heads:
        return f"num_key_value_heads is {kv_heads}, which does not divide {heads} attention heads"
    if getattr(text, "head_dim", None) is None and text.hidden_size % heads:
        return f"num_attention_heads is {heads}, which does not divide hidden_size"
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    if width % 2 and getattr(text, "rope_parameters", None):
        return f"its attention heads are {width} wide, an odd number that rotary embeddings lack"
    return ""


def _numbers(tree: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """(dotted name, value) of every number in nested dicts and lists."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _numbers(value, f"{place}.{key}" if place else str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _numbers(value, place)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield place, tree
