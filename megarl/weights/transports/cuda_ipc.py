"""Transport `cuda_ipc`: trainer ranks and engines share the GPUs of one host. No test of it
has passed on a GPU yet.

As `shared_memory`, but each engine rank receives in memory of its own, on the GPU that it shares
with the trainer rank of the same number. What that trainer rank owns stays on its GPU; other ranks
open the memory through CUDA IPC handles and write over NVLink or PCIe. Counters stay in host
memory; one is raised only after the GPU has finished the work that it counts.
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
"""Indices, in the arguments of torch's `rebuild_cuda_tensor`, of (CUDA IPC handle of the storage,
size of the storage in bytes, offset of the tensor in bytes)."""
EVENTS = slice(11, 15)
"""Indices, in the arguments of torch's `rebuild_cuda_tensor`, of (handle of the reference counter,
offset of the reference counter, event handle, whether to wait for the event)."""


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise ValueError(
            "weight_sync.transport cuda_ipc needs GPUs, and there are none here; set"
            " weight_sync.transport to shared_memory"
        )


def _uuid(device: int) -> str:
    """A GPU's UUID; its index depends on which GPUs a process sees."""
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
    """The uint8 tensor of another process, from the result of `_export_handle`.

    Raises `ValueError` where this process does not see the tensor's GPU.
    """
    gpus = {_uuid(device): device for device in range(torch.cuda.device_count())}
    if exported["gpu"] not in gpus:
        raise ValueError(
            f"weight_sync.transport cuda_ipc: GPU {exported['gpu']} has weights for this process,"
            f" which sees only {sorted(gpus)}; set weight_sync.transport to point_to_point, or let"
            " every process see all GPUs of the host"
        )
    handles = [bytes.fromhex(one) if isinstance(one, str) else one for one in exported["handles"]]
    shape = torch.Tensor, (exported["size"],), (1,), exported["start"]
    memory = torch.UntypedStorage, torch.uint8, gpus[exported["gpu"]]
    storage, its_size, its_offset, *events = handles
    return rebuild_cuda_tensor(*shape, *memory, storage, its_size, its_offset, False, *events)  # pyright: ignore[reportCallIssue]


def _synchronize(*memories: torch.Tensor) -> None:
    """Wait for all work on the current GPU and on those of `memories`."""
    for device in {torch.cuda.current_device(), *(memory.get_device() for memory in memories)}:
        torch.cuda.synchronize(device)


class Sender(shared_memory.Sender):
    """Trainer rank's half of the transport `cuda_ipc`: writes weights, by CUDA IPC, into memory
    that engine ranks read on the same GPUs.

    Of n trainer ranks, rank r allocates the memory of the engine ranks r, r + n, ..., counted over
    all engines.
    """

    LOCAL = True

    def __init__(self, route: Route, axis: Axis) -> None:
        """Allocate the engine ranks' memory on GPUs and share it. Collective over `axis`, the
        world. Raises `ValueError` without a GPU.
        """
        _require_gpu()
        super().__init__(route, axis)

    def init_info(self) -> dict[str, Any]:
        """What the engine ranks need to connect to this sender, as a dict. Beside the entries of
        the base class (path of the shared counters, number of trainer ranks) it has "memories": the
        CUDA IPC handles by which each engine rank opens its memory.
        """
        return super().init_info() | {"memories": self._exported}

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        """Note that this rank has written its part of `bucket`, after a wait until the GPUs have
        finished its copies. An engine rank reads a bucket once all trainer ranks have noted it.
        """
        _synchronize(*self._memories.values())
        super().commit(bucket, watch)

    def _open(self) -> dict[int, torch.Tensor]:
        route, axis = self._route, self._axis
        own = {
            number: torch.empty(shared_memory.memory_bytes(route), dtype=torch.uint8, device="cuda")
            for number in range(route.spec.num_destinations)
            if number % axis.size == axis.rank
        }
        by_rank = gather_objects(
            {number: _export_handle(memory) for number, memory in own.items()}, axis
        )
        self._exported = [
            by_rank[number % axis.size][number] for number in range(route.spec.num_destinations)
        ]
        # An open memory costs this process a CUDA context on its GPU, about half a GiB there.
        written = {copy.destination for bucket in route.copies for copy in bucket}
        foreign = {number: _open_handle(self._exported[number]) for number in written - own.keys()}
        return own | foreign


class Receiver(shared_memory.Receiver):
    """Engine rank's half of the transport `cuda_ipc`: receives weights in memory on its own GPU,
    into which trainer ranks write.
    """

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        """Open this engine rank's memory.

        Raises `ValueError` without a GPU, or where this process does not see the memory's GPU.
        """
        _require_gpu()
        super().__init__(route, engine, rank, init_info)

    def _finish_reading(self) -> None:
        _synchronize(self._slots)

    def _open(self, init_info: dict[str, Any]) -> torch.Tensor:
        return _open_handle(init_info["memories"][self._destination])
