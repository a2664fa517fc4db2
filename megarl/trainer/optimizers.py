"""Optimizers for `training.optimizer.kind`, all of them AdamW, and the learning-rate schedule.

To add one, write a function of (parameters, config), name it in `OPTIMIZERS` and in
`OptimizerConfig.kind`, and say in `refuse_optimizer` what it needs.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megarl.settings.schema import require
from megarl.settings.training import OptimizerConfig, ScheduleConfig, TrainingConfig

Parameters = Sequence[torch.nn.Parameter] | Sequence[dict[str, Any]]


def torch_adamw(parameters: Parameters, config: OptimizerConfig) -> torch.optim.Optimizer:
    """`torch.optim.AdamW` with its fused kernel."""
    return torch.optim.AdamW(parameters, fused=True, **_settings(config))


def apex_adamw(parameters: Parameters, config: OptimizerConfig) -> torch.optim.Optimizer:
    """`FusedAdam` of NVIDIA apex, on a GPU. Raises `ImportError` without apex."""
    from apex.optimizers import FusedAdam  # pyright: ignore[reportMissingImports]

    return FusedAdam(parameters, adam_w_mode=True, **_settings(config))


def deepspeed_cpu_adamw(parameters: Parameters, config: OptimizerConfig) -> torch.optim.Optimizer:
    """`DeepSpeedCPUAdam`, with its state in host memory. The first call on a machine compiles a C++
    extension for one or two minutes.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, adamw_mode=True, **_settings(config))


def _settings(config: OptimizerConfig) -> dict[str, Any]:
    """Keyword arguments that all three optimizers accept."""
    return {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }


OPTIMIZERS: dict[str, Callable[[Parameters, OptimizerConfig], torch.optim.Optimizer]] = {
    "torch": torch_adamw,
    "apex": apex_adamw,
    "deepspeed_cpu": deepspeed_cpu_adamw,
}


def refuse_optimizer(training: TrainingConfig, device: torch.device) -> None:
    """Raise `ValueError`, with what to set, if `training.optimizer.kind` cannot run on `device`:
    its state would be in the wrong memory, or a package or compiler is missing.
    """
    optimizer = training.optimizer.kind
    on_gpu = device.type == "cuda" and not training.offload_optimizer
    if optimizer == "apex":
        require(
            on_gpu,
            "training.optimizer.kind is 'apex', whose kernel needs the optimizer state on a GPU;"
            " set it to 'torch', or run on GPUs with training.offload_optimizer false",
        )
        problem = _apex_problem()
        require(
            not problem,
            f"training.optimizer.kind is 'apex', but NVIDIA apex does not import ({problem});"
            " install it from https://github.com/NVIDIA/apex with its CUDA extensions (PyPI's"
            " 'apex' is another project), or set training.optimizer.kind to 'torch'",
        )
    if optimizer == "deepspeed_cpu":
        require(
            not on_gpu,
            "training.optimizer.kind is 'deepspeed_cpu', which needs the optimizer state in host"
            " memory; set training.offload_optimizer to true, or training.optimizer.kind to"
            " 'torch'",
        )
        compiler = os.environ.get("CXX", "c++")
        missing = [
            name
            for name, tool in (
                (f"the C++ compiler {compiler}", shutil.which(compiler.split()[0])),
                ("the package ninja", importlib.util.find_spec("ninja")),
            )
            if tool is None
        ]
        require(
            not missing,
            "training.optimizer.kind is 'deepspeed_cpu', which compiles a C++ extension at first"
            f" use and needs {' and '.join(missing)}; install what is missing, or set"
            " training.optimizer.kind to 'torch'",
        )


def _apex_problem() -> str:
    """Why apex's `FusedAdam` cannot be imported, or ""."""
    try:
        from apex.optimizers import FusedAdam  # noqa: F401  # pyright: ignore[reportMissingImports]
    except Exception as error:  # another project's package of that name raises what it likes
        return f"{type(error).__name__}: {error}"
    return ""


def learning_rate(schedule: ScheduleConfig, peak: float, step: int, total: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`: linear warm-up to `peak`, then
    constant, or linear or cosine decay to `peak * final_ratio`, reached at `step` = `total`.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    done = min(1.0, (step - schedule.warmup_steps) / max(1, total - schedule.warmup_steps))
    left = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (schedule.final_ratio + (1.0 - schedule.final_ratio) * left)
