"""The placement of a run as text: a table with a line for each role (policy, critic, ...) and each
inference engine.

recipe, LaunchPlan, Gpus --placement--> text: model, layout, ranks, GPUs and memory of each
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.apps.launch.launch_plan import Gpu, Gpus, LaunchPlan
from megarl.config import AnyConfig, RewardModelConfig, RunConfig, longest_request
from megarl.trainer.config import CriticConfig, ModelConfig, RewardModelRoleConfig, TeacherConfig
from megarl.trainer.memory import Memory, engine_memory, num_elements, role_memory, with_head
from megarl.trainer.places import policy_as_reference, reference_adapter, role_training
from megarl.trainer.working_memory import kept_memory, most_share, working_memory
from megarl.weight_sync.families import parameter_table
from megarl.weight_sync.parameters import ParameterSpec

WIDTH = 120
"""Most characters of a line of the text."""
LIST_WIDTH = 16
"""Characters after which a list of ranks or GPUs goes on in the next line."""
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


@dataclass(frozen=True)
class Row:
    """One line of the table of a run's placement that `megarl launch` prints: what runs as a model
    of the trainer (policy, critic, ...) or as an engine, with its size and layout, on which ranks
    and GPUs, and its bytes of memory on each GPU.
    """

    name: str
    status: str
    """"trained" or "frozen" for a role, "vLLM" for an engine."""
    model: str
    parameters: int | None
    """Number of parameters; None if the model's config.json is not known."""
    layout: str
    ranks: Sequence[int]
    gpus: Sequence[Gpu]
    memory: Memory | None
    """Bytes on each GPU; None if the model's config.json is not known."""


def placement(config: AnyConfig, plan: LaunchPlan, gpus: Gpus) -> str:
    """The table that `megarl launch` prints: on which GPUs a run's models (policy, critic, ...) and
    engines are, and how much memory they need. Returns ASCII lines of at most 120 characters,
    joined by newlines. Models whose config.json is not on this machine have "?" for their sizes.
    """
    notes: dict[str, None] = {}
    rows = [_role_row(name, config, plan, gpus, notes) for name in plan.roles]
    if isinstance(config, RunConfig):
        if plan.colocated and not gpus.on_cpu and (table := _known_table(config.model, notes)):
            kept = kept_memory(table, plan.roles["policy"].layout, config)
            notes[
                f"policy: while engines generate and receive weights it keeps {kept / GIB:.1f} GiB"
                " a GPU; rollout.engine.gpu_memory_utilization is at most"
                f" {most_share(kept, 80e9):g} of a GPU of 80 GB"
            ] = None
        engines = range(plan.num_engines)
        rows += [_engine_row(number, config, plan, gpus, notes) for number in engines]
    users: dict[Gpu, list[Row]] = {}
    for row in rows if not gpus.on_cpu else ():
        for gpu in row.gpus:
            users.setdefault(gpu, []).append(row)
    users = {gpu: found for gpu, found in users.items() if len(found) > 1}
    lines = _table(rows, gpus, users.keys())
    notes = dict.fromkeys([*_shared(users), *_crossing(plan, gpus), *notes])
    for note in notes:
        lines += textwrap.wrap(
            note, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


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
        return Row(name, status, model.path, None, degrees, place.ranks, mine, Memory(0))
    table = _known_table(model, notes)
    memory = None
    if table is not None:
        table = with_head(table, head)
        memory = role_memory(table, layout, training, trains=trains)
        if memory.host:
            sums = training.offload_gradients == "step"
            what = "optimizer states are" if sums else "gradients and optimizer states are"
            size = f"{memory.host / GIB:.1f} GiB a rank"
            notes[f"{name}: {what} in the host's memory, {size}"] = None
        if isinstance(config, RunConfig) and trains and gpus.ranks:
            terms = working_memory(
                table,
                local_config(model.path) or {},
                layout,
                training,
                longest=longest_request(config),
                samples=config.rollout.groups_per_step * config.rollout.group_size,
            )
            whole = f"{(memory.total + sum(terms.values())) / GIB:.1f} GiB"
            shown = ", ".join(f"{term} {size / GIB:.1f}" for term, size in terms.items())
            notes[f"{name}: a step needs at most {whole} a GPU, beside the sum {shown}"] = None
    if training.lora.is_on and trains:
        notes[f"{name}: LoRA trains adapters of rank {training.lora.rank} alone"] = None
    if head == "states":
        notes[
            "the policy's ranks also hold their rows of the teacher's output head, not counted"
        ] = None
    return Row(name, status, model.path, _count(table), degrees, place.ranks, mine, memory)


def _engine_row(
    number: int, config: RunConfig, plan: LaunchPlan, gpus: Gpus, notes: dict[str, None]
) -> Row:
    """The row of an inference engine."""
    table, path = _known_table(config.model, notes), config.model.path
    dtype = config.rollout.engine.dtype
    memory = None if table is None else Memory(engine_memory(table, plan.tensor, dtype))
    layout, mine = f"tensor {plan.tensor}", gpus.engines[number]
    return Row(f"engine {number}", "vLLM", path, _count(table), layout, (), mine, memory)


def _count(table: Sequence[ParameterSpec] | None) -> int | None:
    return None if table is None else sum(num_elements(one.shape) for one in table)


def _known_table(model: ModelConfig, notes: dict[str, None]) -> list[ParameterSpec] | None:
    """The parameters of a model whose config.json is on this machine; else None, with a note that
    says why.
    """
    found = local_config(model.path)
    if found is None:
        notes[
            f"? unknown: the config.json of {model.path} is not on this machine; set the path to a"
            " folder with it"
        ] = None
        return None
    try:
        return parameter_table(found)
    except (ValueError, KeyError, TypeError) as error:
        notes[f"? unknown: {model.path}: {error}"] = None
        return None


def local_config(path: str) -> dict[str, Any] | None:
    """The content of a model's config.json as a dict. `path`: a folder, or a name on the Hugging
    Face hub, looked up in the local cache without network. None if the file is missing or unusable.
    """
    file = Path(path) / "config.json"
    try:
        if not file.is_file():
            import huggingface_hub

            file = huggingface_hub.hf_hub_download(path, "config.json", local_files_only=True)
        found = json.loads(Path(file).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


# ------------------------------------------------------------------------------------------ lines


def _table(rows: Sequence[Row], gpus: Gpus, shared: Collection[Gpu]) -> list[str]:
    """The table, its title and its legend."""
    on_gpus = not gpus.on_cpu
    head = ["role", "", "model", "params", "layout", "ranks", "node: GPUs" if on_gpus else "node"]
    head += ["weights", "grads", "optim", "sum"]
    cells = [head]
    for row in rows:
        where = "CPU" if gpus.on_cpu and gpus.num_nodes == 1 else places_of(row.gpus)
        where += " *" if {*shared} & {*row.gpus} else ""
        count, sizes = row.parameters, ["?"] * 4
        said = "?" if count is None else f"{count / 1e9:.2f} B"
        if count is not None and count < 1e8:
            said = f"{count / 1e6:.2f} M"
        if row.memory == Memory(0):
            said = "-"
        if row.memory is not None:
            found = row.memory
            parts = (found.weights, found.gradients, found.optimizer, found.total)
            sizes = [f"{part / GIB:.2f}" if part else "-" for part in parts]
        ranks = compressed(row.ranks) or "-"
        cells.append([row.name, row.status, row.model, said, row.layout, ranks, where, *sizes])
    if on_gpus:
        free = places_of(gpus.free) or "none"
        cells.append(["free", *["-"] * 5, free, *["-"] * 4])
    return [
        f"placement; memory in GiB a {'GPU' if on_gpus else 'rank'}",
        "",
        *_aligned(cells),
        "",
        "  layout: data x sequence x tensor, Z: ZeRO stage",
        "  memory: weights, gradients and optimizer states of the largest rank; what a step needs"
        " beside is in a note below,",
        "          key-value caches are not included",
    ]


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with aligned columns. Models, and then names of roles, are cut so that
    lines have at most `WIDTH` characters; long lists of ranks and GPUs go on in further lines.
    """
    wrapped = [
        [_wrap(cell) if column in (5, 6) else [cell] for column, cell in enumerate(row)]
        for row in cells
    ]
    widths = [max(len(line) for row in wrapped for line in row[n]) for n in range(len(cells[0]))]
    for column, least in ((2, 8), (0, 16)):
        over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        widths[column] = max(widths[column] - max(over, 0), min(widths[column], least))
    lines = []
    for row in wrapped:
        for number in range(max(map(len, row))):
            words = []
            for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
                text = cell[number] if number < len(cell) else ""
                if len(text) > width:  # the end of a path says most
                    text = ".." + text[2 - width :] if column == 2 else text[: width - 2] + ".."
                is_number = column == 3 or column >= 7
                words.append(text.rjust(width) if is_number else text.ljust(width))
            lines.append("  ".join(words).rstrip())
    return lines


def _wrap(text: str) -> list[str]:
    """A list of ranks or GPUs in lines of about `LIST_WIDTH` characters, cut after commas and
    semicolons.
    """
    lines = [""]
    for part in text.replace(",", ",\0").replace("; ", ";\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) > LIST_WIDTH:
            lines.append("")
        lines[-1] += part + (" " if part.endswith(";") else "")
    return [line.rstrip() for line in lines]


def _shared(users: Mapping[Gpu, Sequence[Row]]) -> Iterator[str]:
    """For each set of roles and engines on the same GPUs, a note with the sum of their memory.
    `users`: what is on a GPU, of those that are shared.
    """
    groups: dict[tuple[str, ...], list[Gpu]] = {}
    for gpu, rows in users.items():
        groups.setdefault(tuple(row.name for row in rows), []).append(gpu)
    for names, gpus in groups.items():
        parts = [row.memory.total for row in users[gpus[0]] if row.memory is not None]
        known = f"{sum(parts) / GIB:.2f} GiB" if len(parts) == len(names) else "memory unknown"
        turns = any(name.startswith("engine") for name in names)  # colocated
        asleep = ", in turns: the engine sleeps while the roles train" if turns else ""
        yield f"* shared, {places_of(gpus)}: {' + '.join(names)} = {known} a GPU{asleep}"


def _crossing(plan: LaunchPlan, gpus: Gpus) -> Iterator[str]:
    """A warning for each role whose tensor-parallel ranks are not all on one node."""
    for name, place in plan.roles.items():
        tensor = place.layout.tensor
        groups = [place.ranks[n : n + tensor] for n in range(0, len(place.ranks), tensor)]
        spread = sum(len({gpus.ranks[rank].node for rank in group}) > 1 for group in groups)
        if spread:
            yield (
                f"! {name}: {spread} of {len(groups)} tensor-parallel groups are on several"
                f" nodes, which is slow; set {'training' if name == 'policy' else name}.layout"
            )
