"""Configuration of weight synchronisation: how weights reach the engines and are checked."""

from typing import Annotated, Literal

from megarl.settings.limits import LONGEST_WAIT_S, MOST_STEPS
from megarl.settings.schema import Config, Range

BUCKET_BYTES = {"cpu": 8 * 2**20, "cuda": 64 * 2**20}
"""Bytes of a bucket, the weights that are sent at once, by the trainer's device, where
`weight_sync.bucket_mib` is 0."""


class WeightSyncConfig(Config):
    """How the trainer sends its weights to the inference engines."""

    transport: Literal["shared_memory", "point_to_point", "cuda_ipc"] = "shared_memory"
    """`shared_memory`: host memory shared on one host; `point_to_point`: messages between hosts;
    `cuda_ipc`: memory of shared GPUs."""
    bucket_mib: Annotated[int, Range(0, 2**16)] = 0
    """MiB of weights that are sent at once; 0 means 8 on the CPU and 64 on GPUs. Trainer and engine
    each need memory for two buckets. Small buckets stay in a CPU's cache; with large ones a GPU is
    waited for less often, and networks of high latency are faster."""
    probe_every: Annotated[int, Range(0, MOST_STEPS)] = 1
    """Versions between two probes (trainer and engines score one fixed text); 0 turns the probe
    off."""
    probe_tolerance: Annotated[float, Range(0.0, 100.0)] = 0.0
    """Largest log-prob difference of a token in a probe; a larger one ends the run. 0 means 1e-3 in
    float32; in 16 bit the mean is judged instead: the run ends above 0.5 in bfloat16 and 0.07 in
    float16, and there is a warning above 0.15 and 0.02."""
    timeout_s: Annotated[float, Range(0.1, LONGEST_WAIT_S)] = 120.0
    """Seconds that one weight update may take; an engine that is late then is replaced, and the
    update is sent again, `replacements` times at most."""
    replacements: Annotated[int, Range(0, 1000)] = 1
    """How often an update is sent again after an engine died in it, or was late, and was replaced;
    then the run ends with an error naming the engine."""

    @property
    def bucket_bytes(self) -> int:
        """The setting `weight_sync.bucket_mib`, the most weights that are sent at once, in bytes.
        Returns 0 for the setting 0, with which the trainer uses 8 MiB on a CPU and 64 MiB on a GPU.
        """
        return self.bucket_mib * 2**20
