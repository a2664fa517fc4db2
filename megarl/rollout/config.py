"""How rollouts are generated: engines, sampling, groups, staleness."""

from __future__ import annotations

from typing import Literal

from megarl.schema import config, require, require_range


@config
class EngineConfig:
    """One vLLM engine; `rollout.num_engines` of them run."""

    tensor: int = 1
    """Tensor-parallel ranks of the engine."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kv_cache_gib: int = 1
    """CPU only: memory of the key-value cache. On GPUs see gpu_memory_utilization."""
    gpu_memory_utilization: float = 0.5
    """Share of a GPU's memory the engine may use; the trainer shares the GPU when they are
    colocated.
    """
    max_num_sequences: int = 256
    """Requests decoded together; more wait in the engine's queue."""
    max_batched_tokens: int = 8192
    """Tokens of one engine step, prompts included."""
    num_threads: int = 1
    """CPU only: threads of the engine's kernels."""
    compile: bool = True
    """CUDA only: CUDA graphs and torch.compile. Without them an engine starts faster and runs
    slower.
    """
    start_timeout_s: float = 600.0
    """An engine that is not ready by then ends the run with an error."""

    def __post_init__(self) -> None:
        require_range("rollout.engine.tensor", self.tensor, 1)
        require_range("rollout.engine.kv_cache_gib", self.kv_cache_gib, 1)
        require_range(
            "rollout.engine.gpu_memory_utilization", self.gpu_memory_utilization, 0.05, 0.98
        )
        require_range("rollout.engine.max_num_sequences", self.max_num_sequences, 1)
        require_range("rollout.engine.max_batched_tokens", self.max_batched_tokens, 16)
        require_range("rollout.engine.num_threads", self.num_threads, 1)
        require_range("rollout.engine.start_timeout_s", self.start_timeout_s, 1)


@config
class DynamicSamplingConfig:
    """DAPO's dynamic sampling: a group whose rewards are all equal teaches nothing and is replaced
    by a new one.
    """

    enabled: bool = True
    max_draws: float = 3.0
    """A step draws at most `max_draws x groups_per_step` groups, then trains on what is there."""

    def __post_init__(self) -> None:
        require_range("rollout.dynamic_sampling.max_draws", self.max_draws, 1.0)


@config
class RolloutConfig:
    """Groups of samples from the engines."""

    num_engines: int = 1
    engine: EngineConfig = EngineConfig()
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """On GPUs: engines on GPUs of their own, or sharing the trainer's."""
    groups_per_step: int = 16
    """Prompts that one step trains on."""
    group_size: int = 16
    """Rollouts of each prompt."""
    max_new_tokens: int = 256
    """Length limit of a response."""
    temperature: float = 1.0
    """Applied in the trainer's log-probs as well."""
    max_staleness: int = 0
    """Versions by which the weights that generate may lag those that train; 0 is synchronous."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    request_timeout_s: float = 600.0
    """A request that takes longer ends the run with an error that names the engine."""

    def __post_init__(self) -> None:
        require_range("rollout.num_engines", self.num_engines, 1)
        require_range("rollout.groups_per_step", self.groups_per_step, 1)
        require_range("rollout.group_size", self.group_size, 1)
        require_range("rollout.max_new_tokens", self.max_new_tokens, 1)
        require(
            self.temperature > 0,
            f"rollout.temperature is {self.temperature}; set it above 0 (greedy rollouts cannot"
            " learn)",
        )
        require_range("rollout.max_staleness", self.max_staleness, 0)
        require_range("rollout.request_timeout_s", self.request_timeout_s, 0.1)
