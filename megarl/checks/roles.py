"""Which ranks each role uses, and with which layout; refused where they do not fit."""

from __future__ import annotations

from transformers import PretrainedConfig

from megarl.config import RunConfig
from megarl.parallel.layout import Layout, resolve, resolve_role
from megarl.schema import require
from megarl.trainer.attention import refuse_unsupported
from megarl.trainer.config import LayoutConfig, RoleConfig
from megarl.trainer.context import RolePlace
from megarl.trainer.loading import check_weights, load_model_config
from megarl.trainer.sharding import refuse_tensor


def policy_ranks(config: RunConfig, num_ranks: int) -> tuple[int, ...]:
    """The ranks that no other role has reserved, which the policy uses. Raises `ValueError` if rank
    0, which controls the engines, or every rank is reserved.
    """
    own = set(config.reference.ranks)
    left = tuple(rank for rank in range(num_ranks) if rank not in own)
    require(
        0 in left,
        f"reference.ranks is {list(config.reference.ranks)}, but rank 0 is the policy's, since it"
        " talks to the engines; set other ranks",
    )
    return left


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


def check_reference(
    config: RunConfig, hf: PretrainedConfig, policy: RolePlace, num_ranks: int
) -> RolePlace:
    """Ranks and layout of the reference model. Raises `ValueError` if its model does not fit its
    layout or has another vocabulary than the policy (`hf`: config.json of the policy's model).
    """
    stage, training = config.reference.zero_stage, config.training
    require(
        stage != 0 or (training.precision == "float32" and not training.offload_optimizer),
        f"reference.zero_stage is 0, but training.precision is '{training.precision}' and"
        f" training.offload_optimizer {training.offload_optimizer}, which need ZeRO; set"
        " reference.zero_stage to 1, 2 or 3 (of a frozen model only 3 shards the weights)",
    )
    require(
        not config.reference.ranks or config.rollout.placement != "colocated",
        f"reference.ranks is {list(config.reference.ranks)} and rollout.placement 'colocated',"
        " where engines share the GPUs of all ranks; leave reference.ranks out",
    )
    place = place_role("reference", config.reference, policy=policy, num_ranks=num_ranks)
    if config.reference.model.path:
        theirs = load_model_config(config.reference.model)
        refuse_unsupported(theirs)
        mine, other = hf.get_text_config().vocab_size, theirs.get_text_config().vocab_size
        require(
            mine == other,
            f"reference.model.path has a vocabulary of {other} tokens and model.path one of {mine};"
            " set a reference that was made from the same model",
        )
        check_weights(config.reference.model)
        hf = theirs
    try:
        refuse_tensor(hf, place.layout.tensor)
    except ValueError as error:
        text = str(error).replace("training.layout", "reference.layout")
        raise ValueError(text) from None
    return place


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
