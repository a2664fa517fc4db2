"""The mesh as the `mpu` object that DeepSpeed expects.

DeepSpeed sees data x sequence as its data-parallel group and no sequence parallelism at all:
declared sequence parallelism is scaled differently by its ZeRO stages 1-2 and 3. The loss is scaled
by us instead. There must be no attribute named `initialize_sequence_parallel` here: its presence
alone turns DeepSpeed's groups to None.
"""

from __future__ import annotations

import torch.distributed as dist

from megarl.parallel.mesh import ProcessMesh


class DeepSpeedView:
    """Axes under DeepSpeed's names."""

    def __init__(self, mesh: ProcessMesh) -> None:
        self._gradient, self._tensor = mesh.gradient, mesh.tensor
        self._gradient_group, self._tensor_group = (
            mesh.group(mesh.gradient),
            mesh.group(mesh.tensor),
        )

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._gradient_group

    def get_data_parallel_world_size(self) -> int:
        return self._gradient.size

    def get_data_parallel_rank(self) -> int:
        return self._gradient.rank

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tensor_group

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
