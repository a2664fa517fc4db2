"""Checks of a recipe against the GPUs of this machine."""

from __future__ import annotations

import torch

from megarl.config import RunConfig
from megarl.parallel import launcher
from megarl.schema import require
from megarl.trainer.precision import has_bfloat16


def check_gpus(config: RunConfig) -> None:
    """Raise `ValueError` if engines or ranks need what the GPUs of this machine do not have. All
    GPUs are taken to be of one kind.
    """
    name, engine = torch.cuda.get_device_name(0), config.rollout.engine
    require(
        engine.dtype != "bfloat16" or has_bfloat16(),
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
