"""Kernels of attention within documents of different lengths, on a GPU in 16 bit.

    q [T, Hq, D], k and v [T, Hkv, D], starts [D + 1]  ->  out [T, Hq, D]

* torch's variable-length flash attention.
* The package flash-attn. FlashAttention-4 (`flash-attn-4`, module `flash_attn.cute`) runs on
  compute capability 9 and 10, and replaces torch's own kernel in the whole process.
  FlashAttention-2 (`flash-attn`) is called directly, where the other does not run.

torch's kernel passed its tests on one H200 in bfloat16 (torch 2.11, head widths 64, 80 and 128).
NOT YET RUN ON A GPU: flash-attn, float16, and a torch with `enable_gqa`. Their calls are checked
against the signatures, and the arithmetic with a replacement on the CPU.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `megarl doctor` asks what is installed before torch can be imported
    import torch

CAPABILITIES = (9, 10)
"""Major compute capabilities on which torch hands its calls to FlashAttention-4."""

Varlen = Callable[..., "torch.Tensor"]


def causal(scale: float) -> dict[str, Any]:
    """Arguments of torch's `varlen_attn` for causal attention with shared KV heads."""
    return {"scale": scale, "window_size": (-1, 0), "enable_gqa": True}


def torch_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
) -> torch.Tensor:
    """`starts` [D + 1] int32 on the GPU: first token of each document, then T; `longest`: tokens of
    the longest. Where torch's kernel has no shared KV heads (2.11), they are repeated.
    """
    from torch.nn.attention import varlen

    attend: Varlen = varlen.varlen_attn
    settings = causal(scale)
    if not _takes_shared_heads(attend):
        del settings["enable_gqa"]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return attend(q, k, v, starts, starts, longest, longest, **settings)


@functools.cache
def _takes_shared_heads(function: Varlen) -> bool:
    return "enable_gqa" in inspect.signature(function).parameters


def has_module(name: str) -> bool:
    """Whether module "a" or "a.b" is installed; for "a.b" package a is imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def provider(capability: tuple[int, int]) -> str:
    """The package for `flash_attn` on this compute capability: "FA4", "FA2", or "" for none."""
    if capability[0] in CAPABILITIES and has_module("flash_attn.cute"):
        return "FA4"
    return "FA2" if has_module("flash_attn.flash_attn_interface") else ""


@functools.cache
def varlen_function(capability: tuple[int, int]) -> Varlen:
    """That of the installed flash-attn, as `torch_varlen`. Raises `ValueError` for none."""
    chosen = provider(capability)
    if chosen == "FA4":
        from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl
        from torch.nn.attention._fa4 import register_flash_attention_fa4

        register = functools.partial(register_flash_attention_fa4, __name__)
        register_flash_attention_impl("FA4", register_fn=register)
        activate_flash_attention_impl("FA4")
        return torch_varlen
    if chosen == "FA2":
        return _flash_attention_2
    raise ValueError(
        "training.attention is 'flash_attn', but no package flash-attn is installed that computes"
        f" on compute capability {capability[0]}.{capability[1]}: pip install -e"
        " '.[flash-attn-4]' (capability 9 and 10) or flash-attn; or set training.attention to"
        " 'torch'"
    )


def _flash_attn_fwd(*tensors: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, ...]:
    """As torch 2.13 calls it, by its name: (output, log-sum-exp), without what other versions
    return besides.
    """
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    return interface._flash_attn_fwd(*tensors, **settings)[:2]


def _flash_attn_bwd(*tensors: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, ...]:
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    return interface._flash_attn_bwd(*tensors, **settings)[:3]


def _flash_attention_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
) -> torch.Tensor:
    import torch
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func(
        *(q, k, v, starts, starts, longest, longest),
        softmax_scale=scale,
        causal=True,
        # As torch's own kernels: equal bits on repetition cost time, and are asked for.
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
