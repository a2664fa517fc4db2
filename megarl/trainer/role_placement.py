"""Which ranks each model of a run (policy, reference, critic, ...) has, and its layout there, from
the recipe alone.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    require(
        len(set(role.ranks)) == len(role.ranks),
        f"{name}.ranks is {list(role.ranks)}, but each must be named once; mend it",
    )
    require(
        list(role.ranks) == sorted(role.ranks),
        f"{name}.ranks is {list(role.ranks)}; set it in ascending order: {sorted(role.ranks)}",
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


def role_places(config: RunConfig, num_ranks: int) -> dict[str, RolePlace]:
    """Where each model is, "policy" first. Raises `ValueError` where ranks and layouts do not
    fit.
    """
    ranks = policy_ranks(config, num_ranks)
    policy = RolePlace(ranks, resolve(**dict(config.training.layout), num_ranks=len(ranks)))
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
    """Folder of the reference's LoRA adapter; "" if it has none. None if the run has no reference,
    or one with its own `model.path`.
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
