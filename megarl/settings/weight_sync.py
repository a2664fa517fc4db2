"""How weights reach the engines and are checked."""

from typing import Annotated, Literal

from megarl.settings.limits import LONGEST_WAIT_S, MOST_STEPS
from megarl.settings.schema import Config, Range

BUCKET_BYTES = {"cpu": 8 * 2**20, "cuda": 64 * 2**20}
"""Size of a bucket, by the trainer's device, where `weight_sync.bucket_mib` is 0."""


class WeightSyncConfig(Config):
    """How the trainer sends its weights to the inference engines."""

    transport: Literal["shared_memory", "point_to_point", "cuda_ipc"] = "shared_memory"
    """`shared_memory`: on one host; `point_to_point`: messages between hosts; `cuda_ipc`: memory of
    shared GPUs."""
    bucket_mib: Annotated[int, Range(0, 2**16)] = 0
    """MiB of weights sent at once; 0: 8 on CPUs, whose caches hold that, and 64 on GPUs. Trainer
    and engine each need memory for two buckets. Larger ones suit networks of high latency."""
    probe_every: Annotated[int, Range(0, MOST_STEPS)] = 1
    """Versions between two probes, in which trainer and engines score one fixed text; 0: no
    probes."""
    probe_tolerance: Annotated[float, Range(0.0, 100.0)] = 0.0
    """Largest log-prob difference of a token in a probe; a larger one ends the run. 0: 1e-3 in
    float32; in 16 bit the mean counts, which ends the run above 0.5 (bfloat16) or 0.07 (float16)
    and warns above 0.15 or 0.02."""
    timeout_s: Annotated[float, Range(0.1, LONGEST_WAIT_S)] = 120.0
    """Seconds that one weight update may take; an engine that is late is replaced, and the update
    is sent again."""
    replacements: Annotated[int, Range(0, 1000)] = 1
    """How often an update is sent again after an engine was replaced; then the run ends."""

    @property
    def bucket_bytes(self) -> int:
        """Largest bucket in bytes; 0 for the device's default."""
        return self.bucket_mib * 2**20
