"""`training.precision` on this machine: what `auto` stands for, and what is slow or impossible."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megarl.errors import UserError
from megarl.kernels.linear import ONEDNN
from megarl.parallel import launcher
from megarl.parallel.mesh import local_device
from megarl.settings.config import AnyConfig, RunConfig
from megarl.settings.schema import replace, require
from megarl.settings.training import Precision, TrainingConfig

BFLOAT16_CAPABILITY = (8, 0)
"""First compute capability of CUDA with arithmetic in bfloat16: Ampere."""


def has_bfloat16() -> bool:
    """Whether GPU 0 computes in bfloat16."""
    return torch.cuda.get_device_capability(0) >= BFLOAT16_CAPABILITY


def automatic_precision(zero_stage: int, device: torch.device) -> tuple[Precision, str]:
    """(what `training.precision: auto` stands for, the reason in words)."""
    if device.type == "cpu":
        if ONEDNN is not None and torch.cpu._is_amx_tile_supported():
            return "bfloat16x2", "this processor has AMX"
        return "float32", "this processor has no AMX"
    if zero_stage == 0:
        return "float32", "16 bit needs training.zero_stage 1, 2 or 3"
    if not has_bfloat16():
        return "float16", "this GPU does not compute in bfloat16"
    return "bfloat16", "this GPU computes in bfloat16"


def resolved(config: AnyConfig, say: Callable[[str], object]) -> AnyConfig:
    """`config` with the precision for "auto" on this rank's device, which `say` is told."""
    chosen, why = automatic_precision(config.training.zero_stage, local_device())
    say(f"training.precision auto is {chosen}: {why}")
    return replace(config, training=replace(config.training, precision=chosen))


def refuse_different(chosen: Sequence[str]) -> None:
    """Raise `UserError` unless all ranks have the same precision; `chosen` is by rank."""
    if len(set(chosen)) > 1:
        ranks = ", ".join(f"{name} on rank {chosen.index(name)}" for name in sorted(set(chosen)))
        raise UserError(
            f"training.precision auto is {ranks}, because their processors or GPUs differ; set"
            " training.precision to one of them"
        )


def slow_precision_warning(precision: str) -> str:
    """A warning of one line if `precision` is no faster than float32 on this processor; else ""."""
    if precision == "bfloat16x2" and not torch.cpu._is_amx_tile_supported():
        return (
            "training.precision bfloat16x2 is slower than float32 here: this processor has no AMX;"
            " set training.precision to float32"
        )
    if precision == "bfloat16" and not torch.cpu._is_avx512_bf16_supported():
        return (
            "training.precision bfloat16 gains nothing here: this processor has no instructions for"
            " bfloat16 (AMX, AVX512-BF16); set training.precision to float32"
        )
    if precision == "float16" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return (
            "training.precision float16 is slower than float32 here: this processor has no"
            " instructions for float16; set training.precision to float32"
        )
    return ""


def check_precision(training: TrainingConfig, device: torch.device) -> None:
    """Raise `ValueError`, with what to set, if `training.precision` cannot be used on `device`.
    bfloat16x2 is float32 whose matrix products are sums of bfloat16 products.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        _refuse_bfloat16("training.precision", training.precision)
    require(
        training.precision != "bfloat16x2" or (not on_gpu and ONEDNN is not None),
        "training.precision is 'bfloat16x2', which is for processors with AVX-512; set it to"
        " 'bfloat16' on GPUs, and to 'float32' elsewhere",
    )


def _refuse_bfloat16(setting: str, dtype: str) -> None:
    """Raise `ValueError` if `setting` is bfloat16 and GPU 0 is older than Ampere."""
    require(
        dtype != "bfloat16" or has_bfloat16(),
        f"{setting} is 'bfloat16', which {torch.cuda.get_device_name(0)} does not compute in; set"
        " it to 'float16', or use GPUs of the Ampere generation or newer",
    )


def check_gpus(config: RunConfig) -> None:
    """Raise `ValueError` if the recipe asks engines for bfloat16 on GPUs older than Ampere, or for
    several ranks on a MIG slice. Needs a GPU.
    """
    name, engine = torch.cuda.get_device_name(0), config.rollout.engine
    _refuse_bfloat16("rollout.engine.dtype", engine.dtype)
    ranks = launcher.ranks_per_host()
    require(
        "MIG" not in name or (ranks == 1 and engine.tensor == 1),
        f"this GPU is a slice ({name}), of which a process sees one and between which NCCL sends"
        f" nothing, but the run has {ranks} ranks here and rollout.engine.tensor {engine.tensor};"
        " start one rank with rollout.engine.tensor 1, or turn MIG off (nvidia-smi -mig 0)",
    )
