"""Checks of model and tokenizer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerBase

from megarl.data.tokenizer import check_tokenizer, load_tokenizer
from megarl.schema import require, shortened
from megarl.third_party import opening
from megarl.trainer.attention import refuse_unsupported
from megarl.trainer.config import ModelConfig
from megarl.trainer.model_config import load_model_config


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


def check_export(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, hf: transformers.PretrainedConfig
) -> None:
    """Raise `ValueError` unless config and tokenizer can be written, as each checkpoint does."""
    for name, what, setting in (
        (config.path, hf, "the config of model.path"),
        (config.tokenizer or config.path, tokenizer, "the tokenizer of model.path"),
    ):
        with (
            tempfile.TemporaryDirectory() as folder,
            opening(
                f"{setting} {name!r} can be read but not saved again",
                fix="correct its files, or choose another model: each checkpoint needs it",
            ),
        ):
            what.save_pretrained(folder)


def unused_weights(config: ModelConfig) -> str:
    """A warning, or "": the model's folder has weights that a run from random ones leaves out."""
    folder = Path(config.path)
    if not (config.from_scratch and folder.is_dir() and any(folder.glob("*.safetensors"))):
        return ""
    return (
        f"model.from_scratch is true: the weights in model.path {config.path!r} are not used, and"
        " the run begins with random ones; set model.from_scratch to false to use them"
    )


def stop_tokens(
    tokenizer: PreTrainedTokenizerBase,
    config: ModelConfig,
    hf: transformers.PretrainedConfig,
    turns: Iterable[int] = (),
) -> list[int]:
    """Token ids that end a response: those that end a turn in the data (`turns`, see
    `megarl.chat_template.end_of_turn`), and the end-of-sequence tokens of the tokenizer and of
    the model's generation config. Raises `ValueError` if the generation config cannot be read, or
    names a token that the model (configuration `hf`) has not.
    """
    ids = [*turns, tokenizer.eos_token_id, *_generation_ends(config)]
    size = hf.get_text_config().vocab_size
    for token in ids:
        known = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < size
        require(
            known,
            f"generation_config.json of model.path {config.path!r} ends a response at eos_token_id"
            f" {shortened(repr(token))}, but the model's tokens are 0 to {size - 1}; correct the"
            " file, or fetch the model again",
        )
    return list(dict.fromkeys(int(token) for token in ids))  # type: ignore[arg-type]


def _generation_ends(config: ModelConfig) -> list[object]:
    """What generation_config.json of a model gives as `eos_token_id`, as a list; empty without such
    a file.
    """
    file = Path(config.path) / "generation_config.json"
    if Path(config.path).is_dir() and not os.path.lexists(file):
        return []
    fix = "fetch the model again, or remove the file"
    with opening(f"generation_config.json of model.path {config.path!r}", fix=fix):
        try:
            more: object = transformers.GenerationConfig.from_pretrained(config.path).eos_token_id
        except OSError:
            if os.path.lexists(file):
                raise
            more = None  # a model of the hub without one
    return [] if more is None else more if isinstance(more, list) else [more]
