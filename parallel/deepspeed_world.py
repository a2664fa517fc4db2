"""DeepSpeed on some of a job's ranks. Its barriers and consistency checks name no process group,
which to torch means every rank of the job; those outside a mesh would never answer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megarl.parallel.mesh import ProcessMesh


class ConfinedBackend:
    """DeepSpeed's communication backend, whose default group is the ranks of a mesh."""

    def __init__(self, backend: Any, mesh: ProcessMesh) -> None:
        self._backend, self._mesh = backend, mesh
        self._group = mesh.group(mesh.world)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def get_rank(self, group: dist.ProcessGroup | None = None) -> int:
        return self._mesh.rank if group is None else self._backend.get_rank(group=group)

    def get_world_size(self, group: dist.ProcessGroup | None = None) -> int:
        return (
            self._mesh.layout.size if group is None else self._backend.get_world_size(group=group)
        )

    def barrier(self, group: dist.ProcessGroup | None = None, **settings: Any) -> Any:
        return self._backend.barrier(group=group or self._group, **settings)

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """`src`: a rank of the job if `group` is given, else an index into the mesh's ranks."""
        if group is None:
            group, src = self._group, self._mesh.ranks[src]
        return self._backend.broadcast(tensor=tensor, src=src, group=group, async_op=async_op)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        return self._backend.all_reduce(tensor, op, group or self._group, async_op)


def confine(mesh: ProcessMesh) -> None:
    """Restrict DeepSpeed in this process to the ranks of `mesh`, on which it is called before an
    engine is made. All models of a process must use the same ranks.
    """
    import deepspeed
    import deepspeed.comm.comm as communication

    deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False, verbose=False)
    backend: Any = communication.cdb
    if isinstance(backend, ConfinedBackend):
        backend = backend._backend
    has_all_ranks = len(mesh.ranks) == dist.get_world_size()
    communication.cdb = backend if has_all_ranks else ConfinedBackend(backend, mesh)
