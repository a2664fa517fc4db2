"""Ranks and layout of the policy and each other model, refused where they do not fit ranks, model
or device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from megarl.data.tokenizer import load_tokenizer
from megarl.kernels.block_flash import WIDEST
from megarl.kernels.packed_varlen import provider
from megarl.parallel.layout import Layout, resolve
from megarl.parallel.mesh import Axis, local_device
from megarl.settings.config import DistillConfig, RunConfig
from megarl.settings.schema import require
from megarl.settings.training import (
    CriticConfig,
    ModelConfig,
    RewardModelRoleConfig,
    RoleConfig,
    SequenceConfig,
    TeacherConfig,
    TrainingConfig,
)
from megarl.trainer.attention import prove_attention, refuse_unsupported
from megarl.trainer.autotp import refuse_autotp, refuse_cut_parameters
from megarl.trainer.experts import refuse_expert_layout
from megarl.trainer.heads import HeadName
from megarl.trainer.loading import check_weights, empty_model
from megarl.trainer.logits import logit_transform, refuse_transform
from megarl.trainer.model_config import load_model_config, positions
from megarl.trainer.norms import use_torch_norms
from megarl.trainer.optimizers import refuse_optimizer
from megarl.trainer.precision import check_precision
from megarl.trainer.role_placement import RolePlace, place_role, role_training
from megarl.trainer.sharding import kv_heads, refuse_tensor, shard_model


def check_layout(training: TrainingConfig, num_ranks: int) -> Layout:
    """The layout for `num_ranks` ranks. Raises `ValueError`, with what to set, if it does not fit
    these, or other settings of sequence parallelism.
    """
    layout = training.layout
    require(
        layout.sequence % training.sequence.ulysses == 0,
        f"training.sequence.ulysses is {training.sequence.ulysses}, which does not divide"
        f" training.layout.sequence = {layout.sequence}; set it to a divisor",
    )
    require(
        layout.sequence > 1 or training.sequence == SequenceConfig(block=training.sequence.block),
        "training.sequence has settings besides block, but training.layout.sequence is 1, where"
        " they do nothing; leave them out, or set training.layout.sequence above 1",
    )
    require(
        layout.sequence == 1
        or training.sequence.ulysses < layout.sequence
        or training.sequence.transport == "auto",
        f"training.sequence.ulysses is {training.sequence.ulysses}, all of"
        " training.layout.sequence, so that nothing is left for transport"
        f" {training.sequence.transport!r}; leave the transport out, or lower ulysses",
    )
    return resolve(**dict(layout), num_ranks=num_ranks)


def check_cut(
    training: TrainingConfig,
    config: ModelConfig,
    hf: transformers.PretrainedConfig,
    head: HeadName = "logprobs",
) -> None:
    """Raise `ValueError`, with the setting to change, if the model cannot be trained in this
    layout, its attention cannot work on packed sequences, or this rank's device lacks a kernel,
    optimizer or precision.
    """
    tensor, is_autotp = training.layout.tensor, training.tensor_backend == "autotp"
    (refuse_autotp if is_autotp else refuse_tensor)(hf, tensor)
    refuse_expert_layout(hf, training.layout.expert, tensor, is_autotp=is_autotp)
    empty = empty_model(config)
    prove_attention(empty)
    if is_autotp:
        refuse_cut_parameters(empty, tensor)
    # AutoTP cuts the same layers, and does not look at what else is in them.
    shard_model(empty, Axis("tensor", tensor, 0, tuple(range(tensor)), None))
    refuse_optimizer(training, local_device())
    check_precision(training, local_device())
    if training.logprobs == "liger" and head == "logprobs":
        refuse_liger(tensor, hf)
    refuse_kernels(training, hf, empty)
    text, ulysses = hf.get_text_config(), training.sequence.ulysses
    heads = {
        "num_attention_heads": text.num_attention_heads // tensor,
        "num_key_value_heads": max(1, kv_heads(hf) // tensor),
    }
    for name, count in heads.items():
        require(
            count % ulysses == 0 or (name == "num_key_value_heads" and ulysses % count == 0),
            f"training.sequence.ulysses is {ulysses}, but each rank has {count} of the model's"
            f" {name} (training.layout.tensor is {tensor}); set"
            f" training.sequence.ulysses to a divisor of {count}",
        )


def refuse_liger(tensor: int, hf: transformers.PretrainedConfig) -> None:
    """Raise `ValueError` if `training.logprobs: liger` cannot run here."""
    needs = {
        "a GPU": local_device().type == "cuda",
        "training.layout.tensor 1": tensor == 1,
        f"logits without a soft cap (model type {hf.model_type} has one)": (
            logit_transform(hf).cap is None
        ),
        "the package liger-kernel": importlib.util.find_spec("liger_kernel") is not None,
    }
    _refuse_lacking("training.logprobs is 'liger'", needs, "it to 'chunked'")


def _refuse_lacking(setting: str, needs: dict[str, bool], fix: str) -> None:
    """Raise `ValueError` unless all of `needs`, {in words: whether it is there}, is there."""
    lacking = " and ".join(name for name, is_there in needs.items() if not is_there)
    require(not lacking, f"{setting}, which needs {lacking}; set {fix}")


def refuse_kernels(
    training: TrainingConfig, hf: transformers.PretrainedConfig, empty: torch.nn.Module
) -> None:
    """Raise `ValueError` if a configured kernel cannot run on this rank's device or with this
    model. `empty`: the model on the meta device; its layers are changed.
    """
    if training.norms == "torch":
        use_torch_norms(empty)
    device = local_device()
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
    if training.elementwise == "triton":
        needs = {"a GPU": on_gpu, "the package triton": _has_triton()}
        _refuse_lacking("training.elementwise is 'triton'", needs, "it to 'model'")
        from megarl.trainer.elementwise import use_triton_elementwise  # needs triton

        use_triton_elementwise(empty)
    grouped = training.grouped
    needs = {
        "a GPU": on_gpu or grouped in ("auto", "loop"),
        "the package triton": grouped != "triton" or _has_triton(),
    }
    if grouped == "grouped":
        needs["compute capability 8.0 or more"] = capability >= (8, 0)
        needs["training.precision 'bfloat16' or 'float16'"] = training.dtype != "float32"
    _refuse_lacking(f"training.grouped is {grouped!r}", needs, "it to 'auto'")
    refuse_block(training, hf)
    if training.attention == "flash_attn":
        package = "a package flash-attn (pip install -e '.[flash-attn-4]' for compute capability 9"
        needs = {
            "a GPU": on_gpu,
            "training.precision 'bfloat16' or 'float16'": training.dtype != "float32",
            f"{package} and 10, or flash-attn)": bool(provider(capability)),
        }
        _refuse_lacking("training.attention is 'flash_attn'", needs, "it to 'torch'")


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def refuse_block(training: TrainingConfig, hf: transformers.PretrainedConfig) -> None:
    """Raise `ValueError` if the attention kernel `training.sequence.block` does not support device,
    precision, head width or soft cap.
    """
    block, text = training.sequence.block, hf.get_text_config()
    on_gpu, width, flash = local_device().type == "cuda", head_width(text), block == "flash"
    cap = getattr(text, "attn_logit_softcapping", None)
    needs = {
        "a GPU": on_gpu or block not in ("triton", "flash"),
        "ranks without GPUs": not on_gpu or block != "cpu",
        "the package triton": block != "triton" or _has_triton(),
        "training.precision 'bfloat16' or 'float16'": not flash or training.dtype != "float32",
        f"heads of 8, 16, ... {WIDEST} (here {width})": (
            not flash or (width % 8 == 0 and width <= WIDEST)
        ),
        f"scores without a soft cap (attn_logit_softcapping of {hf.model_type} is {cap})": (
            not (flash and cap)
        ),
    }
    _refuse_lacking(f"training.sequence.block is {block!r}", needs, "the block to 'auto'")


def head_width(text: transformers.PretrainedConfig) -> int:
    """Elements of an attention head."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def check_role(
    name: str,
    config: RunConfig,
    hf: transformers.PretrainedConfig,
    policy: RolePlace,
    num_ranks: int,
) -> RolePlace:
    """Where the model of section `name` is. Raises `ValueError`, with the setting to change, if it
    does not fit layout, ranks or precision, or has another vocabulary or tokenizer than the policy,
    whose config.json is `hf`.
    """
    role, training = config.other_roles[name], config.training
    head = HEADS.get(type(role), "logprobs")
    require(
        role.zero_stage != 0 or (training.dtype == "float32" and not training.offload_optimizer),
        f"{name}.zero_stage is 0, but training.precision is '{training.precision}' and"
        f" training.offload_optimizer {training.offload_optimizer}, which need ZeRO; set"
        f" {name}.zero_stage to 1, 2 or 3 (of a frozen model only 3 shards the weights)",
    )
    require(
        not role.model.tokenizer,
        f"{name}.model.tokenizer is {role.model.tokenizer}, but the tokens are the policy's; leave"
        " it out",
    )
    role_place = place_role(name, role, policy=policy, num_ranks=num_ranks)
    if role.model.path:
        theirs = load_model_config(role.model, setting=f"{name}.model")
        refuse_unsupported(theirs)
        judges, teaches = head == "scalar", head == "states"
        size, other = hf.get_text_config().vocab_size, theirs.get_text_config().vocab_size
        require(
            # The further rows of a teacher's larger head belong to no token of the tokenizer.
            size == other or (teaches and size < other),
            f"{name}.model.path has a vocabulary of {other} tokens and model.path one of {size};"
            f" set a {name} that was made from the same model",
        )
        require(
            not (judges and role.model.from_scratch),
            f"{name}.model.from_scratch is true, but random weights judge nothing; leave it out",
        )
        check_weights(role.model, head, needs_score=judges)
        if judges or teaches:
            refuse_other_tokenizer(name, config.model, role.model)
        if teaches:
            refuse_transform(theirs, f"{name}.model.path")
        if isinstance(config, DistillConfig):
            refuse_transform(hf, "model.path")
            require(
                config.distillation.top_k <= size,
                f"distillation.top_k is {config.distillation.top_k}, but model.path has {size}"
                " tokens; lower it, or set it to 0 for all tokens",
            )
        hf = theirs
    try:
        refuse_tensor(hf, role_place.layout.tensor)
        if role.model.path and role_place == policy:
            check_cut(training, role.model, hf, head)
        elif role.model.path:
            empty = empty_model(role.model)
            prove_attention(empty)
            refuse_kernels(training, hf, empty)
        if head == "value":
            refuse_optimizer(role_training(config, name), local_device())
    except ValueError as error:
        text = str(error).replace("training.layout", f"{name}.layout")
        raise ValueError(text.replace("training.optimizer", f"{name}.optimizer")) from None
    return role_place


def refuse_other_tokenizer(name: str, policy: ModelConfig, model: ModelConfig) -> None:
    """Raise `ValueError` if the tokenizer of `model` has other tokens than the policy's; an own
    padding token is allowed, and so is a folder without tokenizer.
    """
    folder = Path(model.path)
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return
    theirs = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    policy_tokenizer = load_tokenizer(
        policy.tokenizer or policy.path, trust_remote_code=policy.trust_remote_code
    )
    known = policy_tokenizer.get_vocab()
    # A reward model may have got a padding token of its own, which no policy writes.
    own = {word: id for word, id in theirs.get_vocab().items() if word != theirs.pad_token}
    require(
        known in (own, theirs.get_vocab()),
        f"{name}.model.path {model.path!r} has another tokenizer than model.path, but it reads the"
        f" policy's tokens; set a {name} of the same family",
    )


HEADS: dict[type[RoleConfig], HeadName] = {
    RewardModelRoleConfig: "scalar",
    TeacherConfig: "states",
    CriticConfig: "value",
}
"""What a role beside the policy computes; others compute log-probs."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files by which a folder is known to have a tokenizer."""


def check_positions(
    config: RunConfig, hf: transformers.PretrainedConfig, roles: Iterable[str], longest: int
) -> None:
    """Raise `ValueError` if a model cannot read the longest prompt (`longest` tokens) with the
    longest response. `roles`: sections of further models.
    """
    models = {"model.path": hf}
    for name in roles:
        if (model := config.other_roles[name].model).path:
            models[f"{name}.model.path"] = load_model_config(model, setting=f"{name}.model")
    new = config.rollout.max_new_tokens
    for name, model in models.items():
        limit = positions(model)
        require(
            limit is None or longest + new <= limit,
            f"the longest prompt of the data has {longest} tokens, with rollout.max_new_tokens ="
            f" {new} {longest + new}, but the max_position_embeddings of {name} is {limit}; lower"
            " rollout.max_new_tokens, or max_prompt_tokens with prompts.too_long 'drop'",
        )
