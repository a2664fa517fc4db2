"""Checks of model, tokenizer and adapters."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerBase

from megarl.checkpoints.adapter_files import CONFIG, SCORE, read_adapter, written_for
from megarl.data.tokenizer import check_tokenizer, load_tokenizer
from megarl.engines.vllm_engine import VLLM_RANKS
from megarl.settings.config import RunConfig
from megarl.settings.objectives import AlgorithmConfig
from megarl.settings.schema import require, shortened
from megarl.settings.training import LoraConfig, ModelConfig
from megarl.system.third_party import opening
from megarl.trainer.attention import refuse_unsupported
from megarl.trainer.experts import num_experts
from megarl.trainer.heads import SCORING, HeadName
from megarl.trainer.loading import empty_model
from megarl.trainer.lora import A, B, chosen_layers
from megarl.trainer.model_config import load_model_config
from megarl.trainer.weights import base_digest


def check_router_replay(algorithm: AlgorithmConfig, hf: transformers.PretrainedConfig) -> None:
    """Raise `ValueError` if the routers of a model without experts are to be replayed."""
    require(
        algorithm.router_replay == "off" or num_experts(hf) > 0,
        f"algorithm.router_replay is {algorithm.router_replay!r}, but model type {hf.model_type}"
        " has no experts; leave it out",
    )


def check_model(
    config: ModelConfig,
) -> tuple[PreTrainedTokenizerBase, transformers.PretrainedConfig]:
    """(tokenizer, configuration) of the model. Raises `ValueError`, with the setting to change, if
    one cannot be read, they do not match, training does not support the model, or its folder has no
    weights.
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
    """Raise `ValueError` unless configuration and tokenizer can be saved, as each checkpoint
    does.
    """
    fix = "correct its files, or choose another model: each checkpoint needs it"
    for name, what, setting in (
        (config.path, hf, "the config of model.path"),
        (config.tokenizer or config.path, tokenizer, "the tokenizer of model.path"),
    ):
        problem = f"{setting} {name!r} can be read but not saved again"
        with tempfile.TemporaryDirectory() as folder, opening(problem, fix=fix):
            what.save_pretrained(folder)


def unused_weights(config: ModelConfig) -> str:
    """A warning if `from_scratch` is set but the model's folder has weights; else ""."""
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
    """Ids at which a response ends: `turns` (tokens that end a turn in the data), and the
    end-of-sequence tokens of tokenizer and generation_config.json. Raises `ValueError` if that file
    cannot be read, or an id is not in the vocabulary.
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
    """The `eos_token_id` of generation_config.json, as a list."""
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


def check_adapters(lora: LoraConfig, model: ModelConfig, head: HeadName = "logprobs") -> str:
    """Raise `ValueError` if the LoRA settings do not fit the model: an unknown target, or an
    adapter to start from of another rank, kind or base model. Returns a warning about that adapter,
    or "".
    """
    if not lora.is_on:
        return ""
    whole = empty_model(model)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in chosen_layers(whole, lora):
        num_outputs, num_inputs = whole.get_parameter(f"{name}.weight").shape
        shapes[name + A], shapes[name + B] = (lora.rank, num_inputs), (num_outputs, lora.rank)
    if head in SCORING:
        shapes[SCORE] = (1, whole.config.get_text_config().hidden_size)
    require(
        not model.from_scratch,
        "training.lora.rank is above 0 and model.from_scratch true: adapters of random weights"
        " learn little; set model.from_scratch to false",
    )
    if lora.adapter:
        read_adapter(lora, shapes)
        written = written_for(Path(lora.adapter))
        require(
            not written or written == base_digest(model.path),
            f"training.lora.adapter {lora.adapter!r} was trained on another base model than"
            f" model.path {model.path!r}, whose weights differ; set model.path to its base model",
        )
    return adapter_warning(lora, model)


def adapter_warning(lora: LoraConfig, model: ModelConfig) -> str:
    """A warning if the adapter to start from names another base model, else "". An adapter of
    megarl has a digest of its base model, which another check compares.
    """
    if not lora.adapter or written_for(Path(lora.adapter)):
        return ""
    base = json.loads((Path(lora.adapter) / CONFIG).read_text()).get("base_model_name_or_path")
    if not base or Path(base).name == Path(model.path).name:
        return ""
    return (
        f"training.lora.adapter {lora.adapter!r} was made for {base!r}, and model.path is"
        f" {model.path!r}: an adapter means something else on other weights"
    )


def check_published_adapters(config: RunConfig) -> str:
    """Raise `ValueError` if the LoRA settings do not fit the model, or `training.lora.publish` the
    engines. Returns a warning as `check_adapters`.
    """
    lora, rollout = config.training.lora, config.rollout
    warning = check_adapters(lora, config.model)
    if not lora.is_on or lora.publish == "merged":
        return warning
    require(
        lora.rank <= VLLM_RANKS[-1],
        f"training.lora.rank is {lora.rank} and training.lora.publish 'adapter', but vLLM takes"
        f" adapters up to rank {VLLM_RANKS[-1]}; set training.lora.publish to 'merged'",
    )
    require(
        rollout.placement != "colocated",
        "training.lora.publish is 'adapter' and rollout.placement 'colocated', where engines give"
        " up their weights in each step; set training.lora.publish to 'merged'",
    )
    return warning
