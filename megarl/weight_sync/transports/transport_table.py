"""The transports by name; `megarl.weight_sync.transports.base` is their contract."""

from __future__ import annotations

from typing import Any

from megarl.weight_sync.transports import cuda_ipc, disk, point_to_point, shared_memory

SENDERS: dict[str, Any] = {
    "shared_memory": shared_memory.Sender,
    "point_to_point": point_to_point.Sender,
    "cuda_ipc": cuda_ipc.Sender,
    "disk": disk.Sender,
}
"""Name -> sender class, called with (route, world axis, `weight_sync.folder`)."""

RECEIVERS: dict[str, Any] = {
    "shared_memory": shared_memory.Receiver,
    "point_to_point": point_to_point.Receiver,
    "cuda_ipc": cuda_ipc.Receiver,
    "disk": disk.Receiver,
}
"""Name -> receiver class, called with (route, engine number, tensor rank, sender's init_info)."""
