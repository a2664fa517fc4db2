"""Loading a Hugging Face model: config.json, an empty model of names and shapes, weights."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megarl.trainer.attention import ATTENTION, refuse_unsupported
from megarl.trainer.config import ModelConfig


def load_model_config(config: ModelConfig) -> transformers.PretrainedConfig:
    """The model's config.json, or a `ValueError` that says what to set."""
    try:
        return AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        hint = (
            ""
            if Path(config.path).exists()
            else " (no such folder here; as a hub name it needs a network)"
        )
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model.path {config.path!r} cannot be loaded{hint}: {first}; set it to a model folder"
            " or hub name"
        ) from None


def without_dropout(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """The same model, deterministic: with dropout no log-prob of the trainer would be that of the
    engine.
    """
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def empty_model(config: ModelConfig) -> PreTrainedModel:
    """The model without weights, on the meta device: names and shapes only, in a moment."""
    hf = load_model_config(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                hf, attn_implementation=ATTENTION, trust_remote_code=config.trust_remote_code
            )
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"model type {hf.model_type} cannot be built: {str(error).splitlines()[0]}; choose"
            " another model"
        ) from None


def load_model(config: ModelConfig, *, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The causal language model on the CPU in `dtype`; with `from_scratch`, random weights that
    only `seed` decides.
    """
    hf = without_dropout(load_model_config(config))
    refuse_unsupported(hf)
    if config.from_scratch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                hf,
                dtype=torch.float32,
                attn_implementation=ATTENTION,
                trust_remote_code=config.trust_remote_code,
            )
        for parameter in (
            model.parameters()
        ):  # not the buffers: rounded rotary frequencies would be other positions
            parameter.data = parameter.data.to(dtype)
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                config.path,
                config=hf,
                dtype=dtype,
                attn_implementation=ATTENTION,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=True,
            )
        except OSError as error:
            first = str(error).strip().splitlines()[0]
            raise ValueError(
                f"model.path {config.path!r} has no weights that can be loaded: {first}; set"
                " model.from_scratch to true for random weights, or point model.path at a trained"
                " model"
            ) from None
    model.name_or_path = config.path
    return model
