"""Which elements of a run's parameters each of DeepSpeed's checkpoint files holds.

What DeepSpeed's files hold of a tensor rank's parameters, in the model's order:

    ZeRO 0       every parameter, in the one file of the tensor rank
    ZeRO 1, 2    rank r of n (data x sequence): the r-th part of all of them in a row, padded to a
                 multiple of 2 n
    ZeRO 3       the r-th part of each, padded to a multiple of n, in a row; in groups of SUB_GROUP
                 elements or a little more
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import ZEROS, Box, Owned
from megarl.parallel.reshard.owned import training_owned
from megarl.trainer.config import DtypeName
from megarl.weight_sync.parameters import ParameterSpec, training_shards

SUB_GROUP = 10**9
"""DeepSpeed's default `sub_group_size` in elements, which megarl does not change."""
ALIGN = 2
"""DeepSpeed's `nccl_start_alignment_factor`: flat buffers are padded to this multiple per rank."""
PREFIX = "model."
"""Prefix of parameter names in DeepSpeed's files; names in Hugging Face checkpoints do not have it.
"""


@dataclass(frozen=True)
class Place:
    """The layout, ZeRO stage, precision and parameters (in the model's order) of a checkpoint, from
    which follows what each of DeepSpeed's files holds.
    """

    layout: Layout
    zero_stage: int
    precision: DtypeName
    table: Mapping[str, ParameterSpec]

    @property
    def replicas(self) -> int:
        """Number of ranks over which ZeRO partitions the state of one tensor rank: data x
        sequence.
        """
        return self.layout.size // self.layout.tensor

    @property
    def optimizer_files(self) -> list[tuple[int, int]]:
        """(tensor rank, data x sequence rank) of each file of optimizer state. ZeRO 0 has one file
        for each tensor rank.
        """
        replicas = self.replicas if self.zero_stage else 1
        return [
            (tensor, replica) for tensor in range(self.layout.tensor) for replica in range(replicas)
        ]

    def model_path(self, folder: Path, tensor: int, replica: int) -> Path:
        """Path of a rank's `..._model_states.pt`. ZeRO 0 to 2 write one with weights for each
        tensor rank; ZeRO 3 writes one without weights for each rank.
        """
        part = f"zero_pp_rank_{replica}_" if self.zero_stage == 3 else ""
        return folder / f"{part}mp_rank_{tensor:02d}_model_states.pt"

    def optimizer_path(self, folder: Path, tensor: int, replica: int) -> Path:
        half = "bf16_" if self.precision == "bfloat16" else ""
        return folder / f"{half}zero_pp_rank_{replica}_mp_rank_{tensor:02d}_optim_states.pt"

    @property
    def shards(self) -> dict[str, Any]:
        return training_shards(list(self.table.values()), self.layout.tensor)

    def weights(self) -> list[Owned]:
        """For each tensor rank, the parts of the weights it holds, one buffer for each
        parameter.
        """
        shapes = {name: row.shape for name, row in self.table.items()}
        return training_owned(shapes, self.shards, Layout(tensor=self.layout.tensor), 0)

    def shapes(self, tensor: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensor shards on tensor rank `tensor`, by parameter name."""
        made = {}
        for name, row in self.table.items():
            shard = self.shards.get(name)
            made[name] = tuple(
                shard.lengths[tensor] if shard is not None and dim == shard.dim else length
                for dim, length in enumerate(row.shape)
            )
        return made

    def optimizer(self) -> list[Owned]:
        """For each of `optimizer_files`, the parts of the parameters whose optimizer state it
        holds.
        """
        weights = self.weights()
        if self.zero_stage == 0:
            return weights
        cut = _each_cut if self.zero_stage == 3 else _row_cut
        return [
            cut(weights[tensor], replica, self.replicas) for tensor, replica in self.optimizer_files
        ]


def _row_cut(owned: Owned, replica: int, replicas: int) -> Owned:
    """ZeRO 1 and 2: the parameters are concatenated and padded; rank `replica` holds one of
    `replicas` equal parts of the result.
    """
    row = Owned()
    for piece in owned.pieces:
        row.add(piece.tensor, piece.box, "0")
    row.add(ZEROS, Box(0, -row.sizes["0"] % (ALIGN * replicas), 0, 1), "0")
    return row.slice(replica, replicas)


def _each_cut(owned: Owned, replica: int, replicas: int) -> Owned:
    """ZeRO 3: rank `replica` holds a padded part of each parameter. The parts are concatenated into
    groups; a group ends once it has `SUB_GROUP` elements.
    """
    parts, made, group = owned.slice(replica, replicas), Owned(), 0
    pieces = defaultdict(list)
    for piece in parts.pieces:
        pieces[piece.buffer].append(piece)
    for name, size in owned.sizes.items():
        for piece in pieces[name]:
            made.add(piece.tensor, piece.box, str(group))
        made.add(ZEROS, Box(0, -(-size // replicas) - parts.sizes[name], 0, 1), str(group))
        group += made.sizes[str(group)] >= SUB_GROUP
    return made
