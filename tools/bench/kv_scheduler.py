"""vLLM's scheduler, which also writes down the key-value memory in use; see kv_waste.py.

vLLM's engine core imports this module, by the argument `scheduler_cls` of the engine.
"""

from __future__ import annotations

import json
import zlib
from array import array
from pathlib import Path
from typing import Any

from kv_slots import Running, Sample, occupied
from vllm.v1.core.sched.scheduler import Scheduler

EVERY = 13
"""Engine steps from one sample to the next: a prime, so that samples of sequences that grow in step
meet every state of their last block."""


class RecordingScheduler(Scheduler):
    """Appends a `Sample` as a line of JSON to the file `additional_config["kv_samples"]` of vLLM's
    configuration at every `EVERY`th step. Raises `ValueError` where vLLM would schedule the next
    step while the present one is computed, for which this class is not written.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scheduler_config.async_scheduling:
            raise ValueError("the engine schedules asynchronously; measure on the CPU")
        settings: Any = self.vllm_config.additional_config
        self._file, self._step = Path(settings["kv_samples"]), 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's. Afterwards the blocks of the step are allocated, and `num_computed_tokens` of
        a request are the tokens that have keys and values once the step is computed.
        """
        found = super().schedule(*args, **kwargs)
        self._step += 1
        if self.running and self._step % EVERY == 0:
            with self._file.open("a") as file:
                print(json.dumps(self._sample()), file=file)
        return found

    def _sample(self) -> Sample:
        manager = self.kv_cache_manager
        pool = manager.block_pool
        tables = []
        for request in self.running:
            (blocks,) = manager.get_block_ids(request.request_id)
            tables.append((blocks, request.num_computed_tokens))
        listed, filled = occupied(tables, self.cache_config.block_size)
        # vLLM keeps one block for itself, which is never free.
        allocated = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return Sample(allocated, listed, filled, [described(request) for request in self.running])


def described(request: Any) -> Running:
    """What `Running` says of a request of vLLM."""
    return Running(
        prompt=zlib.crc32(array("l", request.prompt_token_ids).tobytes()),
        prompt_tokens=request.num_prompt_tokens,
        tokens=request.num_computed_tokens,
        max_tokens=request.max_tokens,
    )
