"""The implementations of block attention by name; `megarl.kernels.block` is their contract."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megarl.kernels.block import Block


def _reference() -> Block:
    from megarl.kernels.block_reference import ReferenceBlock

    return ReferenceBlock()


def _cpu() -> Block:
    from megarl.kernels.block_cpu import CpuBlock

    return CpuBlock()


def _triton() -> Block:
    from megarl.kernels.block_triton import TritonBlock

    return TritonBlock()


def _flash() -> Block:
    from megarl.kernels.block_flash import FlashBlock

    return FlashBlock()


BLOCKS: dict[str, Callable[[], Block]] = {
    "reference": _reference,
    "cpu": _cpu,
    "triton": _triton,
    "flash": _flash,
}
"""{name: function that makes the block}; imported when asked for, since some need a GPU's
packages."""


def default_block(device: torch.device) -> str:
    """Name of the block for this device: triton on GPUs, else cpu."""
    return "triton" if device.type == "cuda" else "cpu"
