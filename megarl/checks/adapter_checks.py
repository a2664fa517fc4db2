"""Checks of `training.lora` before anything heavy starts."""

from __future__ import annotations

from megarl.checkpoints.adapter_files import read_adapter
from megarl.config import RunConfig
from megarl.rollout.engine import VLLM_RANKS
from megarl.schema import require
from megarl.trainer.config import LoraConfig, ModelConfig
from megarl.trainer.loading import empty_model
from megarl.trainer.lora import A, B, chosen_layers


def check_adapters(lora: LoraConfig, model: ModelConfig) -> None:
    """Raise `ValueError` if the adapters do not fit the model: a target that the model has not, or
    files of an adapter of another rank, kind or base model.
    """
    if not lora.is_on:
        return
    whole = empty_model(model)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in chosen_layers(whole, lora):
        num_outputs, num_inputs = whole.get_parameter(f"{name}.weight").shape
        shapes[name + A], shapes[name + B] = (lora.rank, num_inputs), (num_outputs, lora.rank)
    require(
        not model.from_scratch,
        "training.lora.rank is above 0 and model.from_scratch true: adapters of random weights"
        " learn little; set model.from_scratch to false",
    )
    if lora.adapter:
        read_adapter(lora, shapes)


def check_published_adapters(config: RunConfig) -> None:
    """Raise `ValueError` if the adapters do not fit the model, or if engines cannot be sent
    adapters alone, as the recipe asks.
    """
    lora, rollout = config.training.lora, config.rollout
    check_adapters(lora, config.model)
    if not lora.is_on or lora.publish == "merged":
        return
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
