"""Which ranks each role uses, and with which layout; refused where they do not fit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import PretrainedConfig

from megarl.checks.layout_checks import check_cut, refuse_kernels
from megarl.config import DistillConfig, RunConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.parallel.mesh import local_device
from megarl.schema import require
from megarl.trainer.attention import prove_attention, refuse_unsupported
from megarl.trainer.config import (
    CriticConfig,
    ModelConfig,
    RewardModelRoleConfig,
    RoleConfig,
    TeacherConfig,
)
from megarl.trainer.heads import HeadName
from megarl.trainer.loading import check_weights, empty_model
from megarl.trainer.logits import refuse_transform
from megarl.trainer.model_config import load_model_config, positions
from megarl.trainer.optimizers import refuse_optimizer
from megarl.trainer.places import RolePlace, place_role, role_training
from megarl.trainer.sharding import refuse_tensor


def check_role(
    name: str, config: RunConfig, hf: PretrainedConfig, policy: RolePlace, num_ranks: int
) -> RolePlace:
    """Ranks and layout of the role in section `name`. Raises `ValueError` if its model does not fit
    its layout or has another vocabulary than the policy (`hf`: config.json of the policy's model).
    """
    role, training = config.other_roles[name], config.training
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
    place = place_role(name, role, policy=policy, num_ranks=num_ranks)
    if role.model.path:
        theirs = load_model_config(role.model, setting=f"{name}.model")
        refuse_unsupported(theirs)
        judges = isinstance(role, RewardModelRoleConfig)
        teaches = isinstance(role, TeacherConfig)
        mine, other = hf.get_text_config().vocab_size, theirs.get_text_config().vocab_size
        require(
            # The further rows of a teacher's larger head belong to no token of the tokenizer.
            mine == other or (teaches and mine < other),
            f"{name}.model.path has a vocabulary of {other} tokens and model.path one of {mine};"
            f" set a {name} that was made from the same model",
        )
        require(
            not (judges and role.model.from_scratch),
            f"{name}.model.from_scratch is true, but random weights judge nothing; leave it out",
        )
        check_weights(role.model, head_of(role), needs_score=judges)
        if judges or teaches:
            refuse_other_tokenizer(name, config.model, role.model)
        if teaches:
            refuse_transform(theirs, f"{name}.model.path")
        if isinstance(config, DistillConfig):
            refuse_transform(hf, "model.path")
            require(
                config.distillation.top_k <= mine,
                f"distillation.top_k is {config.distillation.top_k}, but model.path has {mine}"
                " tokens; lower it, or set it to 0 for all tokens",
            )
        hf = theirs
    try:
        refuse_tensor(hf, place.layout.tensor)
        if role.model.path and place == policy:
            check_cut(training, role.model, hf, head_of(role))
        elif role.model.path:
            empty = empty_model(role.model)
            prove_attention(empty)
            refuse_kernels(training, hf, empty)
        if isinstance(role, CriticConfig):
            refuse_optimizer(role_training(config, name), local_device())
    except ValueError as error:
        text = str(error).replace("training.layout", f"{name}.layout")
        raise ValueError(text.replace("training.optimizer", f"{name}.optimizer")) from None
    return place


def refuse_rejection(config: RunConfig) -> None:
    """Raise `ValueError` if dynamic sampling would reject groups that reward models tell apart."""
    require(
        not config.reward_models
        or not config.rollout.dynamic_sampling.enabled
        or config.group_filter != "differing",
        "rollout.dynamic_sampling.enabled is true, but groups are rejected before reward_models"
        " score them; set it to false",
    )


def head_of(role: RoleConfig) -> HeadName:
    """What a role beside the policy computes."""
    if isinstance(role, RewardModelRoleConfig):
        return "scalar"
    if isinstance(role, TeacherConfig):
        return "states"
    return "value" if isinstance(role, CriticConfig) else "logprobs"


def refuse_other_tokenizer(name: str, policy: ModelConfig, model: ModelConfig) -> None:
    """Raise `ValueError` if a role's model has a tokenizer whose tokens are not those of the
    policy's tokenizer.
    """
    folder = Path(model.path)
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return
    theirs = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    mine = load_tokenizer(
        policy.tokenizer or policy.path, trust_remote_code=policy.trust_remote_code
    )
    known = mine.get_vocab()
    # A reward model may have got a padding token of its own, which no policy writes.
    own = {word: id for word, id in theirs.get_vocab().items() if word != theirs.pad_token}
    require(
        known in (own, theirs.get_vocab()),
        f"{name}.model.path {model.path!r} has another tokenizer than model.path, but it reads the"
        f" policy's tokens; set a {name} of the same family",
    )


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files by which a folder is known to have a tokenizer."""


def check_positions(
    config: RunConfig, hf: PretrainedConfig, roles: Iterable[str], longest: int
) -> None:
    """Raise `ValueError` if a model cannot read the longest prompt with the longest response.
    `roles`: sections of the models beside the policy. `longest`: tokens of the longest prompt.
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
