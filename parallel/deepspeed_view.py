"""The process mesh in the form of the `mpu` object that DeepSpeed expects.

DeepSpeed is given data x sequence as its data-parallel group and knows nothing of sequence
parallelism, which its ZeRO stages 1-2 and 3 scale differently; the trainer scales the loss instead.
The class must not have an attribute `initialize_sequence_parallel`: its presence alone makes
DeepSpeed use no groups at all.
"""

from __future__ import annotations

import torch.distributed as dist

from megarl.parallel.mesh import ProcessMesh


class DeepSpeedView:
    """A mesh with the interface that DeepSpeed expects of its `mpu` (model-parallel unit)
    argument.
    """

    def __init__(self, mesh: ProcessMesh) -> None:
        self._gradient, self._tensor = mesh.gradient, mesh.tensor
        self._gradient_group, self._tensor_group = (
            mesh.group(mesh.gradient),
            mesh.group(mesh.tensor),
        )

    def use(self) -> None:
        """Make this mesh's groups those that DeepSpeed uses in this process.

        DeepSpeed keeps one `mpu` for the process, that of the engine made last, and asks it at each
        gradient reduction of an engine without ZeRO. With roles under several layouts, an engine
        would reduce over another role's ranks.
        """
        from deepspeed.utils import groups

        groups.mpu = self

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Process group of the ranks with the same weights: data x sequence."""
        return self._gradient_group

    def get_data_parallel_world_size(self) -> int:
        return self._gradient.size

    def get_data_parallel_rank(self) -> int:
        return self._gradient.rank

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Process group of the tensor-parallel ranks."""
        return self._tensor_group

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
