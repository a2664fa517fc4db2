"""The arguments of every vLLM engine, whether it generates or scores."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

from megarl.data.tokenizer import load_tokenizer
from megarl.settings.rollout import EngineConfig

WATERMARK = 0.05
"""Fraction of the key-value cache that stays free when vLLM takes a request. Without it running
requests push each other out.
"""


def is_on_cpu(environment: dict[str, str]) -> bool:
    """Whether an engine with these variables (`engine_environment`) runs on the CPU."""
    return "VLLM_CPU_KVCACHE_SPACE" in environment


def engine_arguments(
    config: EngineConfig,
    *,
    model: str,
    max_tokens: int,
    trust_remote_code: bool,
    seed: int,
    on_cpu: bool,
) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs`, for token ids only. `max_tokens`: longest sequence,
    prompt included. `seed`: for requests without one.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "trust_remote_code": trust_remote_code,
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "seed": seed,
        "tensor_parallel_size": config.tensor,
        "max_model_len": max_tokens,
        "max_num_seqs": config.max_num_sequences,
        # vLLM keeps memory for as many. On GPUs, and not on the CPU, prompts are cut into parts.
        "max_num_batched_tokens": max(
            config.max_batched_tokens, max_tokens if on_cpu else config.max_num_sequences
        ),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "watermark": WATERMARK,
        "enforce_eager": not config.compile or on_cpu,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if on_cpu:
        # Half a prompt in one step would need a seeded generator to go back, which CPU generators
        # cannot.
        arguments["enable_chunked_prefill"] = False
        # vLLM's default of 128 leaves shorter prompts out of the prefix cache: each sample of a
        # group would compute its prompt again. 32 is the smallest that the CPU attention takes;
        # for MLA vLLM sets a size of its own, with a warning.
        arguments["block_size"] = 32
    if config.tensor > 1 or on_cpu:
        # Its ranks are processes of its own: inside a placement group vLLM would ask Ray for them.
        arguments["distributed_executor_backend"] = "mp" if config.tensor > 1 else "uni"
    return arguments


@contextlib.contextmanager
def tokenizer_arguments(name: str, *, trust_remote_code: bool = False) -> Iterator[dict[str, Any]]:
    """In this block, start an engine with these further arguments, so that it writes text; none if
    `name` is empty.

    vLLM gets the loaded tokenizer as a folder: from a model's folder it would build that of the
    class, whose ids may differ.
    """
    if not name:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="megarl_tokenizer_") as folder:
        load_tokenizer(name, trust_remote_code=trust_remote_code).save_pretrained(folder)
        yield {"tokenizer": folder, "skip_tokenizer_init": False}
