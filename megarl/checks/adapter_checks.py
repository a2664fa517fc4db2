"""Checks of `training.lora` before anything heavy starts."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.checkpoints.adapter_files import CONFIG, SCORE, read_adapter, written_for
from megarl.config import RunConfig
from megarl.rollout.engine import VLLM_RANKS
from megarl.schema import require
from megarl.trainer.config import LoraConfig, ModelConfig
from megarl.trainer.heads import SCORING, HeadName
from megarl.trainer.loading import empty_model
from megarl.trainer.lora import A, B, chosen_layers
from megarl.trainer.weights import base_digest


def check_adapters(lora: LoraConfig, model: ModelConfig, head: HeadName = "logprobs") -> str:
    """Returns what the user should know about the adapter that the run starts from; empty if
    nothing. `head`: that of the trained model. Raises `ValueError` if the adapters do not fit the
    model: a target that the model has not, or files of an adapter of another rank, kind or base
    model.
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
    """What the user should know about the adapter that a run starts from; empty if nothing."""
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
    """As `check_adapters`; also raises `ValueError` if engines cannot be sent adapters alone, as
    the recipe asks.
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
