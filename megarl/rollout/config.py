"""How rollouts are generated: engines, sampling, groups, staleness."""

from __future__ import annotations

from typing import Literal

from megarl.schema import config, require, require_range


@config
class EngineConfig:
    """Settings of each vLLM engine; `rollout.num_engines` of them run."""

    tensor: int = 1
    """Tensor-parallel degree of an engine."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kv_cache_gib: int = 1
    """CPU only: memory of the key-value cache in GiB. On GPUs see gpu_memory_utilization."""
    gpu_memory_utilization: float = 0.5
    """Fraction of a GPU's memory that the engine may use. A colocated trainer uses the same GPU."""
    max_num_sequences: int = 256
    """Maximum number of requests decoded at the same time; further ones wait in the engine's queue.
    """
    max_batched_tokens: int = 8192
    """Maximum number of tokens of one engine step, prompt tokens included."""
    num_threads: int = 1
    """CPU only: threads of the engine's kernels."""
    compile: bool = True
    """CUDA only: use CUDA graphs and torch.compile. Without them an engine starts faster and
    generates more slowly."""
    start_timeout_s: float = 600.0
    """The run ends with an error if an engine is not ready after this many seconds."""

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
    """DAPO's dynamic sampling: a group whose rewards are all equal has zero advantages, and is
    replaced by a new group.
    """

    enabled: bool = True
    max_draws: float = 3.0
    """A step draws at most `max_draws x groups_per_step` groups. It then trains on the accepted
    ones, even if they are fewer than `groups_per_step`."""

    def __post_init__(self) -> None:
        require_range("rollout.dynamic_sampling.max_draws", self.max_draws, 1.0)


@config
class RolloutConfig:
    """How rollouts are sampled: engines, group size, sampling parameters and staleness."""

    num_engines: int = 1
    engine: EngineConfig = EngineConfig()
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """On GPUs: whether the engines have GPUs of their own or share those of the trainer."""
    groups_per_step: int = 16
    """Prompts (groups of rollouts) that one training step uses."""
    group_size: int = 16
    """Rollouts of each prompt."""
    max_new_tokens: int = 256
    """Length limit of a response."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probs are computed at the same temperature."""
    max_staleness: int = 0
    """Maximum number of steps by which the weights that generate a rollout may be older than those
    that train on it; 0 is synchronous."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    request_timeout_s: float = 600.0
    """The run ends with an error if an engine needs longer for a generation request, in seconds."""

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
