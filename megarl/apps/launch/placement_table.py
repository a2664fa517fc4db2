"""The placement of a run as YAML: an entry for each role (policy, critic, ...) and each inference
engine.

recipe, LaunchPlan, Gpus --placement--> text: model, layout, ranks, GPUs and memory of each
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megarl.apps.launch.launch_plan import Gpu, Gpus, LaunchPlan
from megarl.config import AnyConfig, RewardModelConfig, RunConfig
from megarl.schema import replace
from megarl.trainer.config import CriticConfig, ModelConfig, RewardModelRoleConfig, TeacherConfig
from megarl.trainer.memory import (
    Memory,
    SizedParameter,
    engine_memory,
    num_elements,
    role_memory,
    sized_parameters,
    with_head,
)
from megarl.trainer.places import policy_as_reference, reference_adapter, role_training
from megarl.trainer.working_memory import kept_memory, most_share

WIDTH = 120
"""Most characters of a line of the text."""
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
"""What runs as a model of the trainer (policy, critic, ...) or as an engine: `status` ("trained",
"frozen", or "vLLM" for an engine), `model`, `parameters`, `layout`, `ranks`, `gpus` as text, and
`memory`: {purpose: GiB on each GPU}. "?" for what a missing config.json would tell."""


def placement(config: AnyConfig, plan: LaunchPlan, gpus: Gpus) -> str:
    """The placement that `megarl launch` prints, as YAML: for each model (policy, critic, ...) and
    each engine of a run its ranks, GPUs and memory, then the GPUs that are free and `notes`.
    """
    notes: dict[str, None] = {}
    rows = {name: _role_row(name, config, plan, gpus, notes) for name in plan.roles}
    at = {name: [gpus.ranks[rank] for rank in place.ranks] for name, place in plan.roles.items()}
    if isinstance(config, RunConfig):
        layout = plan.roles["policy"].layout
        known = not gpus.on_cpu and plan.colocated and _known(config.model, layout.tensor, notes)
        if known:
            kept = kept_memory(known, layout, config)
            notes[
                f"policy: while engines generate and receive weights it keeps {kept / GIB:.1f} GiB"
                " a GPU; rollout.engine.gpu_memory_utilization is at most"
                f" {most_share(kept, 80e9):g} of a GPU of 80 GB"
            ] = None
        for number in range(plan.num_engines):
            rows[f"engine {number}"] = _engine_row(number, config, plan, gpus, notes)
            at[f"engine {number}"] = gpus.engines[number]
    if not gpus.on_cpu:
        rows["free"] = {"gpus": places_of(gpus.free) or "none"}
        notes |= dict.fromkeys(_shared(rows, at))
    notes |= dict.fromkeys(_crossing(plan, gpus))
    tree = rows | ({"notes": [*notes]} if notes else {})
    device = "rank" if gpus.on_cpu else "GPU"
    unit = f"memory in GiB a {device}; layout: data x sequence x tensor, Z: ZeRO stage"
    text = yaml.safe_dump(tree, sort_keys=False, width=WIDTH, allow_unicode=True)
    return f"# placement; {unit}\n{text.rstrip()}"


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
    return ",".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in parts)


def places_of(gpus: Sequence[Gpu]) -> str:
    """Text that says on which nodes and GPUs `gpus` are, "NODES: GPUS; ...", with nodes that have
    the same GPUs together, such as "0-1: 0-7; 2: 0-3".
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


def _role_row(
    name: str, config: AnyConfig, plan: LaunchPlan, gpus: Gpus, notes: dict[str, None]
) -> Row:
    """The row of a role; adds to `notes` what the reader has to know about it."""
    place = plan.roles[name]
    role, training = None, config.training
    if isinstance(config, RunConfig) and name != "policy":
        role, training = config.other_roles[name], role_training(config, name)
    model = role.model if role is not None and role.model.path else config.model
    trains = role is None or isinstance(role, CriticConfig)
    head = HEADS.get(type(role or config), "logprobs")
    mine = [gpus.ranks[rank] for rank in place.ranks]
    layout = place.layout
    degrees = f"{layout.data}x{layout.sequence}x{layout.tensor} Z{training.zero_stage}"
    status = "trained" if trains else "frozen"
    if name == "reference" and isinstance(config, RunConfig) and policy_as_reference(config):
        needs = (
            "with the adapters that it starts from, and needs memory for a copy of them alone"
            if reference_adapter(config)
            else "without its adapters, and needs no memory"
        )
        notes[f"the reference is the policy {needs}"] = None
        return _row(status, model.path, None, degrees, place.ranks, mine, Memory(0))
    parameters, memory = _known(model, layout.tensor, notes), None
    if parameters is not None:
        parameters = with_head(parameters, head)
        memory = role_memory(parameters, layout, training, trains=trains)
        if memory.host:
            sums = training.offload_gradients == "step"
            what = "optimizer states are" if sums else "gradients and optimizer states are"
            size = f"{memory.host / GIB:.1f} GiB a rank"
            notes[f"{name}: {what} in the host's memory, {size}"] = None
    if training.lora.is_on and trains:
        notes[f"{name}: LoRA trains adapters of rank {training.lora.rank} alone"] = None
    if head == "states":
        notes[
            "the policy's ranks also hold their rows of the teacher's output head, not counted"
        ] = None
    return _row(status, model.path, parameters, degrees, place.ranks, mine, memory)


def _engine_row(
    number: int, config: RunConfig, plan: LaunchPlan, gpus: Gpus, notes: dict[str, None]
) -> Row:
    """The row of an inference engine."""
    parameters, path = _known(config.model, 1, notes), config.model.path
    dtype = config.rollout.engine.dtype
    memory = parameters and Memory(engine_memory(parameters, plan.tensor, dtype))
    layout, mine = f"tensor {plan.tensor}", gpus.engines[number]
    return _row("vLLM", path, parameters, layout, (), mine, memory)


def _row(
    status: str,
    model: str,
    parameters: Sequence[SizedParameter] | None,
    layout: str,
    ranks: Sequence[int],
    gpus: Sequence[Gpu],
    memory: Memory | None,
) -> Row:
    """See `Row`. `parameters`: the model's; None if they are not known, or not its own."""
    row: Row = {"status": status, "model": model}
    if memory != Memory(0):
        count = "?" if parameters is None else sum(num_elements(one.shape) for one in parameters)
        row["parameters"] = count
    row["layout"] = layout
    if ranks:
        row["ranks"] = compressed(ranks)
    row["gpus"] = places_of(gpus)
    if memory is None:
        return row | {"memory": "?"}
    names = ("weights", "gradients", "optimizer", "total")
    sizes = {name: round(getattr(memory, name) / GIB, 2) for name in names}
    return row | {"memory": sizes}


def _known(model: ModelConfig, tensor: int, notes: dict[str, None]) -> list[SizedParameter] | None:
    """The parameters, as `tensor` tensor-parallel ranks split them, of a model whose config.json is
    on this machine; else None, with a note that says why.
    """
    folder = local_folder(model.path)
    if folder is None:
        notes[
            f"? unknown: the config.json of {model.path} is not on this machine; set the path to a"
            " folder with it"
        ] = None
        return None
    try:
        return sized_parameters(replace(model, path=str(folder)), tensor)
    except ValueError as error:
        notes[f"? unknown: {model.path}: {error}"] = None
        return None


def local_folder(path: str) -> Path | None:
    """The folder of a model's config.json. `path`: a folder, or a name on the Hugging Face hub,
    looked up in the local cache without network. None if there is no such file.
    """
    if (Path(path) / "config.json").is_file():
        return Path(path)
    import huggingface_hub

    try:
        file = huggingface_hub.hf_hub_download(path, "config.json", local_files_only=True)
    except (OSError, ValueError):
        return None
    return Path(file).parent


def _shared(rows: Mapping[str, Row], at: Mapping[str, Sequence[Gpu]]) -> Iterator[str]:
    """For each set of roles and engines on the same GPUs, a note with the sum of their memory.
    `at`: {role or engine: its GPUs}.
    """
    users: dict[Gpu, list[str]] = {}
    for name, gpus in at.items():
        for gpu in gpus:
            users.setdefault(gpu, []).append(name)
    groups: dict[tuple[str, ...], list[Gpu]] = {}
    for gpu, names in users.items():
        groups.setdefault(tuple(names), []).append(gpu)
    for names, gpus in groups.items():
        if len(names) > 1:
            sizes = [rows[name]["memory"] for name in names]
            unknown = "?" in sizes
            total = "memory unknown" if unknown else f"{sum(x['total'] for x in sizes):.2f} GiB"
            turns = any(name.startswith("engine") for name in names)  # colocated
            asleep = ", in turns: the engine sleeps while the roles train" if turns else ""
            yield f"shared, {places_of(gpus)}: {' + '.join(names)} = {total} a GPU{asleep}"


def _crossing(plan: LaunchPlan, gpus: Gpus) -> Iterator[str]:
    """A warning for each role whose tensor-parallel ranks are not all on one node."""
    for name, place in plan.roles.items():
        tensor = place.layout.tensor
        groups = [place.ranks[n : n + tensor] for n in range(0, len(place.ranks), tensor)]
        spread = sum(len({gpus.ranks[rank].node for rank in group}) > 1 for group in groups)
        if spread:
            yield (
                f"{name}: {spread} of {len(groups)} tensor-parallel groups are on several"
                f" nodes, which is slow; set {'training' if name == 'policy' else name}.layout"
            )
