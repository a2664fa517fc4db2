"""The state of a trained model in a checkpoint: float32 master weights and the optimizer's moments,
as parts of whole parameters that a run of any layout and ZeRO stage can read.

    state/rank_00003.safetensors    "KIND/NAME": a flat float32 tensor, a rank's part of parameter
                                    NAME; KIND is `master` or a name of the optimizer, `exp_avg`,
                                    or `buffer` for a whole one, in rank 0's file;
                                    in the header: which boxes of the whole parameter the part is,
                                    and what is not a tensor

A part is what DeepSpeed keeps on the rank: under ZeRO 0 its tensor-parallel shard, under ZeRO 1 and
2 what is in its share of all parameters in a row, under ZeRO 3 its slice of the shard. What several
ranks hold is written by the first. A reader finds its parts by the plan that also moves weights
between layouts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from megarl.checkpoints.export import Output, safetensors_header
from megarl.checkpoints.rank_files import RankFiles
from megarl.checkpoints.store import Store
from megarl.errors import UserError
from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.reshard.boxes import Box, Owned, flat_boxes
from megarl.parallel.reshard.owned import shard_box
from megarl.parallel.reshard.plan import make_plan
from megarl.parallel.tensor import replicas, whole_shapes
from megarl.trainer.model import RoleModel
from megarl.weights.published import kept_buffers

MASTER, BUFFER = "master", "buffer"


class _OwnPart(NamedTuple):
    """Elements [start, start + count) of a parameter's tensor-parallel shard, at `offset` of
    `flat`, the inner optimizer's parameter.
    """

    flat: torch.Tensor
    offset: int
    start: int
    count: int

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's elements as a flat view of `values`, which is like `flat`."""
        return values.data.view(-1).narrow(0, self.offset, self.count)


class TrainState:
    """Reads and writes a trained model's state in a checkpoint."""

    def __init__(self, optimizer: Any, module: RoleModel, mesh: ProcessMesh, stage: int) -> None:
        self._optimizer, self._module, self._mesh, self._stage = optimizer, module, mesh, stage
        self._inner: Any = getattr(optimizer, "optimizer", optimizer)  # under ZeRO it is wrapped

    def write(self, folder: Path, files: RankFiles, header: Mapping[str, Any]) -> None:
        """Add this rank's file to `files`; without ZeRO, most data-parallel ranks have none.
        `header`: values of JSON's types for the header, which `read` returns.
        """
        tensors, boxes, numbers = dict[str, torch.Tensor](), {}, {}
        shapes = self._shapes()
        for name, share, own_boxes in self._own():
            shard = self._module.shards.get(name)
            is_copy = self._stage == 0 and replicas(shard, self._mesh).rank > 0
            if is_copy or (shard is None and self._mesh.tensor.rank > 0):
                continue
            boxes[name] = own_boxes
            state = self._inner.state.get(share.flat, {})
            tensors[f"{MASTER}/{name}"] = share.of(share.flat)
            for slot, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == share.flat.shape:
                    tensors[f"{slot}/{name}"] = share.of(value)
                else:  # a count of steps: torch's is a tensor, DeepSpeed's an integer
                    numbers[slot] = value.item() if isinstance(value, torch.Tensor) else value
        if self._stage == 0 and not tensors:
            return
        group = self._inner.param_groups[0] if self._inner.param_groups else {}
        header = {**header, "boxes": boxes, "numbers": numbers, "step": group.get("step")}
        header["shapes"] = {name: shapes[name] for name in boxes}
        if self._mesh.rank == 0:
            buffers = kept_buffers(self._module.model)
            tensors |= {f"{BUFFER}/{name}": value.view(-1) for name, value in buffers.items()}
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        output, dtypes = Output(Path(), Owned([], sizes), {}), dict.fromkeys(sizes, torch.float32)
        folder.mkdir(parents=True, exist_ok=True)
        file = files.create(folder / f"rank_{self._mesh.rank:05d}.safetensors")
        file.write(safetensors_header(output, dtypes, {"about": json.dumps(header)}))
        for name in output.order(dtypes):
            if tensors[name].dtype != torch.float32:
                raise RuntimeError(f"{name} is {tensors[name].dtype}, not float32")
            file.write(tensors[name].cpu().view(torch.uint8).numpy().data)

    def read(self, folder: Path) -> dict[str, Any]:
        """Restore master weights, moments and weights from `folder`, written under any layout;
        returns `about`. Raises `UserError` for a model with other trained parameters or shapes (on
        all ranks), or a missing moment. Collective.
        """
        files = [Store([path]) for path in sorted(folder.glob("rank_*.safetensors"))]
        headers = [json.loads(file.metadata["about"]) for file in files]
        self._refuse_other(folder, headers)
        sources, owned = [], Owned()
        for header in headers:
            sources.append(Owned())
            for name, boxes in header["boxes"].items():
                for box in boxes:
                    sources[-1].add(name, Box(*box), name)
        parts = dict[str, _OwnPart]()
        for name, share, boxes in self._own():
            parts[name] = share
            for box in boxes:
                owned.add(name, box, name)
        slots = dict.fromkeys(key.partition("/")[0] for file in files for key in file.shapes)
        slots.pop(BUFFER, None)
        for name, buffer in kept_buffers(self._module.model).items():
            if f"{BUFFER}/{name}" in files[0].shapes:
                buffer.view(-1).copy_(files[0].flat(f"{BUFFER}/{name}"))
        views = {slot: self._views(slot, parts) for slot in slots}
        for copy in make_plan(sources, [owned]).copies:
            name = copy.taken.buffer
            for slot, tensors_of in views.items():
                if f"{slot}/{name}" not in files[copy.source].shapes:
                    raise UserError(f"{folder} lacks {slot} of {name}; use an earlier checkpoint")
                values = copy.taken.view(files[copy.source].flat(f"{slot}/{name}"))
                copy.put.view(tensors_of[copy.put.buffer]).copy_(values)
        for share in parts.values():
            for slot, number in headers[0]["numbers"].items():
                value = torch.tensor(number, device=share.flat.device)
                self._inner.state[share.flat][slot] = value if isinstance(number, float) else number
        for group in self._inner.param_groups if headers[0]["step"] is not None else ():
            group["step"] = headers[0]["step"]
        self._round()
        return headers[0]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the trained parameters."""
        whole = whole_shapes(self._module.model, self._module.shards)
        named = self._module.model.named_parameters()
        return {name: whole[name] for name, parameter in named if parameter.requires_grad}

    def _refuse_other(self, folder: Path, headers: list[dict[str, Any]]) -> None:
        """Raise `UserError` unless the files of these headers are of a model like this one."""
        saved = dict(pair for header in headers for pair in header["shapes"].items())
        expected = {name: list(shape) for name, shape in self._shapes().items()}
        for name in sorted(saved.keys() | expected.keys()):
            if saved.get(name) != expected.get(name):
                raise UserError(
                    f"{folder} is the state of another model: {name} is {saved.get(name, 'absent')}"
                    f" there and {expected.get(name, 'absent')} here; set the model of the role to"
                    " the one that was trained, or set folder to a new one"
                )

    def _views(self, slot: str, parts: Mapping[str, _OwnPart]) -> dict[str, torch.Tensor]:
        """{parameter: this rank's part of its tensor `slot`}; made of zeros before the first
        optimizer step.
        """
        if slot == MASTER:
            return {name: share.of(share.flat) for name, share in parts.items()}
        states = self._inner.state
        for share in parts.values():
            if slot not in states[share.flat]:
                states[share.flat][slot] = torch.zeros_like(share.flat.data)
        return {name: share.of(states[share.flat][slot]) for name, share in parts.items()}

    def _own(self) -> Iterator[tuple[str, _OwnPart, list[Box]]]:
        """(name, share, boxes of the whole parameter) of what this rank holds."""
        model, shards = self._module.model, self._module.shards
        shapes = self._shapes()
        for name, parameter in model.named_parameters():
            shard = shards.get(name)
            replica = replicas(shard, self._mesh).rank
            share = self._part(parameter, replica) if parameter.requires_grad else None
            if share is not None and share.count:
                rank = shard.of(self._mesh).rank if shard else 0
                box = shard_box(name, shapes[name], shard, rank)
                regions = flat_boxes(box, share.start, share.start + share.count)
                yield name, share, [inner for inner, _ in regions]

    def _part(self, parameter: Any, replica: int) -> _OwnPart | None:
        """Where DeepSpeed keeps this rank's part of a parameter, if it does. `replica`: index among
        the ranks that share it.
        """
        if self._stage == 0:
            return _OwnPart(parameter, 0, 0, parameter.numel())
        if self._stage == 3:
            group, offset, length = self._slice(parameter)
            start = replica * length
            count = max(0, min(length, parameter.ds_numel - start))  # without padding
            return _OwnPart(
                self._optimizer.fp32_partitioned_groups_flat[group], offset, start, count
            )
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        held, local = mapping.hp_fragment_address, mapping.lp_fragment_address
        flat = self._inner.param_groups[mapping.param_group_index]["params"][0]
        return _OwnPart(flat, held.start, local.start, held.numel)

    def _slice(self, parameter: Any) -> tuple[int, int, int]:
        """(group, offset, length) of this rank's padded slice under ZeRO 3."""
        optimizer = self._optimizer
        return optimizer.grad_position[optimizer.get_param_id(parameter)]

    def _round(self) -> None:
        """Make the weights that layers compute with of the master weights."""
        if self._stage in (1, 2):
            self._optimizer.update_lp_params()
        if self._stage < 3:
            return
        parameters: Any = self._module.model.parameters()
        for parameter in parameters:
            if parameter.requires_grad:
                if parameter.ds_status == ZeroParamStatus.AVAILABLE:
                    parameter.partition()  # small ones stay gathered, and would be stale
                group, offset, length = self._slice(parameter)
                flat = self._optimizer.fp32_partitioned_groups_flat[group]
                parameter.ds_tensor.data.copy_(flat.data.narrow(0, offset, length))
