"""A run's checkpoint from one layout and ZeRO stage to another: master weights and Adam's moments,
each element as it was.

What each file holds is an `Owned` (see `deepspeed_place`), so that one plan moves all kinds of
state between all ZeRO stages. The weights that layers compute with are
the master weights, rounded to the run's precision, under every stage; so they are made of them.
Precision stays, as do step, prompt cursor and the exported model; ranks that the source has not
take the random state of rank r modulo its ranks. Owned in memory: what one file of the target
holds. What is read is mapped.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from megarl.checkpoints.deepspeed_place import PREFIX, Place
from megarl.checkpoints.progress import (
    Progress,
    parse_written,
    read_progress,
    shapes_fingerprint,
    write_progress,
    written_under,
)
from megarl.checkpoints.state_files import read_state, write_state
from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import Owned
from megarl.parallel.reshard.plan import Copy, make_plan
from megarl.trainer.config import TrainingConfig
from megarl.weight_sync.parameters import ParameterSpec

KINDS = ("master", "exp_avg", "exp_avg_sq")
FORMAT = "0.19."
"""Prefix of the DeepSpeed versions whose checkpoint format is supported."""


def read_place(
    folder: Path, table: Sequence[ParameterSpec]
) -> tuple[Place, Progress, dict[str, Any]]:
    """(layout and parameters, progress, rank 0's file of model states) of the checkpoint in
    `folder`.

    Raises `ValueError` if the checkpoint cannot be resharded here.
    """
    try:
        progress = read_progress(folder)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{folder} is no checkpoint of a run ({error}); name RUN/checkpoints/step_..."
        ) from None
    found = parse_written(progress.layout)
    if found is None:
        raise ValueError(
            f"{folder} was written under {progress.layout}, and only megarl's own tensor"
            " parallelism with training.optimizer.kind 'torch' can be read"
        )
    if shapes_fingerprint({row.name: row.shape for row in table}) != progress.model:
        raise ValueError(
            f"{folder} holds other weights than its model/config.json says; name a checkpoint that"
            " is whole"
        )
    place = Place(found.layout, found.zero_stage, found.precision, {})
    path = place.model_path(folder / "state" / "state", 0, 0)
    first = read_state(path)
    if not first["ds_version"].startswith(FORMAT) or not deepspeed.__version__.startswith(FORMAT):
        raise ValueError(
            f"{folder} is of DeepSpeed {first['ds_version']}, and {deepspeed.__version__} is"
            f" installed: only files of {FORMAT}x are known; use deepspeed {FORMAT}x for both"
        )
    rows = {row.name: row for row in table}
    names = [
        name.removeprefix(PREFIX) for name in first["module"] if name.removeprefix(PREFIX) in rows
    ]
    return replace(place, table={name: rows[name] for name in names}), progress, first


class _Source:
    """The optimizer state of a checkpoint: per file, a flat tensor for each kind (master weight,
    exp_avg, exp_avg_sq) and buffer.
    """

    def __init__(self, place: Place, folder: Path) -> None:
        self.files, self.owned = [], place.optimizer()
        self.scaling = {"loss_scaler": LossScaler(scale=1), "dynamic_loss_scale": False}
        for (tensor, replica), owned in zip(place.optimizer_files, self.owned, strict=True):
            if place.zero_stage == 0:
                found, names = (
                    read_state(place.model_path(folder, tensor, replica)),
                    list(owned.sizes),
                )
                master, states = (
                    [found["module"][PREFIX + name] for name in names],
                    found["optimizer"],
                )
            else:
                found, names = (
                    read_state(place.optimizer_path(folder, tensor, replica))[
                        "optimizer_state_dict"
                    ],
                    list(owned.sizes),
                )
                if place.precision == "float16":
                    self.scaling = {name: found[name] for name in self.scaling}
                third = place.zero_stage == 3
                master = found["fp32_flat_groups" if third else "single_partition_of_fp32_groups"]
                states = found["optimizer_state_dict" if third else "base_optimizer_state"]
            assert len(master) == len(states["state"]) == len(names), (
                f"{folder}: {len(master)} groups, not {len(names)}"
            )
            self.files.append(
                {"master": dict(zip(names, (x.detach().reshape(-1) for x in master), strict=True))}
                | {
                    kind: {
                        name: states["state"][n][kind].reshape(-1) for n, name in enumerate(names)
                    }
                    for kind in KINDS[1:]
                }
            )
            self.step, self.group = states["state"][0]["step"].clone(), states["param_groups"][0]
        # What every tensor rank has whole lies at other places in each one's row: it is taken from
        # the first.
        cut = place.shards
        for (tensor, _), owned in zip(place.optimizer_files, self.owned, strict=True):
            owned.pieces = [piece for piece in owned.pieces if tensor == 0 or piece.tensor in cut]


class _Moves:
    """The copies from the source checkpoint's buffers to the buffers of each target file."""

    def __init__(self, source: _Source, destinations: list[Owned]) -> None:
        self.source, self.destinations = source, destinations
        self.copies: dict[int, list[Copy]] = defaultdict(list)
        for copy in make_plan(source.owned, destinations).copies:
            self.copies[copy.destination].append(copy)

    def buffers(
        self, destination: int, kind: str, dtype: torch.dtype = torch.float32
    ) -> dict[str, torch.Tensor]:
        """The filled buffers of target file number `destination`: {buffer: flat tensor of `dtype`}.
        `kind`: master, exp_avg or exp_avg_sq. Padding is 0.
        """
        made = {
            name: torch.zeros(size, dtype=dtype)
            for name, size in self.destinations[destination].sizes.items()
        }
        for copy in self.copies[destination]:
            taken = copy.taken.view(self.source.files[copy.source][kind][copy.taken.buffer])
            copy.put.view(made[copy.put.buffer]).copy_(taken)
        return made


def reshard_checkpoint(
    source: Path,
    target: Path,
    table: Sequence[ParameterSpec],
    layout: Layout,
    zero_stage: Literal[0, 1, 2, 3],
) -> None:
    """Write the checkpoint `source`, converted to `layout` and `zero_stage`, into the empty folder
    `target`. The caller then writes the digests (`seal`).

    Raises `ValueError` if the source cannot be read or the target layout is invalid, and `OSError`
    if the disk is full.
    """
    place, progress, first = read_place(source, table)
    training = TrainingConfig(
        zero_stage=zero_stage,  # pyright: ignore[reportArgumentType]
        precision=place.precision,
    )
    to = replace(place, layout=layout, zero_stage=zero_stage)
    files, moves = (
        target / "state" / "state",
        _Moves(_Source(place, source / "state" / "state"), to.optimizer() + to.weights()),
    )
    for folder in (files, target / "random"):
        folder.mkdir(parents=True)
    for number, (tensor, replica) in enumerate(to.optimizer_files):
        whole = None
        if zero_stage < 3 and replica == 0:
            whole = moves.buffers(
                len(to.optimizer_files) + tensor, "master", getattr(torch, place.precision)
            )
        states = {kind: moves.buffers(number, kind) for kind in KINDS}
        if zero_stage == 3 or replica == 0:
            write_state(
                _model_state(to, first, tensor, whole, states, moves.source),
                to.model_path(files, tensor, replica),
            )
        if zero_stage:
            write_state(
                _optimizer_state(to, first, states, moves.source),
                to.optimizer_path(files, tensor, replica),
            )
    for rank in range(layout.size):
        taken = source / "random" / f"rank_{rank % place.layout.size:05d}.safetensors"
        shutil.copyfile(taken, target / "random" / f"rank_{rank:05d}.safetensors")
    for name in ("model", "roles"):  # other roles keep their layout
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
    write_progress(target, replace(progress, layout=written_under(layout, training)))


def _adam(
    names: Sequence[str], states: Mapping[str, Mapping[str, torch.Tensor]], source: _Source
) -> dict[str, Any]:
    """The state dict of torch's AdamW for parameters in the order of `names`."""
    each = {
        n: {"step": source.step.clone()} | {kind: states[kind][name] for kind in KINDS[1:]}
        for n, name in enumerate(names)
    }
    return {"state": each, "param_groups": [{**source.group, "params": list(range(len(names)))}]}


def _model_state(
    place: Place,
    first: Mapping[str, Any],
    tensor: int,
    whole: Mapping[str, torch.Tensor] | None,
    states: Mapping[str, Mapping[str, torch.Tensor]],
    source: _Source,
) -> dict[str, Any]:
    """Content of DeepSpeed's `..._model_states.pt`: the source's, with the fields that depend on
    the layout replaced.
    """
    shapes, stage = place.shapes(tensor), place.zero_stage
    embedding = next(iter(place.table))
    module: OrderedDict[str, torch.Tensor] = OrderedDict()
    for key in first["module"]:
        name = key.removeprefix(PREFIX)
        name = name if name in place.table else embedding  # a tied head
        empty = torch.empty(0, dtype=getattr(torch, place.precision))
        module[key] = empty if whole is None else whole[name].view(shapes[name])
    adam = None
    if stage == 0:
        shaped = {
            kind: {name: flat.view(shapes[name]) for name, flat in states[kind].items()}
            for kind in KINDS
        }
        adam = _adam(list(shapes), shaped, source)
    sizes = OrderedDict((PREFIX + name, torch.Size(shape)) for name, shape in shapes.items())
    return {
        **first,
        "module": module,
        "optimizer": adam,
        "param_shapes": [sizes] if stage else None,
        "shared_params": {} if stage else None,
        "frozen_param_shapes": OrderedDict() if stage > 1 else None,
        "frozen_param_fragments": OrderedDict() if stage > 1 else None,
        "global_samples": first["global_steps"] * place.replicas,
        "dp_world_size": place.replicas,
        "mp_world_size": place.layout.tensor,
        "checkpoint_parallel_dimensions": {
            **first["checkpoint_parallel_dimensions"],
            "tp_degree": place.layout.tensor,
        },
        "ds_config": _settings(place, first),
    }


def _settings(place: Place, first: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration as stored in the checkpoint; information only."""
    zero = {**first["ds_config"]["zero_optimization"], "stage": place.zero_stage}
    return {**first["ds_config"], "zero_optimization": zero, "train_batch_size": place.replicas}


def _optimizer_state(
    place: Place,
    first: Mapping[str, Any],
    states: Mapping[str, Mapping[str, torch.Tensor]],
    source: _Source,
) -> dict[str, Any]:
    """Content of a rank's `..._optim_states.pt` of DeepSpeed."""
    names = list(states["master"])
    adam, master = _adam(names, states, source), [states["master"][name] for name in names]
    state: dict[str, Any] = {
        "zero_stage": ZeroStageEnum(place.zero_stage),
        **source.scaling,
        "overflow": False,
    }
    if place.zero_stage == 3:
        state |= {
            "partition_count": place.replicas,
            "optimizer_state_dict": adam,
            "fp32_flat_groups": master,
        }
    else:
        state |= {
            "clip_grad": first["ds_config"]["gradient_clipping"],
            "base_optimizer_state": adam,
            "single_partition_of_fp32_groups": master,
            "group_paddings": [0],  # those of `master` are part of it
            "param_alignment_paddings": [[0] * len(place.table)],
            "partition_count": [place.replicas],
            "ds_version": first["ds_version"],
            "param_slice_mappings": [],
        }
    return {
        "optimizer_state_dict": state,
        "ds_config": _settings(place, first),
        "ds_version": first["ds_version"],
    }
