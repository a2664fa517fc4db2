"""The picture of a run's placement: a table with a row for each role and each engine.

recipe, Plan, Gpus --placement--> text: model, layout, ranks, GPUs and memory of each
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.apps.launch.launch_plan import Gpu, Gpus, Plan
from megarl.config import RunConfig, SftConfig, longest_request
from megarl.trainer.config import (
    CriticConfig,
    ModelConfig,
    RewardModelRoleConfig,
    TeacherConfig,
    TrainingConfig,
)
from megarl.trainer.memory import Memory, engine_memory, num_elements, role_memory, with_head
from megarl.trainer.places import RolePlace, policy_as_reference, reference_adapter, role_training
from megarl.trainer.working_memory import kept_memory, most_share, working_memory
from megarl.weight_sync.families import parameter_table
from megarl.weight_sync.parameters import ParameterSpec

WIDTH = 120
"""Most characters of a line."""
LIST_WIDTH = 16
"""Characters after which a list of ranks or GPUs goes on in the next line."""
SHORT = 12
"""Characters of a GPU's name that are shown; of a UUID these are enough for CUDA, too."""
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """What runs as a role or an engine, and where."""

    name: str
    status: str
    """trained, frozen, or vLLM for an engine."""
    model: str
    parameters: int | None
    """Number of parameters; None if the model's config.json is not known."""
    layout: str
    ranks: Sequence[int]
    gpus: Sequence[Gpu]
    memory: Memory | None
    """Memory on each GPU; None if it is not known."""


def placement(config: RunConfig | SftConfig, plan: Plan, gpus: Gpus) -> str:
    """The picture of where a run's roles and engines are: ASCII lines of at most `WIDTH`
    characters.
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
    for row in rows:
        for gpu in row.gpus if not gpus.on_cpu else ():
            users.setdefault(gpu, []).append(row)
    lines = _table(rows, gpus, {gpu for gpu, found in users.items() if len(found) > 1})
    lines += _shared_lines(users, takes_turns=plan.colocated)
    for note in [*_crossing(plan, gpus), *notes]:
        lines += textwrap.wrap(
            note, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


def compressed(numbers: Sequence[int | str]) -> str:
    """Numbers in their order, with runs of successors as first-last: 0-3,7."""
    parts: list[list[int | str]] = []
    for number in numbers:
        last = str(parts[-1][-1]) if parts else ""
        if last.isdecimal() and str(number) == str(int(last) + 1):
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in parts)


def places_of(gpus: Sequence[Gpu]) -> str:
    """Nodes with their GPUs, "NODES: GPUS; ...", nodes with the same GPUs together."""
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
    name: str, config: RunConfig | SftConfig, plan: Plan, gpus: Gpus, notes: dict[str, None]
) -> Row:
    """The row of a role; adds to `notes` what the reader has to know about it."""
    place = plan.roles[name]
    role, training = None, config.training
    if isinstance(config, RunConfig) and name != "policy":
        role, training = config.other_roles[name], role_training(config, name)
    model = role.model if role is not None and role.model.path else config.model
    trains, head = role is None or isinstance(role, CriticConfig), "logprobs"
    if role is not None:
        judges, teaches = isinstance(role, RewardModelRoleConfig), isinstance(role, TeacherConfig)
        head = "value" if trains else "scalar" if judges else "states" if teaches else "logprobs"
    mine = [gpus.ranks[rank] for rank in place.ranks]
    layout = place.layout
    shown = f"{layout.data}x{layout.sequence}x{layout.tensor} Z{training.zero_stage}"
    status = "trained" if trains else "frozen"
    if name == "reference" and isinstance(config, RunConfig) and policy_as_reference(config):
        needs = (
            "with the adapters that it starts from, and needs memory for a copy of them alone"
            if reference_adapter(config)
            else "without its adapters, and needs no memory"
        )
        notes[f"the reference is the policy {needs}"] = None
        return Row(name, status, model.path, None, shown, place.ranks, mine, Memory(0))
    table = _known_table(model, notes)
    memory = None
    if table is not None:
        table = with_head(table, head)
        memory = role_memory(table, layout, training, trains=trains)
        if memory.host:
            notes[
                f"{name}: {_on_host(training)} in the host's memory,"
                f" {memory.host / GIB:.1f} GiB a rank"
            ] = None
    is_rl = isinstance(config, RunConfig)
    if is_rl and memory is not None and table is not None and trains and gpus.ranks:
        shapes = local_config(model.path) or {}
        notes[_step_note(name, config, table, shapes, training, place)] = None
    if training.lora.is_on and trains:
        notes[f"{name}: LoRA trains adapters of rank {training.lora.rank} alone"] = None
    if head == "states":
        notes[
            "the policy's ranks also hold their rows of the teacher's output head, not counted"
        ] = None
    return Row(name, status, model.path, _count(table), shown, place.ranks, mine, memory)


def _on_host(training: TrainingConfig) -> str:
    """What `training.offload_optimizer` keeps on the host, with its verb."""
    sums = training.offload_gradients == "step"
    return "optimizer states are" if sums else "gradients and optimizer states are"


def _step_note(
    name: str,
    config: RunConfig,
    table: Sequence[ParameterSpec],
    model: Mapping[str, Any],
    training: TrainingConfig,
    place: RolePlace,
) -> str:
    """What a step of a trained role needs on its largest rank, in all and term by term."""
    terms = working_memory(
        table,
        model,
        place.layout,
        training,
        longest=longest_request(config),
        samples=config.rollout.groups_per_step * config.rollout.group_size,
    )
    whole = role_memory(table, place.layout, training, trains=True).total + sum(terms.values())
    shown = ", ".join(f"{term} {size / GIB:.1f}" for term, size in terms.items())
    return f"{name}: a step needs at most {whole / GIB:.1f} GiB a GPU, beside the sum {shown}"


def _engine_row(
    number: int, config: RunConfig, plan: Plan, gpus: Gpus, notes: dict[str, None]
) -> Row:
    """The row of an inference engine."""
    table, engine = _known_table(config.model, notes), config.rollout.engine
    memory = None
    if table is not None:
        memory = Memory(engine_memory(table, plan.tensor, engine.dtype))
    return Row(
        f"engine {number}",
        "vLLM",
        config.model.path,
        _count(table),
        f"tensor {plan.tensor}",
        (),
        gpus.engines[number],
        memory,
    )


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
    """The content of a model's config.json, from its folder or from the cache of the Hugging Face
    hub; None if neither has it. Asks no network.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError

        try:
            cached = huggingface_hub.try_to_load_from_cache(path, "config.json")
        except HFValidationError:  # a path that is no hub name
            return None
        if not isinstance(cached, str):
            return None
        file = Path(cached)
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


# ------------------------------------------------------------------------------------------ lines


def _table(rows: Sequence[Row], gpus: Gpus, shared: set[Gpu]) -> list[str]:
    """The table, its title and its legend."""
    on_gpus = not gpus.on_cpu
    unit = "GPU" if on_gpus else "rank"
    head = ["role", "", "model", "params", "layout", "ranks", "node: GPUs" if on_gpus else "node"]
    head += ["weights", "grads", "optim", "sum"]
    cells = [head]
    for row in rows:
        where = "CPU" if gpus.on_cpu and gpus.num_nodes == 1 else places_of(row.gpus)
        where += " *" if shared & set(row.gpus) else ""
        count = "?" if row.parameters is None else f"{row.parameters / 1e9:.2f} B"
        if row.parameters is not None and row.parameters < 1e8:
            count = f"{row.parameters / 1e6:.2f} M"
        if row.memory == Memory(0):
            count = "-"
        found = row.memory
        sizes = ["?"] * 4
        if found is not None:
            parts = (found.weights, found.gradients, found.optimizer, found.total)
            sizes = [f"{part / GIB:.2f}" if part else "-" for part in parts]
        ranks = compressed(row.ranks) or "-"
        cells.append(
            [
                row.name,
                row.status,
                row.model,
                count,
                row.layout,
                ranks,
                where,
                *sizes,
            ]
        )
    if on_gpus:
        free = places_of(gpus.free) or "none"
        cells.append(["free", *["-"] * 5, free, *["-"] * 4])
    title = f"placement; memory in GiB a {unit}"
    return [
        title,
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


def _shared_lines(users: Mapping[Gpu, Sequence[Row]], *, takes_turns: bool) -> list[str]:
    """For each set of roles and engines on the same GPUs, a line with the sum of their memory.
    `takes_turns`: whether engines sleep while the roles on their GPUs train.
    """
    groups: dict[tuple[str, ...], list[Gpu]] = {}
    sums: dict[tuple[str, ...], list[Memory | None]] = {}
    for gpu, found in users.items():
        if len(found) > 1:
            names = tuple(row.name for row in found)
            groups.setdefault(names, []).append(gpu)
            sums[names] = [row.memory for row in found]
    lines = []
    for names, gpus in groups.items():
        parts = [one.total for one in sums[names] if one is not None]
        known = f"{sum(parts) / GIB:.2f} GiB" if len(parts) == len(names) else "memory unknown"
        turns = takes_turns and any(name.startswith("engine") for name in names)
        asleep = ", in turns: the engine sleeps while the roles train" if turns else ""
        shared = f"* shared, {places_of(gpus)}: {' + '.join(names)} = {known} a GPU{asleep}"
        lines += textwrap.wrap(shared, WIDTH, initial_indent="  ", subsequent_indent="    ")
    return lines


def _crossing(plan: Plan, gpus: Gpus) -> list[str]:
    """A warning for each role whose tensor-parallel ranks are not all on one node."""
    found = []
    for name, place in plan.roles.items():
        tensor = place.layout.tensor
        groups = [place.ranks[n : n + tensor] for n in range(0, len(place.ranks), tensor)]
        spread = Counter(len({gpus.ranks[rank].node for rank in group}) > 1 for group in groups)
        if spread[True]:
            found.append(
                f"! {name}: {spread[True]} of {len(groups)} tensor-parallel groups are on several"
                f" nodes, which is slow; set {'training' if name == 'policy' else name}.layout"
            )
    return found
