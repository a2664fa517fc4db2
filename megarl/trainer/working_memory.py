"""Memory that a colocated policy keeps on a GPU, and sizes of DeepSpeed's buffers."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.parallel.layout import Layout
from megarl.settings.config import RunConfig
from megarl.settings.schema import require
from megarl.settings.training import TrainingConfig
from megarl.settings.weight_sync import BUCKET_BYTES
from megarl.trainer.memory import BYTES, SizedParameter, role_memory

BUCKET_ELEMENTS = 500_000_000
"""Most elements of the buffer in which gradients are reduced (`reduce_bucket_size`)."""
LIVE_ELEMENTS = 1_000_000_000
"""Most elements of gathered parameters under ZeRO 3, beside the largest module
(`stage3_max_live_parameters` and `stage3_max_reuse_distance`)."""
DIGEST_BYTES = 2**28
"""Most bytes for the digest of a region: eight rows of `checksums.NUM_WORDS` 64-bit integers."""
RUNTIME_BYTES = 2 * 2**30
"""CUDA's context, kernels, and NCCL's buffers."""


def kept_memory(parameters: Sequence[SizedParameter], layout: Layout, config: RunConfig) -> int:
    """Bytes that the policy keeps on each GPU while engines use the rest: weights, what ZeRO 3
    gathers, two buckets of weight sync, digests, CUDA and NCCL.
    """
    training, bucket = config.training, config.weight_sync.bucket_bytes or BUCKET_BYTES["cuda"]
    weights = role_memory(parameters, layout, training, trains=True).weights
    gathered = _gathered([parameter.on_rank for parameter in parameters], training)
    return weights + gathered + 2 * bucket + DIGEST_BYTES + RUNTIME_BYTES


def most_share(kept: int, gpu_bytes: float) -> float:
    """The largest `rollout.engine.gpu_memory_utilization`, rounded down to hundredths, beside the
    policy; not above 0 if no engine fits.
    """
    return int(100 * (1 - kept / gpu_bytes)) / 100


def check_gpu_share(
    config: RunConfig, parameters: Sequence[SizedParameter], layout: Layout, gpu_bytes: int
) -> None:
    """Raise `ValueError`, with the largest possible setting, unless a GPU of `gpu_bytes` has room
    for a colocated engine beside what the policy keeps there.
    """
    share = config.rollout.engine.gpu_memory_utilization
    kept = kept_memory(parameters, layout, config)
    require(
        config.rollout.placement != "colocated" or share * gpu_bytes + kept <= gpu_bytes,
        f"rollout.engine.gpu_memory_utilization is {share:g} of a GPU of {gpu_bytes / 2**30:.1f}"
        f" GiB, where the policy keeps {kept / 2**30:.1f} GiB while engines generate and receive"
        " weights (its own weights, those that ZeRO 3 gathers for the probe, buckets, CUDA and"
        f" NCCL); set it to at most {most_share(kept, gpu_bytes):g}",
    )


def _gathered(sizes: Sequence[int], training: TrainingConfig) -> int:
    """Most bytes of the parameters that ZeRO 3 gathers."""
    # Fetching ahead stops at a limit, but not the fetch of what is needed at once.
    most = min(sum(sizes), LIVE_ELEMENTS + max(sizes, default=0))
    return BYTES[training.dtype] * most if training.zero_stage == 3 else 0
