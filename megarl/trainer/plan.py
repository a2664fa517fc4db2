"""The models of a run, refused where they do not fit its ranks, its device or each other."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from megarl.checkpoints.adapter_files import CONFIG, SCORE, read_adapter, written_for
from megarl.data.hub import refuse_no_weights
from megarl.data.tokenizer import check_tokenizer, load_tokenizer
from megarl.engines.plan import head_width
from megarl.environments.user_code import function_of
from megarl.kernels.attention_cudnn import cudnn_needs
from megarl.kernels.block_flash import WIDEST
from megarl.kernels.packed_varlen import provider
from megarl.parallel.launcher import warn
from megarl.parallel.mesh import Axis, local_device
from megarl.settings.config import AnyConfig, DistillConfig, RunConfig
from megarl.settings.schema import is_own, replace, require, shortened
from megarl.settings.training import (
    CriticConfig,
    LayoutConfig,
    LoraConfig,
    ModelConfig,
    RewardModelRoleConfig,
    RoleConfig,
    TeacherConfig,
    TrainingConfig,
)
from megarl.system.third_party import opening
from megarl.trainer.attention import prove_attention, refuse_unsupported
from megarl.trainer.autotp import refuse_autotp
from megarl.trainer.experts import num_experts, refuse_balance, refuse_expert_layout
from megarl.trainer.heads import SCORING, HeadName, refuse_head
from megarl.trainer.loading import check_weights, empty_model, generation_config
from megarl.trainer.logits import logit_transform, refuse_transform
from megarl.trainer.lora import A, B, chosen_layers
from megarl.trainer.model_config import load_model_config, positions
from megarl.trainer.norms import use_torch_norms
from megarl.trainer.optimizers import refuse_optimizer
from megarl.trainer.precision import check_precision
from megarl.trainer.role_placement import RolePlace, kv_heads, place_role, role_training
from megarl.trainer.sharding import refuse_tensor, shard_model
from megarl.trainer.weights import base_digest


def plan_model(
    config: ModelConfig,
) -> tuple[PreTrainedTokenizerBase, transformers.PretrainedConfig]:
    """(tokenizer, configuration) of the policy. Raises `ValueError`, with the setting to change, if
    one cannot be read, they do not match, training does not support the model, or its folder has no
    weights.
    """
    hf = load_model_config(config)
    refuse_unsupported(hf)
    if refuse_no_weights(config) and config.from_scratch:
        warn(
            f"model.from_scratch is true: the weights in model.path {config.path!r} are not used,"
            " and the run begins with random ones; set model.from_scratch to false to use them"
        )
    name = config.tokenizer or config.path
    tokenizer = load_tokenizer(name, trust_remote_code=config.trust_remote_code)
    check_tokenizer(tokenizer, hf.get_text_config().vocab_size, source=name)
    return tokenizer, hf


def plan_training(
    config: AnyConfig,
    tokenizer: PreTrainedTokenizerBase,
    hf: transformers.PretrainedConfig,
    head: HeadName = "logprobs",
) -> None:
    """Raise `ValueError` if the policy cannot be trained, loaded or saved."""
    replay = config.algorithm.router_replay if isinstance(config, RunConfig) else "off"
    refuse_expert_settings(config.training, hf, replay)
    check_trainable(config.training, config.model, hf, head)
    if config.training.experts.is_on:
        refuse_balance(empty_model(config.model), config.training)
    check_export(config.model, tokenizer, hf)
    check_weights(config.model, head)
    check_adapters(config.training.lora, config.model, head)


def refuse_expert_settings(
    training: TrainingConfig, hf: transformers.PretrainedConfig, router_replay: str = "off"
) -> None:
    """Raise `ValueError` if a setting is about experts, and the model has none."""
    settings = {
        f"algorithm.router_replay is {router_replay!r}": router_replay != "off",
        f"training.layout.expert is {training.layout.expert}": training.layout.expert > 1,
        "training.experts balances experts": training.experts.is_on,
    }
    for setting, is_set in settings.items():
        require(
            not is_set or num_experts(hf) > 0,
            f"{setting}, but model type {hf.model_type} has no experts; leave it out",
        )


def check_trainable(
    training: TrainingConfig,
    config: ModelConfig,
    hf: transformers.PretrainedConfig,
    head: HeadName = "logprobs",
) -> None:
    """Raise `ValueError`, naming the setting, if this layout, packed attention, or this rank's
    device (kernels, optimizer, precision) cannot train the model. `hf`: its configuration.
    """
    tensor, ulysses = training.layout.tensor, training.sequence.ulysses
    is_autotp = training.tensor_backend == "autotp"
    refuse_tensor(hf, tensor)
    refuse_expert_layout(hf, training.layout.expert, tensor, is_autotp=is_autotp)
    meta_model = empty_model(config)
    refuse_head(meta_model)
    prove_attention(meta_model)
    if is_autotp:
        refuse_autotp(meta_model, tensor)
    # Raises for layers that cannot be split. AutoTP splits the same ones, without such a check.
    shard_model(meta_model, Axis("tensor", tensor, 0, tuple(range(tensor)), None))
    refuse_optimizer(training, local_device())
    check_precision(training, local_device())
    refuse_kernels(training, hf, meta_model, head)
    # Ulysses deals a tensor rank's heads out to its sequence ranks.
    heads = {
        "num_attention_heads": hf.get_text_config().num_attention_heads // tensor,
        "num_key_value_heads": max(1, kv_heads(hf) // tensor),
    }
    for name, count in heads.items():
        require(
            count % ulysses == 0 or (name == "num_key_value_heads" and ulysses % count == 0),
            f"training.sequence.ulysses is {ulysses}, but each rank has {count} of the model's"
            f" {name} (training.layout.tensor is {tensor}); set"
            f" training.sequence.ulysses to a divisor of {count}",
        )


def refuse_kernels(
    training: TrainingConfig,
    hf: transformers.PretrainedConfig,
    meta_model: torch.nn.Module,
    head: HeadName = "logprobs",
) -> None:
    """Raise `ValueError` if a configured kernel cannot run on this rank's device or with this
    model. `meta_model`: the model on the meta device; its layers are changed.
    """
    if training.norms == "torch":
        use_torch_norms(meta_model)
    device, width = local_device(), head_width(hf)
    on_gpu, has_triton = device.type == "cuda", importlib.util.find_spec("triton") is not None
    block, is_flash = training.sequence.block, training.sequence.block == "flash"
    is_ready_made = block in ("flash", "cudnn")
    cap = getattr(hf.get_text_config(), "attn_logit_softcapping", None)
    half, is_half = "training.precision 'bfloat16' or 'float16'", training.dtype != "float32"
    capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
    cudnn = cudnn_needs(width, capability) if on_gpu else {}
    package = "a package flash-attn (pip install -e '.[flash-attn-4]' for compute capability 9"
    if is_own(block):
        block_class = function_of(block, {}, "training.sequence.block")
        lacks = [
            name for name in ("prepare", "forward", "backward") if not hasattr(block_class, name)
        ]
        require(
            not lacks,
            f"training.sequence.block {block}: it has no {' and no '.join(lacks)}; derive it from"
            " RegionBlock (docs/howto/own_attention.md)",
        )
    if training.logprobs == "liger" and head == "logprobs":
        needs = {
            "a GPU": on_gpu,
            "training.layout.tensor 1": training.layout.tensor == 1,
            f"logits without a soft cap (model type {hf.model_type} has one)": (
                logit_transform(hf).cap is None
            ),
            "the package liger-kernel": importlib.util.find_spec("liger_kernel") is not None,
        }
        _refuse_lacking("training.logprobs is 'liger'", needs, "it to 'chunked'")
    if training.elementwise == "triton":
        needs = {"a GPU": on_gpu, "the package triton": has_triton}
        _refuse_lacking("training.elementwise is 'triton'", needs, "it to 'model'")
        from megarl.trainer.elementwise import use_triton_elementwise  # needs triton

        use_triton_elementwise(meta_model)
    grouped = training.grouped
    needs = {
        "a GPU": on_gpu or grouped in ("auto", "loop"),
        "the package triton": grouped != "triton" or has_triton,
        "compute capability 8.0 or more": grouped != "grouped" or capability >= (8, 0),
        half: grouped != "grouped" or is_half,
    }
    _refuse_lacking(f"training.grouped is {grouped!r}", needs, "it to 'auto'")
    needs = {
        "a GPU": on_gpu or block not in ("triton", "flash", "cudnn"),
        "ranks without GPUs": not on_gpu or block != "cpu",
        "the package triton": block != "triton" or has_triton,
        half: not is_ready_made or is_half,
        f"heads of 8, 16, ... {WIDEST} (here {width})": (
            not is_flash or (width % 8 == 0 and width <= WIDEST)
        ),
        f"scores without a soft cap (attn_logit_softcapping of {hf.model_type} is {cap})": (
            not (is_ready_made and cap)
        ),
        **(cudnn if block == "cudnn" else {}),
    }
    _refuse_lacking(f"training.sequence.block is {block!r}", needs, "the block to 'auto'")
    if training.attention == "flash_attn":
        needs = {
            "a GPU": on_gpu,
            half: is_half,
            f"{package} and 10, or flash-attn)": bool(provider(capability)),
        }
        _refuse_lacking("training.attention is 'flash_attn'", needs, "it to 'torch'")
    if training.attention == "cudnn":
        needs = {"a GPU": on_gpu, half: is_half, **cudnn}
        _refuse_lacking("training.attention is 'cudnn'", needs, "it to 'torch'")


def _refuse_lacking(setting: str, needs: dict[str, bool], fix: str) -> None:
    """Raise `ValueError` unless all of `needs`, {in words: whether it is there}, is there."""
    lacking = " and ".join(name for name, is_there in needs.items() if not is_there)
    require(not lacking, f"{setting}, which needs {lacking}; set {fix}")


HEADS: dict[type[RoleConfig], HeadName] = {
    RewardModelRoleConfig: "scalar",
    TeacherConfig: "states",
    CriticConfig: "value",
}
"""What a role beside the policy computes; others compute log-probs."""


def plan_role(
    name: str, config: RunConfig, hf: transformers.PretrainedConfig, policy: RolePlace
) -> RolePlace:
    """Where the model of section `name` is. Raises `ValueError`, with the setting to change, if it
    does not fit layout, ranks or precision, or the policy, whose config.json is `hf`.
    """
    role, training = config.other_roles[name], config.training
    head = HEADS.get(type(role), "logprobs")
    require(
        role.zero_stage != 0 or (training.dtype == "float32" and not training.offload_optimizer),
        f"{name}.zero_stage is 0, but training.precision is '{training.precision}' and"
        f" training.offload_optimizer {training.offload_optimizer}, which need ZeRO; set"
        f" {name}.zero_stage to 1, 2 or 3 (of a frozen model only 3 shards the weights)",
    )
    role_place = place_role(name, role, policy)
    theirs = plan_other_model(name, role.model, config.model, hf, head)
    if isinstance(config, DistillConfig):
        refuse_transform(hf, "model.path")
        size = hf.get_text_config().vocab_size
        require(
            config.distillation.top_k <= size,
            f"distillation.top_k is {config.distillation.top_k}, but model.path has {size}"
            " tokens; lower it, or set it to 0 for all tokens",
        )
    training = role_training(config, name)
    if role_place != policy:
        layout = LayoutConfig(**vars(role_place.layout))
        training = replace(training, layout=layout, sequence=replace(training.sequence, ulysses=1))
    elif not role.model.path and head != "value":
        return policy
    try:
        check_trainable(training, role.model if role.model.path else config.model, theirs, head)
    except ValueError as error:
        text = str(error).replace("training.layout", f"{name}.layout")
        raise ValueError(text.replace("training.optimizer", f"{name}.optimizer")) from None
    return role_place


def plan_other_model(
    name: str,
    model: ModelConfig,
    policy: ModelConfig,
    hf: transformers.PretrainedConfig,
    head: HeadName = "logprobs",
) -> transformers.PretrainedConfig:
    """The config.json of the frozen model or critic of section `name`: without a path the policy's,
    `hf`. Raises `ValueError` if it cannot be loaded, or reads other tokens than the policy.
    """
    if not model.path:
        return hf
    theirs = load_model_config(model, setting=f"{name}.model")
    refuse_unsupported(theirs)
    judges, teaches = head == "scalar", head == "states"
    size, other = hf.get_text_config().vocab_size, theirs.get_text_config().vocab_size
    require(
        # The further rows of a teacher's larger head belong to no token of the tokenizer.
        size == other or (teaches and size < other),
        f"{name}.model.path has a vocabulary of {other} tokens and model.path one of {size};"
        f" set a {name} that was made from the same model",
    )
    check_weights(model, head, needs_score=judges)
    if judges or teaches:
        refuse_other_tokenizer(name, policy, model)
    if teaches:
        refuse_transform(theirs, f"{name}.model.path")
    return theirs


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files by which a folder is known to have a tokenizer."""


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
    vocab = {word: id for word, id in theirs.get_vocab().items() if word != theirs.pad_token}
    require(
        known in (vocab, theirs.get_vocab()),
        f"{name}.model.path {model.path!r} has another tokenizer than model.path, but it reads the"
        f" policy's tokens; set a {name} of the same family",
    )


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


def check_export(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, hf: transformers.PretrainedConfig
) -> None:
    """Raise `ValueError` unless configuration and tokenizer can be saved, as each checkpoint
    does.
    """
    fix = "correct its files, or choose another model: each checkpoint needs it"
    for name, saved, setting in (
        (config.path, hf, "the config of model.path"),
        (config.tokenizer or config.path, tokenizer, "the tokenizer of model.path"),
    ):
        problem = f"{setting} {name!r} can be read but not saved again"
        with tempfile.TemporaryDirectory() as folder, opening(problem, fix=fix):
            saved.save_pretrained(folder)


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
    fix = "fetch the model again, or remove the file"
    with opening(f"generation_config.json of model.path {config.path!r}", fix=fix):
        content = generation_config(config)
        ends = json.loads(content).get("eos_token_id") if content else None
    return [] if ends is None else ends if isinstance(ends, list) else [ends]


def check_adapters(lora: LoraConfig, model: ModelConfig, head: HeadName = "logprobs") -> None:
    """Raise `ValueError` if the LoRA settings do not fit the model: an unknown target, or an
    adapter to start from of another rank, kind or base model. Warns of an adapter that is not
    megarl's and names another base model.
    """
    if not lora.is_on:
        return
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
    if not lora.adapter:
        return
    read_adapter(lora, shapes)
    written = written_for(Path(lora.adapter))
    require(
        not written or written == base_digest(model.path),
        f"training.lora.adapter {lora.adapter!r} was trained on another base model than"
        f" model.path {model.path!r}, whose weights differ; set model.path to its base model",
    )
    base = json.loads((Path(lora.adapter) / CONFIG).read_text()).get("base_model_name_or_path")
    if base and not written and Path(base).name != Path(model.path).name:
        warn(
            f"training.lora.adapter {lora.adapter!r} was made for {base!r}, and model.path is"
            f" {model.path!r}: an adapter means something else on other weights"
        )
