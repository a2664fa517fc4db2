"""The implementations of block attention, by name; `megarl.kernels.block` says what one owes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megarl.kernels.block import Block


def _float() -> Block:
    from megarl.kernels.block_reference import ReferenceBlock

    return ReferenceBlock()


def _cpu() -> Block:
    from megarl.kernels.block_cpu import CpuBlock

    return CpuBlock()


def _triton() -> Block:
    from megarl.kernels.block_triton import TritonBlock

    return TritonBlock()


def _flash() -> Block:
    from megarl.kernels.block_cuda import FlashBlock

    return FlashBlock()


def _cudnn() -> Block:
    from megarl.kernels.block_cuda import CudnnBlock

    return CudnnBlock()


BLOCKS: dict[str, Callable[[], Block]] = {
    "reference": _float,
    "cpu": _cpu,
    "triton": _triton,
    "flash": _flash,
    "cudnn": _cudnn,
}


def default_block(device: torch.device) -> str:
    """The name of the block for this device."""
    return "triton" if device.type == "cuda" else "cpu"
