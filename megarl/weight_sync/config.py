"""How new weights reach the engines, and how that is checked."""

from __future__ import annotations

from typing import Literal

from megarl.schema import config, require_range


@config
class WeightSyncConfig:
    """The wire from the trainer to the engines."""

    transport: Literal["shared_memory", "point_to_point", "cuda_ipc", "disk"] = "shared_memory"
    """How bytes travel, one of `megarl.weight_sync.transports.registry`: through memory of one
    host, messages between hosts, memory of shared GPUs, or a folder that all can reach."""
    folder: str = ""
    """Transport `disk` only: where versions are written, a folder that trainer and engines see
    under the same name.
    """
    bucket_mib: int = 8
    """Weights travel in buckets of this size, of which two take memory beside the weights. Small
    ones stay in a CPU's cache; on a network of high latency, larger ones are faster."""
    probe_every: int = 1
    """Versions between log-prob probes (a fixed text scored by trainer and engines); 0 turns them
    off.
    """
    probe_tolerance: float = 0.0
    """Largest log-prob difference a probe may show before the run stops; 0 means 1e-3 in float32
    and 0.5 in bfloat16.
    """
    timeout_s: float = 120.0
    """A publish that takes longer ends the run with an error that names the engine."""
    replacements: int = 1
    """A version in which engines were lost is sent again, with others in their places, this many
    times; then the run ends.
    """

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
