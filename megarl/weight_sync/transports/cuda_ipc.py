"""Weights through memory of GPUs that trainer ranks and engines of one host share. Both ends; not
yet run on a GPU.

As `shared_memory`, but each engine rank has an image of its own, on the GPU it shares with a
trainer rank: destination n, rank n. What that rank holds stays on its GPU; the others open CUDA's
handles and go over NVLink or PCIe. Counters stay on the host; one is raised only when the GPU has
done what it tells of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megarl.parallel.collectives import gather_objects
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.buckets import Bucket
from megarl.weight_sync.route import Route
from megarl.weight_sync.transports import shared_memory
from megarl.weight_sync.transports.base import Watch

# What `reduce_tensor` says of a tensor of bytes, as `rebuild_cuda_tensor` takes it; the rest is
# known.
HANDLE = slice(7, 10)
"""(storage handle, bytes, first byte)"""
EVENTS = slice(11, 15)
"""(reference counter's handle, its place, event handle, whether to wait for it)"""


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise ValueError(
            "weight_sync.transport cuda_ipc needs GPUs, and there are none here; set"
            " weight_sync.transport to shared_memory"
        )


def _uuid(device: int) -> str:
    """A GPU's own name: its number depends on which ones a process may see."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _invite(memory: torch.Tensor) -> dict[str, Any]:
    """What another process needs to open a tensor of bytes on a GPU: plain numbers and texts."""
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


def _accept(told: dict[str, Any]) -> torch.Tensor:
    """The tensor that `_invite` told of."""
    gpus = {_uuid(device): device for device in range(torch.cuda.device_count())}
    if told["gpu"] not in gpus:
        raise ValueError(
            f"weight_sync.transport cuda_ipc: GPU {told['gpu']} holds weights for this process,"
            f" which sees only {sorted(gpus)}; set weight_sync.transport to point_to_point, or let"
            " every process see all GPUs of the host"
        )
    storage, size, first, counter, place, event, wait = told["handles"]
    return rebuild_cuda_tensor(
        torch.Tensor,
        (told["size"],),
        (1,),
        told["start"],
        torch.UntypedStorage,
        torch.uint8,
        gpus[told["gpu"]],
        bytes.fromhex(storage),
        size,
        first,
        False,
        bytes.fromhex(counter),
        place,
        bytes.fromhex(event),
        wait,
    )


def _finish(*memories: torch.Tensor) -> None:
    """Wait until the GPUs have done what was asked of them."""
    for device in {torch.cuda.current_device(), *(memory.get_device() for memory in memories)}:
        torch.cuda.synchronize(device)


class Sender(shared_memory.Sender):
    """A trainer rank's end; rank 0 owns the counters, rank n image n."""

    SHARED, LOCAL = False, True

    def __init__(self, route: Route, axis: Axis, folder: str) -> None:
        _require_gpu()
        super().__init__(route, axis, folder)

    def init_info(self) -> dict[str, Any]:
        return super().init_info() | {"images": self._told}

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        _finish(*self._images)
        super().commit(bucket, watch)

    def _host_bytes(self) -> int:
        return 0

    def _open(self) -> list[torch.Tensor]:
        route, axis = self._route, self._axis
        mine = {
            image: torch.empty(shared_memory.image_bytes(route), dtype=torch.uint8, device="cuda")
            for image in range(route.spec.num_images)
            if image % axis.size == axis.rank
        }
        told = gather_objects({image: _invite(memory) for image, memory in mine.items()}, axis)
        self._told = [told[image % axis.size][image] for image in range(route.spec.num_images)]
        return [
            mine[image] if image in mine else _accept(each) for image, each in enumerate(self._told)
        ]


class Receiver(shared_memory.Receiver):
    """An engine rank's end."""

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        _require_gpu()
        super().__init__(route, engine, rank, init_info)

    def release(self, bucket: Bucket) -> None:
        _finish(self._slots)
        super().release(bucket)

    def _host_bytes(self) -> int:
        return 0

    def _open(self, init_info: dict[str, Any]) -> torch.Tensor:
        return _accept(init_info["images"][self._image])
