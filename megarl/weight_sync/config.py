"""Configuration of weight synchronisation: how weights reach the engines and are checked."""

from __future__ import annotations

from typing import Literal

from megarl.schema import config, require_range


@config
class WeightSyncConfig:
    """How the trainer sends its weights to the inference engines."""

    transport: Literal["shared_memory", "point_to_point", "cuda_ipc", "disk"] = "shared_memory"
    """A name in `megarl.weight_sync.transports.registry`: host memory shared on one host, messages
    between hosts, memory of shared GPUs (CUDA IPC), or files in a shared folder."""
    folder: str = ""
    """Transport `disk` only: folder for the weights, under the same path for trainer and
    engines."""
    bucket_mib: int = 8
    """MiB of weights that are sent at once. Trainer and engine each need memory for two buckets.
    Small buckets stay in a CPU's cache; large ones are faster on networks of high latency."""
    probe_every: int = 1
    """Versions between two probes (trainer and engines score one fixed text); 0 turns the probe
    off."""
    probe_tolerance: float = 0.0
    """Largest log-prob difference in a probe; a larger one ends the run. 0 means 1e-3 in float32,
    0.1 in float16 and 0.5 in bfloat16."""
    timeout_s: float = 120.0
    """Seconds that one weight update may take; then the run ends with an error naming the late
    engine."""
    replacements: int = 1
    """How often an update is sent again after an engine died in it and was replaced; then the run
    ends."""

    @property
    def bucket_bytes(self) -> int:
        """`bucket_mib` in bytes."""
        return self.bucket_mib * 2**20

    def __post_init__(self) -> None:
        require_range("weight_sync.bucket_mib", self.bucket_mib, 1)
        require_range("weight_sync.probe_every", self.probe_every, 0)
        require_range("weight_sync.probe_tolerance", self.probe_tolerance, 0.0)
        require_range("weight_sync.timeout_s", self.timeout_s, 0.1)
        require_range("weight_sync.replacements", self.replacements, 0)
