"""Which ranks of a job each role has, and its layout there, from the recipe alone.

recipe, number of ranks --role_places--> {"policy": RolePlace, "critic": RolePlace, ...}
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import AnyConfig, PreferenceConfig, RunConfig
from megarl.parallel.layout import Layout, resolve, resolve_role
from megarl.schema import replace, require
from megarl.trainer.config import (
    CriticConfig,
    LayoutConfig,
    LoraConfig,
    ReferenceRoleConfig,
    RoleConfig,
    TrainingConfig,
)


@dataclass(frozen=True)
class RolePlace:
    """The ranks that a role runs on, and its parallel layout there."""

    ranks: tuple[int, ...]
    """Ranks of the job that the role uses, in the order of its layout."""
    layout: Layout


def policy_ranks(config: RunConfig, num_ranks: int) -> tuple[int, ...]:
    """The ranks that no other role has reserved, which the policy uses. Raises `ValueError` if rank
    0, which controls the engines, or every rank is reserved.
    """
    for name, role in config.other_roles.items():
        require(
            0 not in role.ranks,
            f"{name}.ranks is {list(role.ranks)}, but rank 0 is the policy's, since it talks to the"
            " engines; set other ranks",
        )
    reserved = {rank for role in config.other_roles.values() for rank in role.ranks}
    return tuple(rank for rank in range(num_ranks) if rank not in reserved)


def place_role(name: str, role: RoleConfig, *, policy: RolePlace, num_ranks: int) -> RolePlace:
    """Ranks and layout of a role other than the policy. Raises `ValueError` if the layout does not
    fit the ranks, or if ranks reserved for the role are also used by the policy.
    """
    shared = set(role.ranks) & set(policy.ranks)
    require(
        not shared,
        f"{name}.ranks is {list(role.ranks)} and the policy has {list(policy.ranks)}: two roles"
        f" share all of their ranks or none; leave {name}.ranks out, or give it ranks of its own",
    )
    wanted = role.layout
    if not role.ranks:
        if wanted == LayoutConfig():
            return policy
        layout = _layout(name, wanted, len(policy.ranks))
        return policy if layout == policy.layout else RolePlace(policy.ranks, layout)
    layout = _layout(name, wanted, len(role.ranks))
    resolve_role(name, layout, role.ranks, num_ranks)
    return RolePlace(tuple(role.ranks), layout)


def role_places(config: RunConfig, num_ranks: int) -> dict[str, RolePlace]:
    """{role: ranks and layout} of the policy, which is first, and of all other roles of a job of
    `num_ranks` ranks. Raises `ValueError` where ranks and layouts do not fit.
    """
    mine = policy_ranks(config, num_ranks)
    wanted = config.training.layout
    layout = resolve(
        data=wanted.data, sequence=wanted.sequence, tensor=wanted.tensor, num_ranks=len(mine)
    )
    policy = RolePlace(mine, layout)
    others = {
        name: place_role(name, role, policy=policy, num_ranks=num_ranks)
        for name, role in config.other_roles.items()
    }
    return {"policy": policy} | others


def role_training(config: RunConfig, name: str) -> TrainingConfig:
    """`training` as it holds for the role of section `name`: with its ZeRO stage, for the critic
    with its optimizer and schedule, and with adapters only for a reference that has some.
    """
    role, training = config.other_roles[name], config.training
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
    """Whether the policy, with the adapters that it starts from or with none, is the reference, so
    that no second model is loaded.
    """
    alone = replace(config.reference, lora="start") == ReferenceRoleConfig()
    return config.training.lora.is_on and alone


def reference_adapter(config: AnyConfig) -> str | None:
    """Folder of the adapter with which the reference computes, "" for the base model alone; None
    where the reference is another model, or nothing is compared with one.
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


def _layout(name: str, wanted: LayoutConfig, num_ranks: int) -> Layout:
    """The layout of a role on `num_ranks` ranks; errors name the role's own setting."""
    try:
        return resolve(
            data=wanted.data,
            sequence=wanted.sequence,
            tensor=wanted.tensor,
            num_ranks=num_ranks,
        )
    except ValueError as error:
        text = str(error).replace("training.layout", f"{name}.layout")
        raise ValueError(text.replace("this run has", f"{name} has")) from None
