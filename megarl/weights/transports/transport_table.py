"""The transports by the names of `weight_sync.transport`; `base` is their contract."""

from __future__ import annotations

from typing import Any

from megarl.weights.transports import cuda_ipc, point_to_point, shared_memory

TRANSPORTS: dict[str, Any] = {
    "shared_memory": shared_memory,
    "point_to_point": point_to_point,
    "cuda_ipc": cuda_ipc,
}
