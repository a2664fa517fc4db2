"""The transports by name. Each is one file with both ends; `megarl.weight_sync.transports.base`
says what they owe.
"""

from __future__ import annotations

from typing import Any

from megarl.weight_sync.transports import cuda_ipc, disk, point_to_point, shared_memory

SENDERS: dict[str, Any] = {
    "shared_memory": shared_memory.Sender,
    "point_to_point": point_to_point.Sender,
    "cuda_ipc": cuda_ipc.Sender,
    "disk": disk.Sender,
}
"""Name -> a trainer rank's end: (route, world axis, `weight_sync.folder`)."""

RECEIVERS: dict[str, Any] = {
    "shared_memory": shared_memory.Receiver,
    "point_to_point": point_to_point.Receiver,
    "cuda_ipc": cuda_ipc.Receiver,
    "disk": disk.Receiver,
}
"""Name -> an engine rank's end: (route, engine number, its tensor rank, the sender's init_info)."""
