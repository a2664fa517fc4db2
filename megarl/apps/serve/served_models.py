"""Checks, before anything heavy starts, of the models that `megarl serve-reward` serves: a reward
model, and a judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from megarl.apps.serve.judge import JudgePrompt, ServedJudge, VerdictReader
from megarl.checkpoints.adapter_files import SCORE
from megarl.data.chat_template import end_of_turn, ends_of_turns, turn_tokens
from megarl.data.control_tokens import ControlTokens
from megarl.data.tokenizer import check_tokenizer, load_tokenizer
from megarl.data.tokens import scored_tokens
from megarl.engines.plan import check_cache, check_engine_model
from megarl.parallel.mesh import local_device
from megarl.settings.limits import MOST_TOKENS
from megarl.settings.rollout import EngineConfig
from megarl.settings.schema import require, shortened
from megarl.settings.serve import JudgeConfig, ServedModelConfig
from megarl.settings.training import ModelConfig
from megarl.system.third_party import opening
from megarl.trainer.model_config import load_model_config
from megarl.trainer.plan import stop_tokens
from megarl.trainer.weights import is_downloaded, shape_of
from megarl.types import Prompt

HEADS = (SCORE, "classifier.weight", "classifier.out_proj.weight")
"""Names of the weight of the last layer in Hugging Face's sequence classifiers."""


@dataclass(frozen=True)
class ServedRewardModel:
    """What a reward server needs to feed its reward model: settings, tokenizer and limits, after
    their checks. `ids` makes the token ids that the model scores. It holds no weights, which the
    server loads later.
    """

    config: ServedModelConfig
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    """Most tokens of a prompt with its response."""
    end: int
    """Id of the token that ends a response."""

    def ids(self, prompt: Prompt, response: str) -> list[int]:
        """The token ids of prompt and response that the model scores, with the token that ends a
        response.
        """
        template = self.config.template
        text = ControlTokens.of(self.tokenizer).as_text(response, turn_tokens(self.tokenizer))
        (ids,) = scored_tokens(self.tokenizer, [prompt.text], [text], template, self.end)
        return ids


def check_served_reward_model(config: ServedModelConfig) -> ServedRewardModel:
    """Check the reward model of the recipe's section `reward_model`, without loading its weights.
    Returns its settings, tokenizer and limit of tokens. Raises `ValueError` unless vLLM can run it.
    """
    with _section("reward_model"):
        tokenizer, hf = _of_folder(config.model)
        limit = _longest(hf, config.max_tokens, "reward_model")
        _check_classifier(config.model.path, hf)
        _check_engine(config.engine, hf, limit, "reward_model")
        end = end_of_turn(tokenizer, config.template, is_last=True)
        return ServedRewardModel(config, tokenizer, limit, end)


def check_judge(config: JudgeConfig) -> ServedJudge:
    """Check the judge, a language model that writes verdicts on responses, of the recipe's section
    `judge`, without loading its weights. Returns its tokenizer, prompt template, reader of verdicts
    and limit of tokens. Raises `ValueError` unless the model, the template and the pattern of the
    verdict can be used.
    """
    with _section("judge"):
        reader = VerdictReader(config.verdict, config.choices, config.lowest, config.highest)
        tokenizer, hf = _of_folder(config.model)
        check_engine_model(hf)
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
            f"judge.max_tokens is {limit}, but the template has {asked} tokens without its fields"
            f" and judge.max_new_tokens is {config.max_new_tokens}; raise judge.max_tokens, as far"
            " as the model has positions, or lower judge.max_new_tokens",
        )
        _check_engine(config.engine, hf, limit, "judge")
        template_name = "rendered" if config.chat else "none"
        ends = ends_of_turns(tokenizer, template_name, config.template_variables)
        stops = stop_tokens(tokenizer, config.model, hf, ends)
        return ServedJudge(config, limit, prompt, reader, stops)


@contextmanager
def _section(section: str) -> Iterator[None]:
    """A context in whose errors a model's settings get the name of their section."""
    try:
        yield
    except ValueError as error:
        message = str(error).replace(f"{section}.model.path", "model.path")
        raise ValueError(message.replace("model.path", f"{section}.model.path")) from None


def _check_classifier(path: str, hf: transformers.PretrainedConfig) -> None:
    """Raise `ValueError` unless the model is a classifier with one label and its weights."""
    names, labels = hf.architectures or [], hf.num_labels or 0
    require(
        any(name.endswith("ForSequenceClassification") for name in names),
        f"config.json of model.path has architectures {shortened(str(names))}, but a reward model"
        " is a ...ForSequenceClassification; set model.path to one, such as task: reward_model"
        " trains",
    )
    if Path(path).is_dir() or is_downloaded(path):
        labels = next(filter(None, (shape_of(path, head) for head in HEADS)), (0,))[0]
    require(
        labels > 0,
        f"model.path {path!r} has none of the tensors {', '.join(HEADS)}, so that its score would"
        " be random; set another model",
    )
    require(
        labels == 1,
        f"model.path {path!r} is a classifier with {labels} labels, but a reward model has one, its"
        " score; set another model",
    )


def _of_folder(
    model: ModelConfig,
) -> tuple[PreTrainedTokenizerBase, transformers.PretrainedConfig]:
    """(tokenizer, configuration) of a model that vLLM runs."""
    hf, folder = load_model_config(model), Path(model.path)
    require(
        not folder.is_dir() or any(folder.glob("*.safetensors")),
        f"model.path {model.path!r} has no .safetensors weights; set it to a trained model",
    )
    name = model.tokenizer or model.path
    tokenizer = load_tokenizer(name, trust_remote_code=model.trust_remote_code)
    check_tokenizer(tokenizer, hf.get_text_config().vocab_size, source=name)
    return tokenizer, hf


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
