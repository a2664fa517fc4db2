"""Transport `cuda_ipc`: trainer ranks and engines share the GPUs of one host. No test of it has
passed on a GPU yet.

As `shared_memory`, but each engine rank receives on the GPU that it shares with the trainer rank of
its number. Other ranks open that memory through CUDA IPC handles. Counters stay in host memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megarl.parallel.collectives import gather_objects
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.buckets import Bucket
from megarl.weights.route import Route
from megarl.weights.transports import shared_memory
from megarl.weights.transports.base import Watch

# Positions in the arguments that `reduce_tensor` makes for `rebuild_cuda_tensor`; the other
# arguments are known for a tensor of bytes.
HANDLE = slice(7, 10)
"""Indices, in the arguments of `rebuild_cuda_tensor`, of (IPC handle, storage size, tensor offset),
in bytes.
"""
EVENTS = slice(11, 15)
"""As `HANDLE`: (reference counter's handle and offset, event handle, whether to wait for it)."""


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise ValueError(
            "weight_sync.transport cuda_ipc needs GPUs, and there are none here; set"
            " weight_sync.transport to shared_memory"
        )


def _uuid(device: int) -> str:
    """Unlike its index, it does not depend on the GPUs that a process sees."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _export_handle(memory: torch.Tensor) -> dict[str, Any]:
    """JSON-like data with which another process opens a uint8 tensor on a GPU."""
    arguments = reduce_tensor(memory)[1]
    plain = [
        value.hex() if isinstance(value, bytes) else value
        for value in (*arguments[HANDLE], *arguments[EVENTS])
    ]
    return {
        "gpu": _uuid(memory.get_device()),
        "size": memory.numel(),
        "start": memory.storage_offset(),
        "handles": plain,
    }


def _open_handle(exported: dict[str, Any]) -> torch.Tensor:
    """Inverse of `_export_handle`. Raises `ValueError` if this process does not see the GPU."""
    gpus = {_uuid(device): device for device in range(torch.cuda.device_count())}
    if exported["gpu"] not in gpus:
        raise ValueError(
            f"weight_sync.transport cuda_ipc: GPU {exported['gpu']} has weights for this process,"
            f" which sees only {sorted(gpus)}; set weight_sync.transport to point_to_point, or let"
            " every process see all GPUs of the host"
        )
    handles = [
        bytes.fromhex(value) if isinstance(value, str) else value for value in exported["handles"]
    ]
    shape = torch.Tensor, (exported["size"],), (1,), exported["start"]
    memory = torch.UntypedStorage, torch.uint8, gpus[exported["gpu"]]
    storage, its_size, its_offset, *events = handles
    return rebuild_cuda_tensor(*shape, *memory, storage, its_size, its_offset, False, *events)  # pyright: ignore[reportCallIssue]


def _synchronize(*memories: torch.Tensor) -> None:
    for device in {torch.cuda.current_device(), *(memory.get_device() for memory in memories)}:
        torch.cuda.synchronize(device)


class Sender(shared_memory.Sender):
    """Of n trainer ranks, rank r allocates the memory of engine ranks r, r + n, ... over all
    engines.
    """

    LOCAL = True

    def __init__(self, route: Route, axis: Axis) -> None:
        """Collective. Raises `ValueError` without a GPU."""
        _require_gpu()
        super().__init__(route, axis)

    def init_info(self) -> dict[str, Any]:
        """As the base class, and "memories": each engine rank's IPC handles."""
        return super().init_info() | {"memories": self._exported}

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        """As the base class, after the GPUs have finished the copies."""
        _synchronize(*self._memories.values())
        super().commit(bucket, watch)

    def _open(self) -> dict[int, torch.Tensor]:
        route, axis = self._route, self._axis
        local = {
            number: torch.empty(shared_memory.memory_bytes(route), dtype=torch.uint8, device="cuda")
            for number in range(route.spec.num_destinations)
            if number % axis.size == axis.rank
        }
        by_rank = gather_objects(
            {number: _export_handle(memory) for number, memory in local.items()}, axis
        )
        self._exported = [
            by_rank[number % axis.size][number] for number in range(route.spec.num_destinations)
        ]
        # An open memory costs this process a CUDA context on its GPU, about half a GiB there.
        written = {copy.destination for bucket in route.copies for copy in bucket}
        peers = {number: _open_handle(self._exported[number]) for number in written - local.keys()}
        return local | peers


class Receiver(shared_memory.Receiver):
    """Receives in memory on its own GPU, into which trainer ranks write."""

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        """Raises `ValueError` without a GPU, or where this process does not see the memory's."""
        _require_gpu()
        super().__init__(route, engine, rank, init_info)

    def _finish_reading(self) -> None:
        _synchronize(self._slots)

    def _open(self, init_info: dict[str, Any]) -> torch.Tensor:
        return _open_handle(init_info["memories"][self._destination])
