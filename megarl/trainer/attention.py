"""Attention of Hugging Face models through megarl's kernels, by `AttentionInterface.register`, and
the refusal of models whose attention would be computed wrongly.
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

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Settings of config.json that say how many experts a layer has; a model with one of them above 0
is refused."""
STATE_SPACE = ("mamba_d_state", "ssm_state_size", "state_size")
"""Settings of config.json that only models with state-space layers have, such as Mamba."""

Attend = Callable[..., torch.Tensor]
"""(q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], scale=float, window=int or None, cap=float or None,
sinks=[Hq] or None) -> [T, Hq, D]: a function that computes the causal attention of every layer for
one micro-batch of T packed tokens. `scale`: factor of the scores. `window`: a query attends to so
many tokens at most, itself included. `cap`: a scaled score s becomes cap tanh(s / cap). `sinks`:
for each query head the score of one more key, whose value is 0."""


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
    """Attention with transformers' signature: query [1, Hq, T, D], key and value [1, Hkv, T, D] ->
    [1, T, Hq, D]. `s_aux`: attention sinks [Hq].
    """
    assert attend is not None and attention_mask is None and query.shape[0] == 1
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, scale=scale, window=sliding_window, cap=softcap, sinks=s_aux)[None], None


AttentionInterface.register(ATTENTION, _attention)


def refuse_unsupported(config: transformers.PretrainedConfig) -> None:
    """Raise `ValueError`, which names the features, if a model uses what megarl's trainer does not
    support: layer types other than full and sliding attention, attention to later tokens, longrope
    or dynamic rotary embeddings, unknown transforms of the logits, a mixture of experts,
    state-space layers, or sizes that differ from layer to layer. `config`: the model's transformers
    configuration.
    """
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):  # Gemma 4: reading other settings raises
        raise ValueError(
            f"model type {config.model_type} uses layers of different sizes, which training does"
            " not support; choose another model"
        )
    found = ["state-space layers"] if any(hasattr(text, name) for name in STATE_SPACE) else []
    types = set(getattr(text, "layer_types", None) or [])
    if others := types - {"full_attention", "sliding_attention"}:
        found.append(f"layer types {sorted(others)}")
    if getattr(text, "use_bidirectional_attention", None):
        found.append("attention to later tokens")
    rope = getattr(text, "rope_parameters", None) or {}
    for kind in {
        str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)
    }:
        # These look at the longest document of a row, or of a rank's part of it: log-probs would
        # depend on the neighbours.
        if kind == "longrope" or kind.startswith("dynamic"):
            found.append(f"{kind} rotary embeddings")
    found += unknown_logits(text)
    if any(getattr(text, name, 0) for name in EXPERTS):
        found.append("mixture of experts")
    if found:
        raise ValueError(
            f"model type {config.model_type} uses {', '.join(found)}, which training does not"
            " support; choose another model"
        )


def layer_windows(config: transformers.PretrainedConfig) -> list[int | None]:
    """The width of the sliding attention window of each layer of a model, in tokens, in the order
    of the layers; None for a layer that attends to all earlier tokens.
    """
    text = config.get_text_config()
    window, layers = getattr(text, "sliding_window", None), text.num_hidden_layers
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return [window] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def prove_attention(model: PreTrainedModel) -> None:
    """Raise `ValueError` unless every layer of `model` calls megarl's attention function, with keys
    and values of one width. The check is a forward pass of four tokens without weights: `model` is
    on the meta device, built with `attn_implementation="megarl_packed"`.
    """
    calls: list[tuple[int, int]] = []
    """Width of keys and of values in each call."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: object
    ) -> torch.Tensor:
        calls.append((k.shape[-1], v.shape[-1]))
        return torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)

    kind, layers = model.config.model_type, model.config.get_text_config().num_hidden_layers
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
        said = str(error).splitlines()[0] if str(error) else "no message"
        reason = f" ({type(error).__name__}: {said})"
    if len(calls) != layers:
        raise ValueError(
            f"model type {kind} takes the attention of {len(calls)} of its {layers} layers from"
            f" transformers' AttentionInterface{reason}; training needs it of all, choose another"
            " model"
        )
    for keys, values in calls:
        if keys != values:
            raise ValueError(
                f"model type {kind} has values of width {values} and keys of width {keys} in its"
                " attention (multi-head latent attention), which training does not support;"
                " choose another model"
            )


def attention_line(precision: str, device: torch.device) -> str:
    """One line of text for the log, without a newline: which attention kernel `training.attention:
    auto` stands for on `device`, and why. `precision`: the dtype of the activations by name,
    "float32", "bfloat16" or "float16".
    """
    chosen, why = automatic_attention(getattr(torch, precision), device)
    return f"training.attention auto is {chosen}: {why}"
