"""Attention of Hugging Face models through megarl's kernels, and the refusal of models whose
attention would be computed wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from megarl.kernels.packed_attention import automatic_attention
from megarl.trainer.logits import unknown_logits

ATTENTION = "megarl_packed"

STATE_SPACE = ("mamba_d_state", "ssm_state_size", "state_size")
"""Settings of config.json that only models with state-space layers have."""

Attend = Callable[..., torch.Tensor]
"""(q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], scale=float, window=int or None, cap=float or None,
sinks=[Hq] or None) -> [T, Hq, D]: causal attention of a micro-batch's T packed tokens. `window`: a
query attends to so many tokens at most, itself included. `cap`: a scaled score s becomes cap tanh(s
/ cap). `sinks`: each query head's score of one more key, whose value is 0."""


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attend: Attend | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """With transformers' signature: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq,
    D].
    """
    assert attend is not None and attention_mask is None and query.shape[0] == 1
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, scale=scale, window=sliding_window, cap=softcap, sinks=s_aux)[None], None


AttentionInterface.register(ATTENTION, _attention)


def refuse_unsupported(config: transformers.PretrainedConfig) -> None:
    """Raise `ValueError`, which names the features, if a model has some that the trainer does not
    support.
    """
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):  # Gemma 4: reading other settings raises
        raise ValueError(
            f"model type {config.model_type} uses layers of different sizes, which training does"
            " not support; choose another model"
        )
    features = ["state-space layers"] if any(hasattr(text, name) for name in STATE_SPACE) else []
    types = set(getattr(text, "layer_types", None) or [])
    if others := types - {"full_attention", "sliding_attention"}:
        features.append(f"layer types {sorted(others)}")
    if getattr(text, "use_bidirectional_attention", None):
        features.append("attention to later tokens")
    rope = getattr(text, "rope_parameters", None) or {}
    for rope_type in {
        str(table.get("rope_type")) for table in (rope, *rope.values()) if isinstance(table, dict)
    }:
        # These look at the longest document of a row, or of a rank's part of it: log-probs would
        # depend on the neighbours.
        if rope_type == "longrope" or rope_type.startswith("dynamic"):
            features.append(f"{rope_type} rotary embeddings")
    features += unknown_logits(text)
    if features:
        raise ValueError(
            f"model type {config.model_type} uses {', '.join(features)}, which training does not"
            " support; choose another model"
        )


def layer_windows(config: transformers.PretrainedConfig) -> list[int | None]:
    """Each layer's sliding window in tokens, or None."""
    text = config.get_text_config()
    window, layers = getattr(text, "sliding_window", None), text.num_hidden_layers
    layer_types = getattr(text, "layer_types", None)
    if layer_types is None:
        return [window] * layers
    return [window if layer_type == "sliding_attention" else None for layer_type in layer_types]


def prove_attention(model: PreTrainedModel) -> None:
    """Raise `ValueError` unless every layer of `model`, on the meta device, calls megarl's
    attention function with keys and values of one width.
    """
    calls: list[tuple[int, int]] = []
    """Width of keys and of values in each call."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: object
    ) -> torch.Tensor:
        calls.append((k.shape[-1], v.shape[-1]))
        return torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)

    family, layers = model.config.model_type, model.config.get_text_config().num_hidden_layers
    reason = ""
    try:
        with torch.device("meta"), torch.no_grad():
            # Embedded words: with ids some models look at their values, which there are none of
            # here.
            embedding: Any = model.get_input_embeddings()
            row = torch.zeros(1, 4, dtype=torch.int64)
            words = torch.zeros(1, 4, embedding.weight.shape[1])
            model.base_model(inputs_embeds=words, position_ids=row, use_cache=False, attend=attend)
    except Exception as error:  # whatever a model's own code raises
        message = str(error).splitlines()[0] if str(error) else "no message"
        reason = f" ({type(error).__name__}: {message})"
    if len(calls) != layers:
        raise ValueError(
            f"model type {family} takes the attention of {len(calls)} of its {layers} layers from"
            f" transformers' AttentionInterface{reason}; training needs it of all, choose another"
            " model"
        )
    for keys, values in calls:
        if keys != values:
            raise ValueError(
                f"model type {family} has values of width {values} and keys of width {keys} in its"
                " attention (multi-head latent attention), which training does not support;"
                " choose another model"
            )


def attention_line(precision: str, device: torch.device, width: int) -> str:
    """A line for the log: which kernel `training.attention: auto` stands for on `device`, and why.
    `precision`: dtype of the activations; `width`: of a head.
    """
    chosen, why = automatic_attention(getattr(torch, precision), device, width)
    return f"training.attention auto is {chosen}: {why}"
