"""The plan of a run as YAML: for each model (policy, critic, ...) and each inference engine its
ranks, GPUs and memory, then notes, and the commands that start it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megarl.apps.launch.launch_plan import Gpu, Gpus, LaunchPlan
from megarl.settings.config import RewardModelConfig, RunConfig
from megarl.settings.schema import replace
from megarl.settings.training import CriticConfig, ModelConfig, RewardModelRoleConfig, TeacherConfig
from megarl.trainer.memory import (
    Memory,
    SizedParameter,
    engine_memory,
    num_elements,
    role_memory,
    sized_parameters,
    with_head,
)
from megarl.trainer.role_placement import policy_as_reference, reference_adapter, role_training
from megarl.trainer.working_memory import kept_memory, most_share

WIDTH = 120
"""Most characters of a line of the text, but for commands."""
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
"""A model of the trainer, or an engine: `status` ("trained", "frozen", or "vLLM" for an engine),
`model`, `parameters`, `layout`, `ranks`, `gpus` as text, and `memory`: {purpose: GiB on each GPU}.
"?" for what a missing config.json would tell."""


def plan_text(facts: Mapping[str, str], placement: Mapping[str, Row], commands: list[str]) -> str:
    """The plan as YAML text without a newline at its end: `facts` and `placement`, then `commands`,
    lines for a shell.
    """
    tree = {**facts, "placement": {**placement}}
    text = yaml.safe_dump(tree, sort_keys=False, width=WIDTH, allow_unicode=True)
    unit = (
        "memory in GiB a GPU, or a rank on the CPU; layout: data x sequence x tensor, Z: ZeRO stage"
    )
    about = "# each command has the same random RAY_AUTH_TOKEN in its environment"
    lines = textwrap.indent("\n".join(commands), "  ")
    return f"# plan; {unit}\n{text}{about}\ncommands: |\n{lines}"


def placement(plan: LaunchPlan, gpus: Gpus) -> dict[str, Any]:
    """{model (policy, critic, ...) or engine: its row}, the GPUs that are `free`, and `notes`."""
    config, notes = plan.config, list[str]()
    rows = {name: _role_row(name, plan, gpus, notes) for name in plan.roles}
    at = {name: [gpus.ranks[rank] for rank in role.ranks] for name, role in plan.roles.items()}
    if isinstance(config, RunConfig):
        layout = plan.roles["policy"].layout
        parameters = known_parameters(config.model, layout.tensor, notes)
        if plan.colocated and not gpus.on_cpu and parameters:
            kept = kept_memory(parameters, layout, config)
            notes.append(
                f"policy: while engines generate and receive weights it keeps {kept / GIB:.1f} GiB"
                " a GPU; rollout.engine.gpu_memory_utilization is at most"
                f" {most_share(kept, 80e9):g} of a GPU of 80 GB"
            )
        dtype = config.rollout.engine.dtype
        memory = Memory(engine_memory(parameters, plan.tensor, dtype)) if parameters else None
        for number, engine_gpus in enumerate(gpus.engines):
            row = {"status": "vLLM", "model": config.model.path, "parameters": _count(parameters)}
            row |= {"layout": f"tensor {plan.tensor}", "gpus": gpu_text(engine_gpus)}
            rows[f"engine {number}"] = row | {"memory": _sizes(memory)}
            at[f"engine {number}"] = engine_gpus
    if not gpus.on_cpu:
        rows["free"] = {"gpus": gpu_text(gpus.free) or "none"}
        notes += _shared(rows, at)
    return rows | ({"notes": list(dict.fromkeys(notes))} if notes else {})


def known_parameters(
    model: ModelConfig, tensor: int, notes: list[str]
) -> list[SizedParameter] | None:
    """The parameters, as `tensor` tensor-parallel ranks split them, of a model whose config.json is
    on this machine; else None, with a note that says why.
    """
    try:
        return sized_parameters(replace(model, path=local_folder(model.path)), tensor)
    except OSError:
        missing = f"the config.json of {model.path} is not on this machine"
        notes.append(f"? unknown: {missing}; set the path to a folder with it")
    except ValueError as error:
        notes.append(f"? unknown: {model.path}: {error}")
    return None


def compressed(numbers: Sequence[int | str]) -> str:
    """`numbers` as text, in their order, with successive ones as first-last: "0-3,7" for 0, 1, 2,
    3, 7. Names that are no numbers stay as they are.
    """
    parts: list[list[int | str]] = []
    for number in numbers:
        last = str(parts[-1][-1]) if parts else ""
        if last.isdecimal() and str(number) == str(int(last) + 1):
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(
        f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}" for numbers in parts
    )


def gpu_text(gpus: Sequence[Gpu]) -> str:
    """On which nodes and GPUs `gpus` are, "NODES: GPUS; ...", with nodes that have the same GPUs
    together, such as "0-1: 0-7; 2: 0-3".
    """
    by_node: dict[int, list[str]] = {}
    for gpu in gpus:
        names = by_node.setdefault(gpu.node, [])
        if gpu.name or not names:
            names.append(gpu.name[:SHORT] or "CPU")
    alike: dict[str, list[int]] = {}
    for node, names in by_node.items():
        alike.setdefault(compressed(names), []).append(node)
    return "; ".join(f"{compressed(nodes)}: {names}" for names, nodes in alike.items())


# ------------------------------------------------------------------------------------------- rows


def _role_row(name: str, plan: LaunchPlan, gpus: Gpus, notes: list[str]) -> Row:
    """The row of a role; adds to `notes` what the reader has to know about it."""
    config, place = plan.config, plan.roles[name]
    role, training = None, config.training
    if isinstance(config, RunConfig) and name != "policy":
        role, training = config.other_roles[name], role_training(config, name)
    model = role.model if role is not None and role.model.path else config.model
    trains = role is None or isinstance(role, CriticConfig)
    head = HEADS.get(type(role or config), "logprobs")
    layout = place.layout
    degrees = f"{layout.data}x{layout.sequence}x{layout.tensor} Z{training.zero_stage}"
    row: Row = {"status": "trained" if trains else "frozen", "model": model.path}
    if name == "reference" and isinstance(config, RunConfig) and policy_as_reference(config):
        has_adapter = bool(reference_adapter(config))
        needs = "with the adapters that it starts from, and needs memory for a copy of them alone"
        notes.append(
            f"the reference is the policy {needs if has_adapter else 'without its adapters'}"
        )
        memory = Memory(0)
    else:
        parameters, memory = known_parameters(model, layout.tensor, notes), None
        if parameters is not None:
            parameters = with_head(parameters, head)
            memory = role_memory(parameters, layout, training, trains=trains)
        row["parameters"] = _count(parameters)
    if memory and memory.host:
        sums = training.offload_gradients == "step"
        states = "optimizer states are" if sums else "gradients and optimizer states are"
        notes.append(f"{name}: {states} in the host's memory, {memory.host / GIB:.1f} GiB a rank")
    if training.lora.is_on and trains:
        notes.append(f"{name}: LoRA trains adapters of rank {training.lora.rank} alone")
    if head == "states":
        notes.append(
            "the policy's ranks also hold their rows of the teacher's output head, uncounted"
        )
    role_gpus = [gpus.ranks[rank] for rank in place.ranks]
    row |= {"layout": degrees, "ranks": compressed(place.ranks), "gpus": gpu_text(role_gpus)}
    return row | {"memory": _sizes(memory)}


def _count(parameters: Sequence[SizedParameter] | None) -> int | str:
    """The number of a model's parameters; "?" if they are not known."""
    return (
        "?"
        if parameters is None
        else sum(num_elements(parameter.shape) for parameter in parameters)
    )


def _sizes(memory: Memory | None) -> dict[str, float] | str:
    """{purpose: GiB on each GPU}; "?" if it is not known."""
    names = ("weights", "gradients", "optimizer", "total")
    return {name: round(getattr(memory, name) / GIB, 2) for name in names} if memory else "?"


def local_folder(path: str) -> str:
    """The folder of a model's config.json. `path`: a folder, or a name on the Hugging Face hub,
    looked up in the local cache without network. Raises `OSError` or `ValueError` if there is no
    such file.
    """
    if (Path(path) / "config.json").is_file():
        return path
    import huggingface_hub

    file = huggingface_hub.hf_hub_download(path, "config.json", local_files_only=True)
    return str(Path(file).parent)


def _shared(rows: Mapping[str, Row], at: Mapping[str, Sequence[Gpu]]) -> list[str]:
    """For each set of roles and engines on the same GPUs, a note with the sum of their memory.
    `at`: {role or engine: its GPUs}.
    """
    users: dict[Gpu, tuple[str, ...]] = {}
    for name, gpus in at.items():
        for gpu in gpus:
            users[gpu] = (*users.get(gpu, ()), name)
    notes = []
    for names in dict.fromkeys(each for each in users.values() if len(each) > 1):
        gpus = [gpu for gpu, each in users.items() if each == names]
        sizes = [rows[name]["memory"] for name in names]
        total = "? GiB" if "?" in sizes else f"{sum(size['total'] for size in sizes):.2f} GiB"
        is_colocated = any(name.startswith("engine") for name in names)
        asleep = ", in turns: the engine sleeps while the roles train" if is_colocated else ""
        notes.append(f"shared, {gpu_text(gpus)}: {' + '.join(names)} = {total} a GPU{asleep}")
    return notes
