"""The experts that a vLLM engine on the CPU has chosen for each token: vLLM's worker with a record
beside its key-value cache.

    step of the engine   choices of its routers   -> slots of the step's tokens in the cache
    request that ends    slots of all its tokens  -> [tokens, layers, K], for `Engine.generate`

A slot keeps the choice that its keys and values were computed with. So a token that was found in
the prefix cache has the experts of the request that computed it, and one that was computed again,
after new weights or a full cache, those of the last time.

On GPUs vLLM's second model runner does the same (`enable_return_routed_experts`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.kv_cache_interface import FullAttentionSpec

from megarl.types import expert_dtype
from megarl.weights.receiver import WeightSyncWorker

SAMPLED = "sample-"
"""Requests whose names begin so are recorded."""


class RecordingWorker(WeightSyncWorker):
    """vLLM adds it to each rank's worker; the engine calls its methods by `collective_rpc`."""

    model_runner: Any

    def megarl_expert_layers(self) -> tuple[list[int], int]:
        """(numbers of the layers with experts, among all layers; experts of a layer)."""
        layers = _layers(self.model_runner.model)
        return [layer.layer_id for layer in layers], layers[0].router.global_num_experts

    def megarl_record_experts(self) -> None:
        """By `collective_rpc`: record the routers' choices, on tensor-parallel rank 0 only, since
        all ranks choose the same experts.
        """
        self.megarl_record = None
        if get_tensor_model_parallel_rank() == 0:
            self.megarl_record = ExpertRecord(self.model_runner)

    def megarl_take_experts(self, request: str, count: int) -> tuple[list[int], bytes] | None:
        """(shape, bytes) of the experts of the first `count` tokens of a finished request."""
        if self.megarl_record is None:
            return None
        experts = self.megarl_record.take(request)[:count]
        return list(experts.shape), experts.tobytes()


def _layers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, MoERunner)]


class ExpertRecord:
    """The choices of all routers of a model runner, by slot of its key-value cache."""

    def __init__(self, runner: Any) -> None:
        """Raises `StopIteration` for a model without a layer of full attention."""
        self._runner, layers = runner, _layers(runner.model)
        self._choices: list[torch.Tensor] = [torch.empty(0)] * len(layers)
        """By layer, [T, K] of the present step."""
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(partial(self._choices.__setitem__, number))
        cache = runner.kv_cache_config
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        # Of the other groups only the newest blocks are kept.
        self._group = next(n for n, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec))
        self._block = specs[self._group].block_size
        router = layers[0].router
        dtype = expert_dtype(router.global_num_experts)
        shape = (cache.num_blocks * self._block, len(layers), router.top_k)
        self._slots = np.zeros(shape, dtype)
        self._left: dict[str, np.ndarray] = {}
        """Of requests that have left vLLM's batch, the experts of all their slots."""
        self._most = 4 * runner.max_num_reqs
        """Of them that are kept: those of requests that were given up are never taken."""
        self._execute, runner.execute_model = runner.execute_model, self._executed

    def _executed(self, scheduled: Any, *more: Any, **named: Any) -> Any:
        """vLLM's step, recorded."""
        for name in self._runner.input_batch.req_ids:
            # Its blocks may be another request's from this step on.
            if name not in scheduled.num_scheduled_tokens and name.startswith(SAMPLED):
                self._left.pop(name, None)
                self._left[name] = self._slots[self._slots_of(name)]
        while len(self._left) > self._most:
            del self._left[next(iter(self._left))]
        output = self._execute(scheduled, *more, **named)
        if count := scheduled.total_num_scheduled_tokens:
            slots = [
                self._slots_of(name)[first : first + scheduled.num_scheduled_tokens[name]]
                for name in self._runner.input_batch.req_ids  # in the order of the step's tokens
                for first in [self._runner.requests[name].num_computed_tokens]
            ]
            choices = torch.stack(self._choices, 1)[:count].numpy()
            self._slots[np.concatenate(slots)] = choices.astype(self._slots.dtype)
        return output

    def _slots_of(self, name: str) -> np.ndarray:
        """[T'] numbers of all slots of the request's blocks, in the order of its tokens."""
        blocks = np.array(self._runner.requests[name].block_ids[self._group], np.int64)
        return (blocks[:, None] * self._block + np.arange(self._block)).reshape(-1)

    def take(self, request: str) -> np.ndarray:
        """[T', layers, K] of all slots of a request that has ended; none if it is not known.
        `request`: its name before vLLM added letters.
        """

        def is_meant(name: str) -> bool:
            return name == request or name.startswith(f"{request}-")

        left = next(filter(is_meant, self._left), "")
        experts = self._left.pop(left, self._slots[:0])
        present = next(filter(is_meant, self._runner.input_batch.req_ids), "")
        return self._slots[self._slots_of(present)] if present else experts
