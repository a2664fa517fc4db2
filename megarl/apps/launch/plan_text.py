"""The plan of a run as YAML: ranks, GPUs and memory of each model (policy, critic, ...) and each
inference engine, and the commands that start them.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import huggingface_hub
import yaml

from megarl.apps.launch.launch_plan import Gpu, Gpus, LaunchPlan
from megarl.parallel.layout import Layout
from megarl.settings.config import RewardModelConfig, RunConfig
from megarl.settings.schema import replace
from megarl.settings.training import CriticConfig, ModelConfig, RewardModelRoleConfig, TeacherConfig
from megarl.trainer.memory import (
    SizedParameter,
    engine_memory,
    role_memory,
    sized_parameters,
    with_head,
)
from megarl.trainer.role_placement import policy_as_reference, role_training
from megarl.trainer.working_memory import kept_memory, most_share

SHORT = 12
"""Characters of a GPU's name that are shown; of a UUID these are enough for CUDA, too."""
GIB = 2**30
HEADS: dict[type, str] = {
    CriticConfig: "value",
    RewardModelRoleConfig: "scalar",
    RewardModelConfig: "scalar",
    TeacherConfig: "states",
}
"""{configuration class of a role, or of a whole recipe for the model that it trains: the output of
the model}, for models that do not give log-probs of tokens."""

Row = dict[str, Any]
"""A model of the trainer, or an engine: `model`, `parameters`, `layout`, `ranks`, `gpus` {node: its
GPUs} and `memory` {purpose: GiB on each GPU}, or why it is not known."""


def plan_text(facts: Mapping[str, str], plan: LaunchPlan, gpus: Gpus, commands: list[str]) -> str:
    """The plan as YAML without a newline at its end: `facts`, the placement, and `commands`, lines
    for a shell.
    """
    tree = {**facts, "placement": placement(plan, gpus)}
    text = yaml.safe_dump(tree, sort_keys=False, width=120, default_flow_style=None)
    lines = textwrap.indent("\n".join(commands), "  ")
    return (
        "# memory: GiB a GPU, or a rank on the CPU; layout: data x sequence x tensor, E: expert,"
        " Z: ZeRO stage\n"
        f"{text}# each command has the same random RAY_AUTH_TOKEN in its environment\n"
        f"commands: |\n{lines}"
    )


def placement(plan: LaunchPlan, gpus: Gpus) -> dict[str, Any]:
    """{model (policy, critic, ...) or engine: its row}, and on GPUs `free` ones, and `fullest`: GiB
    on the GPU that has most, of all models and engines there. Last comes a warning if the models
    there, without colocated engines, are more than 80 GB.
    """
    config = plan.config
    rows = {name: role_row(name, plan, gpus) for name in plan.roles}
    at = {name: [gpus.ranks[rank] for rank in role.ranks] for name, role in plan.roles.items()}
    if isinstance(config, RunConfig):
        row: Row = {"model": config.model.path, "layout": f"tensor {plan.tensor}"}
        parameters = known_parameters(config.model, plan.roles["policy"].layout)
        memory: Any = parameters
        if not isinstance(parameters, str):
            size = engine_memory(parameters, plan.tensor, config.rollout.engine.dtype)
            memory = {"total": round(size / GIB, 2)}
        for number, members in enumerate(gpus.engines):
            rows[f"engine {number}"] = row | {"gpus": gpus_by_node(members), "memory": copy(memory)}
            at[f"engine {number}"] = members
    if gpus.on_cpu:
        return rows
    used, kept = Counter[Gpu](), Counter[Gpu]()
    for name, members in at.items():
        if isinstance(sizes := rows[name]["memory"], dict):
            used.update(dict.fromkeys(members, sizes["total"]))
            if name in plan.roles or not plan.colocated:
                kept.update(dict.fromkeys(members, sizes["total"]))
    most, fullest = (max(sizes.values(), default=0) for sizes in (kept, used))
    totals: Row = {"free": gpus_by_node(gpus.free), "fullest": round(fullest, 2)}
    if most * GIB > 80e9:
        totals["warning"] = f"{most:.2f} GiB on a GPU, more than 80 GB, and a step needs more"
    return rows | totals


def role_row(name: str, plan: LaunchPlan, gpus: Gpus) -> Row:
    """The row of a model of the trainer, such as "policy"."""
    config, seats = plan.config, plan.roles[name]
    role, training, layout = None, config.training, plan.roles[name].layout
    if isinstance(config, RunConfig) and name != "policy":
        role, training = config.other_roles[name], role_training(config, name)
    model = role.model if role is not None and role.model.path else config.model
    row: Row = {"model": model.path}
    parameters = known_parameters(model, layout)
    memory: Any = parameters
    if name == "reference" and isinstance(config, RunConfig) and policy_as_reference(config):
        row["model"] = "the policy without its adapters, or with their first values"
        memory = {"total": 0}
    elif not isinstance(parameters, str):
        parameters = with_head(parameters, HEADS.get(type(role or config), "logprobs"))
        row["parameters"] = sum(math.prod(parameter.shape) for parameter in parameters)
        trains = role is None or isinstance(role, CriticConfig)
        sizes = role_memory(parameters, layout, training, trains=trains)
        names = ("weights", "gradients", "optimizer", "total", "host")
        memory = {name: round(getattr(sizes, name) / GIB, 2) for name in names}
        if name == "policy" and isinstance(config, RunConfig) and plan.colocated:
            kept = kept_memory(parameters, layout, config)
            memory["beside engines"] = round(kept / GIB, 2)
            row["gpu_memory_utilization"] = f"at most {most_share(kept, 80e9):g} of 80 GB"
    degrees = f"{layout.data}x{layout.sequence}x{layout.tensor}"
    degrees += f" E{layout.expert}" if layout.expert > 1 else ""
    return row | {
        "layout": f"{degrees} Z{training.zero_stage}",
        "ranks": spans(seats.ranks),
        "gpus": gpus_by_node([gpus.ranks[rank] for rank in seats.ranks]),
        "memory": memory,
    }


def known_parameters(model: ModelConfig, layout: Layout) -> list[SizedParameter] | str:
    """The parameters, as the ranks of `layout` split them, of a model whose config.json is
    in its folder or in the cache of the Hugging Face hub; else why they are not known.
    """
    path = model.path
    try:
        if not (Path(path) / "config.json").is_file():
            file = huggingface_hub.hf_hub_download(path, "config.json", local_files_only=True)
            path = str(Path(file).parent)
        return sized_parameters(replace(model, path=path), layout.tensor, layout.expert)
    except OSError:
        return f"? the config.json of {path} is not on this machine"
    except ValueError as error:
        return f"? {path}: {error}"


def gpus_by_node(gpus: Sequence[Gpu]) -> dict[int, str]:
    """{node: its GPUs}, such as {0: "0-7"}; {node: "CPU"} for processes on the CPU."""
    return {
        node: spans([gpu.name[:SHORT] for gpu in gpus if gpu.node == node and gpu.name]) or "CPU"
        for node in sorted({gpu.node for gpu in gpus})
    }


def spans(numbers: Sequence[int | str]) -> str:
    """Numbers in their order as text, with successive ones as first-last: "0-3,7" for 0, 1, 2, 3,
    7. Names that are no numbers stay as they are.
    """
    parts: list[list[str]] = []
    for number in map(str, numbers):
        last = parts[-1][-1] if parts else ""
        if last.isdecimal() and number == str(int(last) + 1):
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join("-".join(dict.fromkeys([part[0], part[-1]])) for part in parts)
