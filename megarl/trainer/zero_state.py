"""The state of a trained model in a checkpoint: float32 master weights and the optimizer's moments,
as parts of whole parameters that a run of any layout and ZeRO stage can read.

    state/rank_00003.safetensors    "KIND/NAME": a flat float32 tensor, a rank's part of parameter
                                    NAME; KIND is `master` or a name of the optimizer, `exp_avg`;
                                    in the header: which boxes of the whole parameter the part is,
                                    and what is not a tensor

A part is what DeepSpeed keeps on the rank: under ZeRO 0 all of the tensor-parallel shard, under
ZeRO 1 and 2 the elements that are in the rank's share of all parameters in a row, under ZeRO 3 its
slice of the shard. What several ranks hold is written by the first. A reading rank finds its own
parts in all files by the plan that also moves weights between layouts, without DeepSpeed's padding.

The weights that layers compute with are the master weights, rounded, so they are made of them.
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
from megarl.parallel.tensor import whole_shapes
from megarl.trainer.model import RoleModel

MASTER = "master"


class _OwnPart(NamedTuple):
    """Elements [start, start + count) of a parameter's tensor-parallel shard, which this rank keeps
    at `offset` of the flat float32 tensor `flat`, the parameter of the inner optimizer.
    """

    flat: torch.Tensor
    offset: int
    start: int
    count: int

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's elements of the parameter in `values`, as a flat view. `values`: a tensor
        with as many elements as `flat`, such as one of the optimizer's moments.
        """
        return values.data.view(-1).narrow(0, self.offset, self.count)


class TrainState:
    """Reads and writes the state of a trained model in a checkpoint: float32 master weights and the
    optimizer's moments, in files that a run of any layout and ZeRO stage can read. `optimizer`:
    DeepSpeed's, which trains `module` under ZeRO stage `stage` on `mesh`. The tensors are
    DeepSpeed's own; nothing is copied until a file is written.
    """

    def __init__(self, optimizer: Any, module: RoleModel, mesh: ProcessMesh, stage: int) -> None:
        self._optimizer, self._module, self._mesh, self._stage = optimizer, module, mesh, stage
        self._inner: Any = getattr(optimizer, "optimizer", optimizer)  # under ZeRO it is wrapped

    def write(self, folder: Path, files: RankFiles, about: Mapping[str, Any]) -> None:
        """Add this rank's file, rank_NNNNN.safetensors in `folder`, to `files`, the collected files
        of a checkpoint. Tensors that a lower rank holds too are left out; without ZeRO, most
        data-parallel ranks have no file. `about`: further values for the file's header, of JSON's
        types, which `read` returns.
        """
        if self._stage == 0 and self._mesh.gradient.rank > 0:
            return
        tensors, boxes, numbers = dict[str, torch.Tensor](), {}, {}
        shapes = self._shapes()
        for name, part, found in self._own():
            if self._mesh.tensor.rank > 0 and name not in self._module.shards:
                continue
            boxes[name] = found
            state = self._inner.state.get(part.flat, {})
            tensors[f"{MASTER}/{name}"] = part.of(part.flat)
            for kind, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == part.flat.shape:
                    tensors[f"{kind}/{name}"] = part.of(value)
                else:  # a count of steps: torch's is a tensor, DeepSpeed's an integer
                    numbers[kind] = value.item() if isinstance(value, torch.Tensor) else value
        group = self._inner.param_groups[0] if self._inner.param_groups else {}
        about = {**about, "boxes": boxes, "numbers": numbers, "step": group.get("step")}
        about["shapes"] = {name: shapes[name] for name in boxes}
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        output, dtypes = Output(Path(), Owned([], sizes), {}), dict.fromkeys(sizes, torch.float32)
        folder.mkdir(parents=True, exist_ok=True)
        file = files.create(folder / f"rank_{self._mesh.rank:05d}.safetensors")
        file.write(safetensors_header(output, dtypes, {"about": json.dumps(about)}))
        for name in output.order(dtypes):
            if tensors[name].dtype != torch.float32:
                raise RuntimeError(f"{name} is {tensors[name].dtype}, not float32")
            file.write(tensors[name].cpu().view(torch.uint8).numpy().data)

    def read(self, folder: Path) -> dict[str, Any]:
        """Restore master weights, moments and weights from the files that `write` made in `folder`,
        under whatever layout; returns a dict with the entries of `about` that `write` was given.
        All ranks call it together. Raises `UserError` if the files are of a model with other
        trained parameters or shapes (on all ranks), or lack a moment.
        """
        files = [Store([path]) for path in sorted(folder.glob("rank_*.safetensors"))]
        headers = [json.loads(file.metadata["about"]) for file in files]
        self._refuse_other(folder, headers)
        sources, own = [], Owned()
        for header in headers:
            sources.append(Owned())
            for name, boxes in header["boxes"].items():
                for box in boxes:
                    sources[-1].add(name, Box(*box), name)
        parts = dict[str, _OwnPart]()
        for name, part, boxes in self._own():
            parts[name] = part
            for box in boxes:
                own.add(name, box, name)
        kinds = dict.fromkeys(key.partition("/")[0] for file in files for key in file.shapes)
        views = {kind: self._views(kind, parts) for kind in kinds}
        for copy in make_plan(sources, [own]).copies:
            name = copy.taken.buffer
            for kind, of_kind in views.items():
                if f"{kind}/{name}" not in files[copy.source].shapes:
                    raise UserError(f"{folder} lacks {kind} of {name}; use an earlier checkpoint")
                taken = copy.taken.view(files[copy.source].flat(f"{kind}/{name}"))
                copy.put.view(of_kind[copy.put.buffer]).copy_(taken)
        for part in parts.values():
            for kind, number in headers[0]["numbers"].items():
                value = torch.tensor(number, device=part.flat.device)
                self._inner.state[part.flat][kind] = value if isinstance(number, float) else number
        for group in self._inner.param_groups if headers[0]["step"] is not None else ():
            group["step"] = headers[0]["step"]
        self._round()
        return headers[0]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape of the whole parameter} of all parameters that are trained."""
        whole = whole_shapes(self._module.model, self._module.shards)
        named = self._module.model.named_parameters()
        return {name: whole[name] for name, parameter in named if parameter.requires_grad}

    def _refuse_other(self, folder: Path, headers: list[dict[str, Any]]) -> None:
        """Raise `UserError` unless the files of these headers are of a model like this one."""
        found = dict(pair for header in headers for pair in header["shapes"].items())
        wanted = {name: list(shape) for name, shape in self._shapes().items()}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise UserError(
                    f"{folder} is the state of another model: {name} is {found.get(name, 'absent')}"
                    f" there and {wanted.get(name, 'absent')} here; set the model of the role to"
                    " the one that was trained, or set folder to a new one"
                )

    def _views(self, kind: str, parts: Mapping[str, _OwnPart]) -> dict[str, torch.Tensor]:
        """{parameter: this rank's part of its tensor `kind`, such as exp_avg}. Before the
        optimizer's first step there is none, and it is made, of zeros.
        """
        if kind == MASTER:
            return {name: part.of(part.flat) for name, part in parts.items()}
        for part in parts.values():
            state = self._inner.state[part.flat]
            if kind not in state:
                state[kind] = torch.zeros_like(part.flat.data)
        return {name: part.of(self._inner.state[part.flat][kind]) for name, part in parts.items()}

    def _own(self) -> Iterator[tuple[str, _OwnPart, list[Box]]]:
        """(name, place, boxes of the whole parameter) of what this rank holds of each trained
        parameter of which it holds something.
        """
        model, shards = self._module.model, self._module.shards
        shapes, rank = self._shapes(), self._mesh.tensor.rank
        for name, parameter in model.named_parameters():
            part = self._part(parameter) if parameter.requires_grad else None
            if part is not None and part.count:
                box = shard_box(name, shapes[name], shards.get(name), rank)
                found = flat_boxes(box, part.start, part.start + part.count)
                yield name, part, [one for one, _ in found]

    def _part(self, parameter: Any) -> _OwnPart | None:
        """Where DeepSpeed keeps this rank's part of a parameter; None where it has none."""
        if self._stage == 0:
            return _OwnPart(parameter, 0, 0, parameter.numel())
        if self._stage == 3:
            group, offset, length = self._slice(parameter)
            start = self._mesh.gradient.rank * length
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
        """(group, offset, length) of this rank's padded slice of a parameter under ZeRO 3."""
        optimizer = self._optimizer
        return optimizer.grad_position[optimizer.get_param_id(parameter)]

    def _round(self) -> None:
        """Make the weights that layers compute with of the master weights."""
        if self._stage in (1, 2):
            self._optimizer.update_lp_params()
        if self._stage < 3:
            return
        for parameter in self._module.model.parameters():
            one: Any = parameter
            if one.requires_grad:
                if one.ds_status == ZeroParamStatus.AVAILABLE:
                    one.partition()  # DeepSpeed keeps small ones gathered, which would be stale
                group, offset, length = self._slice(one)
                flat = self._optimizer.fp32_partitioned_groups_flat[group]
                one.ds_tensor.data.copy_(flat.data.narrow(0, offset, length))
