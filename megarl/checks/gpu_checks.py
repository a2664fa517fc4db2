"""Checks of a recipe against the GPUs of this machine."""

from __future__ import annotations

import torch

from megarl.config import RunConfig
from megarl.parallel import launcher
from megarl.schema import require
from megarl.trainer.config import TrainingConfig

BFLOAT16_CAPABILITY = (8, 0)
"""First compute capability with arithmetic in bfloat16: Ampere."""


def check_precision(training: TrainingConfig) -> None:
    """Raise `ValueError` if the GPU cannot train in `training.precision`."""
    name, fits = _gpu()
    require(
        training.precision != "bfloat16" or fits,
        f"training.precision is 'bfloat16', which {name} does not compute in; set it to"
        " 'float32', or use GPUs of the Ampere generation or newer",
    )


def check_gpus(config: RunConfig) -> None:
    """Raise `ValueError` if engines or ranks need what the GPUs of this machine do not have. All
    GPUs are taken to be of one kind.
    """
    name, fits = _gpu()
    engine = config.rollout.engine
    require(
        engine.dtype != "bfloat16" or fits,
        f"rollout.engine.dtype is 'bfloat16', which {name} does not compute in; set it to"
        " 'float16', or use GPUs of the Ampere generation or newer",
    )
    is_cut, ranks = "MIG" in name, launcher.ranks_per_host()
    require(
        not is_cut or (ranks == 1 and engine.tensor == 1),
        f"this GPU is a slice ({name}), of which a process sees one and between which NCCL sends"
        f" nothing, but the run has {ranks} ranks here and rollout.engine.tensor {engine.tensor};"
        " start one rank with rollout.engine.tensor 1, or turn MIG off (nvidia-smi -mig 0)",
    )


def _gpu() -> tuple[str, bool]:
    """(name of the first GPU, whether it computes in bfloat16)."""
    capability = torch.cuda.get_device_capability(0)
    return torch.cuda.get_device_name(0), capability >= BFLOAT16_CAPABILITY
