"""Which ranks each model of a run (policy, reference, critic, ...) has, and its layout there, from
the recipe alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.parallel.layout import Layout, resolve
from megarl.settings.config import AnyConfig, PreferenceConfig, RunConfig
from megarl.settings.schema import replace, require
from megarl.settings.training import (
    CriticConfig,
    ExpertsConfig,
    LayoutConfig,
    LoraConfig,
    ReferenceRoleConfig,
    RoleConfig,
    SequenceConfig,
    TrainingConfig,
)


@dataclass(frozen=True)
class RolePlace:
    """Where one model of a run is."""

    ranks: tuple[int, ...]
    """Rank i of the layout is rank `ranks[i]` of the job."""
    layout: Layout


def policy_ranks(config: RunConfig, num_ranks: int) -> tuple[int, ...]:
    """The policy's ranks: those that no other model has for itself. Raises `ValueError` if one has
    rank 0, which controls the engines.
    """
    for name, role in config.other_roles.items():
        require(
            0 not in role.ranks,
            f"{name}.ranks is {list(role.ranks)}, but rank 0 is the policy's, since it talks to the"
            " engines; set other ranks",
        )
        require(
            max(role.ranks, default=0) < num_ranks,
            f"{name}.ranks is {list(role.ranks)}, but this run has {num_ranks} ranks, counted from"
            " 0; set lower ones",
        )
    reserved = {rank for role in config.other_roles.values() for rank in role.ranks}
    return tuple(rank for rank in range(num_ranks) if rank not in reserved)


def place_role(name: str, role: RoleConfig, policy: RolePlace) -> RolePlace:
    """Where the model of section `name` is; without `role.ranks` on the policy's. Raises
    `ValueError` if the layout does not fit the ranks, or these are not ascending or the policy's.
    """
    shared = set(role.ranks) & set(policy.ranks)
    require(
        not shared,
        f"{name}.ranks is {list(role.ranks)} and the policy has {list(policy.ranks)}: two roles"
        f" share all of their ranks or none; leave {name}.ranks out, or give it ranks of its own",
    )
    ascending = sorted(set(role.ranks))
    require(
        list(role.ranks) == ascending,
        f"{name}.ranks is {list(role.ranks)}; set each once, in ascending order: {ascending}",
    )
    if not role.ranks and role.layout == LayoutConfig():
        return policy
    ranks = role.ranks or policy.ranks
    try:
        layout = resolve(**dict(role.layout), num_ranks=len(ranks))
    except ValueError as error:  # in the words of the policy
        text = str(error).replace("training.layout", f"{name}.layout")
        raise ValueError(text.replace("this run has", f"{name} has")) from None
    return RolePlace(ranks, layout)


def plan_layout(training: TrainingConfig, num_ranks: int) -> Layout:
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


def plan_ranks(config: AnyConfig, num_ranks: int) -> RolePlace:
    """The policy's ranks and layout. Raises `ValueError` if the layout does not fit the ranks, or a
    mini-batch has fewer samples than there are data ranks.
    """
    if not isinstance(config, RunConfig):
        return RolePlace(tuple(range(num_ranks)), plan_layout(config.training, num_ranks))
    members = policy_ranks(config, num_ranks)
    layout, rollout = plan_layout(config.training, len(members)), config.rollout
    samples = rollout.groups_per_step * rollout.group_size // config.training.num_mini_batches
    require(
        samples >= layout.data,
        f"a mini-batch has {samples} samples for {layout.data} data ranks; raise"
        " rollout.groups_per_step or group_size, or lower training.num_mini_batches",
    )
    return RolePlace(members, layout)


def kv_heads(config: Any) -> int:
    """Key-value heads of a model; by default as many as query heads."""
    text = config.get_text_config()
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def refuse_sizes(text: Any, tensor: int) -> None:
    """Raise `ValueError` if attention or feed-forward layers of the model with the settings `text`
    cannot be split over `tensor` ranks.
    """
    for name in ("num_attention_heads", "intermediate_size"):
        size = getattr(text, name, None)
        require(
            size is None or size % tensor == 0,
            f"training.layout.tensor is {tensor}, which does not divide the model's {name} ="
            f" {size}; set it to a divisor",
        )
    heads = kv_heads(text)
    require(
        heads % tensor == 0 or tensor % heads == 0,
        f"training.layout.tensor is {tensor} and the model's num_key_value_heads {heads}: neither"
        " divides the other; set training.layout.tensor to a divisor or a multiple",
    )


def role_places(config: RunConfig, num_ranks: int) -> dict[str, RolePlace]:
    """Where each model is, "policy" first. Raises `ValueError` where ranks and layouts do not
    fit.
    """
    policy = plan_ranks(config, num_ranks)
    others = {name: place_role(name, role, policy) for name, role in config.other_roles.items()}
    return {"policy": policy} | others


def role_training(config: RunConfig, name: str) -> TrainingConfig:
    """The section `training` for the model of section `name`: with its own ZeRO stage, a critic's
    optimizer and schedule, LoRA only for a reference with an adapter, and no balance of experts.
    """
    role, training = config.other_roles[name], replace(config.training, experts=ExpertsConfig())
    if name != "reference" or not reference_adapter(config):
        training = replace(training, lora=LoraConfig())
    if isinstance(role, CriticConfig):
        # Its value head is new, and the backbone's states were not made for values: it is trained
        # whole.
        training = replace(training, optimizer=role.optimizer, schedule=role.schedule)
    if role.zero_stage is not None:
        when = training.offload_gradients if role.zero_stage == 3 else "step"
        training = replace(training, zero_stage=role.zero_stage, offload_gradients=when)
    return training


def policy_as_reference(config: RunConfig) -> bool:
    """Whether the reference is the policy with its LoRA adapters off or as at the start: with LoRA,
    if the section `reference` sets nothing but `lora`.
    """
    alone = replace(config.reference, lora="start") == ReferenceRoleConfig()
    return config.training.lora.is_on and alone


def reference_adapter(config: AnyConfig) -> str | None:
    """Folder of the LoRA adapter with which the reference starts; "" for a reference without one.
    None if there is no reference, or it names a model of its own (`reference.model.path`).
    """
    if isinstance(config, RunConfig):
        compares, reference = "reference" in config.other_roles, config.reference
    elif isinstance(config, PreferenceConfig):
        compares, reference = config.loss.has_reference, config.reference
    else:
        return None
    if not compares or reference.model.path:
        return None
    return config.training.lora.adapter if reference.lora == "start" else ""
