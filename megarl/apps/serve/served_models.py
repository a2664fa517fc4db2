"""Checks of the models that `megarl serve-reward` serves: a reward model, under torch or vLLM, and
a judge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from megarl.apps.serve.judge_prompt import JudgePrompt
from megarl.apps.serve.judge_verdict import VerdictReader
from megarl.chat_template import end_of_turn
from megarl.checkpoints.adapter_files import SCORE
from megarl.checks.engine_checks import check_cache, check_engine_model
from megarl.checks.model_checks import check_model, stop_tokens
from megarl.data.tokenizer import check_tokenizer, load_tokenizer
from megarl.limits import MOST_TOKENS
from megarl.parallel.mesh import local_device
from megarl.rollout.config import EngineConfig
from megarl.schema import require, shortened
from megarl.serve_config import JudgeConfig, ServedModelConfig
from megarl.third_party import opening
from megarl.trainer.attention import prove_attention
from megarl.trainer.config import ModelConfig
from megarl.trainer.loading import check_weights, empty_model
from megarl.trainer.model_config import load_model_config
from megarl.trainer.weights import is_downloaded, shape_of

HEADS = (SCORE, "classifier.weight", "classifier.out_proj.weight")
"""Names of the last layer of Hugging Face's sequence classifiers."""

T = TypeVar("T")


@dataclass(frozen=True)
class ServedModel:
    """A model whose checks have passed."""

    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    """Most tokens of a sequence."""
    on_cpu: bool
    """Whether an engine runs on the CPU."""


@dataclass(frozen=True)
class ServedJudge(ServedModel):
    """A judge whose checks have passed."""

    prompt: JudgePrompt
    reader: VerdictReader
    stop_token_ids: list[int]
    """Tokens that end what the judge writes."""


def check_served_reward_model(config: ServedModelConfig) -> ServedModel:
    """Raise `ValueError` unless the reward model can be run by the backend of the recipe."""
    checked = {"torch": _check_torch, "vllm": _check_classifier}[config.backend]
    return _in_section("reward_model", lambda: checked(config))


def check_judge(config: JudgeConfig) -> ServedJudge:
    """Raise `ValueError` unless the judge's model, template and verdict can be used."""
    reader = VerdictReader(config.verdict, config.choices, config.lowest, config.highest)
    return _in_section("judge", lambda: _check_judge(config, reader))


def _in_section(section: str, check: Callable[[], T]) -> T:
    """The result of `check`, in whose errors a model's settings get the name of their section."""
    try:
        return check()
    except ValueError as error:
        said = str(error).replace(f"{section}.model.path", "model.path")
        raise ValueError(said.replace("model.path", f"{section}.model.path")) from None


def _check_torch(config: ServedModelConfig) -> ServedModel:
    tokenizer, hf = check_model(config.model)
    check_weights(config.model, "scalar", needs_score=True)
    prove_attention(empty_model(config.model))
    limit = _longest(hf, config.max_tokens, "reward_model")
    return ServedModel(tokenizer, limit, local_device().type == "cpu")


def _check_classifier(config: ServedModelConfig) -> ServedModel:
    model, hf = config.model, load_model_config(config.model)
    names = hf.architectures or []
    require(
        any(name.endswith("ForSequenceClassification") for name in names),
        f"config.json of model.path has architectures {shortened(str(names))}, but a reward model"
        " is a ...ForSequenceClassification; set model.path to one, such as megarl reward-model"
        " trains",
    )
    _check_files(model)
    labels = hf.num_labels
    if Path(model.path).is_dir() or is_downloaded(model.path):
        shapes = [shape_of(model.path, head) for head in HEADS]
        found = next((shape for shape in shapes if shape is not None), None)
        require(
            found is not None,
            f"model.path {model.path!r} has none of the tensors {', '.join(HEADS)}, so that its"
            " score would be random; set another model",
        )
        labels = (found or (labels,))[0]
    require(
        labels == 1,
        f"model.path {model.path!r} is a classifier with {labels} labels, but a reward model has"
        " one, its score; set another model",
    )
    tokenizer = _tokenizer(model, hf)
    limit = _longest(hf, config.max_tokens, "reward_model")
    _check_engine(config.engine, hf, limit, "reward_model")
    return ServedModel(tokenizer, limit, local_device().type == "cpu")


def _check_judge(config: JudgeConfig, reader: VerdictReader) -> ServedJudge:
    hf = load_model_config(config.model)
    check_engine_model(hf)
    _check_files(config.model)
    tokenizer = _tokenizer(config.model, hf)
    template, setting = config.template, "judge.template"
    if config.template_file:
        setting = f"judge.template_file {config.template_file!r}"
        with opening(f"{setting} cannot be read", fix="set it to a text file (UTF-8)"):
            template = Path(config.template_file).read_text(encoding="utf-8")
    prompt = JudgePrompt(
        tokenizer,
        template,
        setting=setting,
        chat=config.chat,
        system=config.system,
        variables=config.template_variables,
    )
    limit = _longest(hf, config.max_tokens, "judge")
    asked = len(prompt.ids(dict.fromkeys(prompt.fields, "")))
    require(
        asked + config.max_new_tokens < limit,
        f"judge.max_tokens is {limit}, but the template has {asked} tokens without its fields and"
        f" judge.max_new_tokens is {config.max_new_tokens}; raise judge.max_tokens, as far as the"
        " model has positions, or lower judge.max_new_tokens",
    )
    _check_engine(config.engine, hf, limit, "judge")
    template_name = "rendered" if config.chat else "none"
    end = end_of_turn(tokenizer, template_name, config.template_variables)
    stops = stop_tokens(tokenizer, config.model, hf, [end])
    on_cpu = local_device().type == "cpu"
    return ServedJudge(tokenizer, limit, on_cpu, prompt, reader, stops)


def _tokenizer(model: ModelConfig, hf: transformers.PretrainedConfig) -> PreTrainedTokenizerBase:
    name = model.tokenizer or model.path
    tokenizer = load_tokenizer(name, trust_remote_code=model.trust_remote_code)
    check_tokenizer(tokenizer, hf.get_text_config().vocab_size, source=name)
    return tokenizer


def _check_files(model: ModelConfig) -> None:
    folder = Path(model.path)
    require(
        not folder.is_dir() or any(folder.glob("*.safetensors")),
        f"model.path {model.path!r} has no .safetensors weights; set it to a trained model",
    )


def _longest(hf: transformers.PretrainedConfig, max_tokens: int, section: str) -> int:
    """The recipe's `max_tokens`, or the number of the model's positions if that is 0."""
    positions: int | None = getattr(hf.get_text_config(), "max_position_embeddings", None)
    require(
        positions is None or max_tokens <= positions,
        f"{section}.max_tokens is {max_tokens}, but the model's max_position_embeddings is"
        f" {positions}; set it to at most that, or to 0",
    )
    return max_tokens or positions or MOST_TOKENS


def _check_engine(
    engine: EngineConfig, hf: transformers.PretrainedConfig, longest: int, section: str
) -> None:
    """Raise `ValueError` unless this machine and the model allow for the engine."""
    heads, name = hf.get_text_config().num_attention_heads, f"{section}.engine"
    require(
        heads % engine.tensor == 0,
        f"{name}.tensor is {engine.tensor}, which does not divide the model's {heads} attention"
        " heads; set it to a divisor",
    )
    if local_device().type == "cpu":
        check_cache(engine, hf, longest, section=name, shorter=f"{section}.max_tokens")
        return
    gpus = torch.cuda.device_count()
    require(
        engine.tensor <= gpus,
        f"{name}.tensor is {engine.tensor}, but this process sees {gpus} GPU(s); lower it",
    )
