"""vLLM's engine on the CPU with arguments that megarl does not give it there, for
`rollout.engine.kind`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.engines.vllm_engine import Engine

FILE = Path(__file__)
BLOCKS = 12
"""Blocks, of 32 tokens each, of a cache that is soon full."""


class SmallCache(Engine):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._arguments |= {"num_gpu_blocks_override": BLOCKS}


class CompiledEngine(Engine):
    """With torch.compile and chunked prefill, as on a GPU. megarl switches both off on the CPU:
    prompts in parts would break sampling with seeds, which greedy requests do not need.
    """

    def __init__(self, *, environment: dict[str, str], **arguments: Any) -> None:
        left = {name: value for name, value in environment.items() if name != "TORCHDYNAMO_DISABLE"}
        super().__init__(environment=left, **arguments)
        self._arguments |= {
            "enforce_eager": False,
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": self.config.max_batched_tokens,
        }


class Crowded(SmallCache):
    """With a cache that is soon full, and prompts in parts; for greedy requests."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._arguments |= {"enable_chunked_prefill": True, "max_num_batched_tokens": 48}
        self._arguments |= {"max_num_seqs": 16}
