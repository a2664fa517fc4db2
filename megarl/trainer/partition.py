"""Parameters that are ZeRO 3 parameters from the start: a rank has its slice, never the whole.

DeepSpeed's `zero.Init` builds a parameter whole, sends it from rank 0 to all and cuts it. Where
each rank has read its slice already, only DeepSpeed's records of the parameter are to be made.
"""

from __future__ import annotations

import contextlib
import sys

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, free_param
from torch import nn

from megarl.parallel.deepspeed_view import DeepSpeedView
from megarl.parallel.mesh import ProcessMesh


class Partitioner:
    """Creates ZeRO 3 parameters from this rank's slices. A slice has ceil(numel / n) elements in
    flat order, where n is the number of data x sequence ranks.
    """

    def __init__(self, settings: dict[str, object], mesh: ProcessMesh, dtype: torch.dtype) -> None:
        """`settings`: the DeepSpeed configuration that the engine is later created with."""
        view = DeepSpeedView(mesh)
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            deepspeed.init_distributed(
                dist_init_required=False, auto_mpi_discovery=False, verbose=False
            )
            # With a module, if an empty one, DeepSpeed also puts in place its linear function that
            # does not keep gathered weights alive.
            self._init = deepspeed.zero.Init(
                module=nn.Module(),
                data_parallel_group=view.get_data_parallel_group(),
                config_dict_or_path=settings,
                dtype=dtype,
                mpu=view,
            )
        self._num_slices = mesh.gradient.size

    def __call__(self, part: torch.Tensor, shape: torch.Size, requires_grad: bool) -> nn.Parameter:
        """A ZeRO 3 parameter from this rank's padded slice `part`. `shape`: shape of the
        tensor-parallel shard.
        """
        # A view of one element: DeepSpeed asks for the shape, and nothing whole is allocated.
        unfilled = torch.zeros(1, dtype=part.dtype, device=part.device).expand(shape)
        parameter = nn.Parameter(unfilled, requires_grad=requires_grad)
        self._init._convert_to_deepspeed_param(parameter)
        made: torch.Tensor = part
        made.ds_numel = part.numel()  # type: ignore[attr-defined]
        made.status = PartitionedParamStatus.AVAILABLE  # type: ignore[attr-defined]
        made.final_location = None  # type: ignore[attr-defined]
        parameter.ds_tensor = made  # type: ignore[attr-defined]
        parameter.ds_numel_aligned = part.numel() * self._num_slices  # type: ignore[attr-defined]
        free_param(parameter)
        return parameter
