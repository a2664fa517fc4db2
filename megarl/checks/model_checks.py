"""Checks of model and tokenizer."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerBase

from megarl.data.tokenizer import check_tokenizer, load_tokenizer
from megarl.schema import require
from megarl.trainer.attention import refuse_unsupported
from megarl.trainer.config import ModelConfig
from megarl.trainer.loading import load_model_config


def check_model(
    config: ModelConfig,
) -> tuple[PreTrainedTokenizerBase, transformers.PretrainedConfig]:
    """Load (tokenizer, model configuration) of a recipe. Raises `ValueError` if they do not
    match.
    """
    hf = load_model_config(config)
    refuse_unsupported(hf)
    if not config.from_scratch and Path(config.path).is_dir():
        require(
            any(Path(config.path).glob("*.safetensors")),
            f"model.path {config.path!r} has no .safetensors weights; set model.from_scratch to"
            " true for random weights, or point model.path at a trained model",
        )
    name = config.tokenizer or config.path
    tokenizer = load_tokenizer(name, trust_remote_code=config.trust_remote_code)
    check_tokenizer(tokenizer, hf.get_text_config().vocab_size, source=name)
    return tokenizer, hf


def stop_tokens(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> list[int]:
    """Token ids that end a response: those of the tokenizer and of the model's generation
    config.
    """
    found = [tokenizer.eos_token_id]
    try:
        more = transformers.GenerationConfig.from_pretrained(config.path).eos_token_id
    except OSError:
        more = None
    for token in more if isinstance(more, list) else [more]:
        if token is not None and token not in found:
            found.append(token)
    return [int(token) for token in found]  # type: ignore[arg-type]
