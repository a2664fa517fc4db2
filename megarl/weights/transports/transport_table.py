"""The transports, ways in which weights get to the engines, by the names of the setting
`weight_sync.transport`; `megarl.weights.transports.base` is their contract.
"""

from __future__ import annotations

from typing import Any

from megarl.weights.transports import cuda_ipc, point_to_point, shared_memory

TRANSPORTS: dict[str, Any] = {
    "shared_memory": shared_memory,
    "point_to_point": point_to_point,
    "cuda_ipc": cuda_ipc,
}
"""{value of the setting `weight_sync.transport`: module with the classes `Sender`, called with
(route, world axis), and `Receiver`, called with (route, position of the engine, tensor rank,
sender's init_info)}"""
