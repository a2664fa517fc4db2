"""Gradients of an optimizer on the host, moved there once a step instead of once a micro-batch.

With `training.offload_optimizer`, DeepSpeed 0.19 copies a rank's sums of gradients to the device
for each micro-batch, adds and copies them back. Here its code for sums on the device is given
buffers there. Results stay the same, bit for bit.

| ZeRO | DeepSpeed's own | with `keep_on_device` |
|---|---|---|
| 1 | reduces and moves gradients in the last micro-batch only | not changed |
| 2, bfloat16 | adds up on the device in float32 | not changed |
| 2, float32 | moves whole parameters in every micro-batch | as in bfloat16 |
| 3 | moves this rank's part in every micro-batch | adds up on the device |
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from megarl.errors import UserError

PARTS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
"""Attribute of ZeRO 3's optimizer: {`ds_id` of a parameter: view for this rank's part of its
gradient}."""
KNOWN = "0.19."
"""Beginning of the versions of DeepSpeed that are built as here."""


def keep_on_device(optimizer: Any) -> None:
    """Make a DeepSpeed optimizer with its state on the host add up gradients on the device, in
    place, before the first backward pass: 4 bytes for each element of this rank's trained
    parameters, under ZeRO 2 during a step's passes only. Raises `UserError` for another version of
    DeepSpeed.
    """
    is_stage_3 = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    name = PARTS if is_stage_3 else "_use_compact_grad_partition_buffer"
    if not (deepspeed.__version__.startswith(KNOWN) and hasattr(optimizer, name)):
        raise UserError(
            f"training.offload_optimizer: DeepSpeed {deepspeed.__version__} may add up gradients in"
            " another way than 0.19.8, for which megarl keeps the sums on the GPU until the"
            " optimizer step; install deepspeed==0.19.8, or set training.zero_stage to 3 and"
            " training.offload_gradients to micro_batch"
        )
    if is_stage_3:
        _move_sums(optimizer)
    elif optimizer.partition_gradients:  # ZeRO 2
        # In float32 DeepSpeed answers False, and then adds up on the host.
        optimizer._use_compact_grad_partition_buffer = lambda group_idx: True


def sums_of(optimizer: Any) -> list[torch.Tensor]:
    """ZeRO 3's flat float32 sums of this rank's gradients, if it has some."""
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
    return [] if flat is None else [flat]


def sum_of(parameter: Any) -> torch.Tensor | None:
    """A ZeRO 3 parameter's part of the sums, if `keep_on_device` has moved them."""
    optimizer = parameter._z3_optimizer
    view = getattr(optimizer, PARTS)[parameter.ds_id]
    return view if optimizer.offload_optimizer and view.device == parameter.device else None


def _move_sums(optimizer: Any) -> None:
    accelerator: Any = get_accelerator()
    old = optimizer.grad_partitions_flat_buffer
    device = accelerator.current_device_name()
    sums = torch.zeros(old.numel(), dtype=torch.float32, device=device)
    parts = getattr(optimizer, PARTS)
    parts |= {name: sums.narrow(0, p.storage_offset(), p.numel()) for name, p in parts.items()}
    optimizer.grad_partitions_flat_buffer = sums
    # It collects whether the sums have values that are not finite, and must be where they are.
    optimizer.inf_or_nan_tracker = optimizer.inf_or_nan_tracker.to(device)
    accelerator.unpin_memory(old)
    del old
    if sums.is_cuda:
        # Torch would keep the pinned memory for later, and nothing else needs so much.
        torch.accelerator.empty_host_cache()
        # DeepSpeed adds on a stream of its own.
        torch.cuda.synchronize(sums.device)
