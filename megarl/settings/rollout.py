"""How rollouts are generated: engines, sampling, groups, staleness."""

import dataclasses
from typing import Annotated, Literal

from megarl.settings.limits import LONGEST_WAIT_S, MOST_RANKS, MOST_SAMPLES, MOST_TOKENS
from megarl.settings.recipe_paths import IsPath
from megarl.settings.schema import Config, Of, Range, require, section

ENGINE_STARTS = 3
"""Failed starts in a row after which the run goes on without an engine."""
MOST_STOPS = 16
"""Most texts in `rollout.stop`."""
DispatchName = Literal["ordered", "windowed"]
"""Policies in `megarl.rollout.dispatch.policy_table`: when a group starts, and which step trains on
it."""
WINDOWED = Of("dispatch", "windowed")
FILTER = IsPath("code", ("", "differing", "all"))
LEARNABLE = "set it above 0 (greedy rollouts cannot learn), from 0.01 to 2, where vLLM samples"
"""Advice for a temperature out of vLLM's range; below 0.01 vLLM samples at 0.01."""


class EngineConfig(Config):
    """The inference engines, which all have these settings."""

    kind: Annotated[str, IsPath("code", ("vllm",), "Class")] = "vllm"
    """`vllm`, or a class of your own such as my_engine.py:MyEngine (docs/howto/own_engine.md)."""
    tensor: Annotated[int, Range(1, MOST_RANKS)] = 1
    """Tensor-parallel degree of an engine."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kv_cache_gib: Annotated[int, Range(1, 10**6)] = 1
    """CPU only: memory of the key-value cache in GiB."""
    gpu_memory_utilization: Annotated[float, Range(0.05, 0.98)] = 0.5
    """Share of a GPU's memory for the engine; a colocated trainer uses the same GPU."""
    max_num_sequences: Annotated[int, Range(1, MOST_SAMPLES)] = 256
    """Most requests decoded at the same time; others wait in the engine's queue."""
    max_batched_tokens: Annotated[int, Range(16, MOST_TOKENS)] = 8192
    """Most tokens of one engine step, prompts included."""
    num_threads: Annotated[int, Range(0, 1024)] = 0
    """CPU only: threads of the engine's kernels. 0: OMP_NUM_THREADS; without it the machine's cores
    divided among its engines, in training with `max_staleness` above 0 half of them."""
    compile: bool = True
    """CUDA only: use CUDA graphs and torch.compile, with which an engine starts more slowly and
    generates faster."""
    start_timeout_s: Annotated[float, Range(1.0, LONGEST_WAIT_S)] = 600.0
    """Seconds until an engine is ready. Beyond it the run ends at its start; later the engine is
    started again, up to three times in a row, and then left out."""
    stall_timeout_s: Annotated[float, Range(1.0, LONGEST_WAIT_S)] = 180.0
    """Seconds without a step, though it has requests, or without a sign of life, after which an
    engine is hung and replaced."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine samples besides the temperature; by default from all tokens, without stop
    texts.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @property
    def truncation(self) -> dict[str, float]:
        """{setting: value} of top_p, top_k and min_p where they exclude tokens."""
        limits = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return {name: value for name, value in limits.items() if value != getattr(PLAIN, name)}


PLAIN = Sampling()
"""From all tokens, up to an end-of-sequence token."""


class DynamicSamplingConfig(Config):
    """DAPO's dynamic sampling: a group that `rollout.filter` does not keep, by default one of equal
    rewards, is replaced by a new one.
    """

    enabled: bool = True
    max_draws: Annotated[float, Range(1.0, 1000.0)] = 3.0
    """A step draws at most `max_draws x groups_per_step` groups, and trains on those that were
    kept."""


class RolloutConfig(Config):
    """How rollouts, the model's responses to prompts, are sampled."""

    num_engines: Annotated[int, Range(1, MOST_RANKS)] = 1
    engine: EngineConfig = section(EngineConfig)
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """On GPUs: engines with GPUs of their own, or on the trainer's."""
    groups_per_step: Annotated[int, Range(1, MOST_SAMPLES)] = 16
    """Prompts (groups of rollouts) of one training step."""
    group_size: Annotated[int, Range(1, MOST_SAMPLES)] = 16
    """Rollouts of each prompt."""
    max_new_tokens: Annotated[int, Range(1, MOST_TOKENS)] = 256
    """Most tokens of a response."""
    temperature: Annotated[float, Range(0.01, 2.0, fix=LEARNABLE)] = 1.0
    """Sampling temperature, also of the trainer's log-probs."""
    top_p: Annotated[float, Range(1e-6, 1.0)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 1: from all. Log-probs
    are those of the remaining tokens, renormalised: `algorithm.old_logprobs: engine` is needed. Not
    for greedy evaluation."""
    top_k: Annotated[int, Range(0, 2**20)] = 0
    """Sample from this many likeliest tokens; 0: from all. Log-probs as with `top_p`."""
    min_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Sample from tokens with at least this fraction of the likeliest token's probability; 0: from
    all. Log-probs as with `top_p`."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides the tokens that end a turn. Their tokens belong to the
    response, and no log-prob changes."""
    max_staleness: Annotated[int, Range(0, 1000)] = 0
    """Most steps by which the weights of a rollout may be older than those that train on it; 0:
    synchronous."""
    dispatch: DispatchName = "ordered"
    """`ordered`: steps use groups in the order of the data and can be repeated exactly; one long
    answer holds its step back. `windowed`: steps use groups as they finish and reject those older
    than `max_staleness`, a bias towards short answers (measured: 14 tokens in the mean instead of
    69)."""
    max_open_groups: Annotated[int | None, Range(1, MOST_SAMPLES), WINDOWED] = None
    """`windowed` only: most groups that are started and neither trained nor rejected; null: (1 +
    max_staleness) x groups_per_step. More keep the engines fuller, and more are rejected as
    stale."""
    dynamic_sampling: DynamicSamplingConfig = section(DynamicSamplingConfig)
    filter: Annotated[str, FILTER, Of("dynamic_sampling.enabled")] = ""
    """Which groups are trained on: `differing`, whose rewards are not all equal; `all`; or a
    function of your own (docs/api.md). Empty: `differing` with a built-in
    `algorithm.advantage` that compares the samples of a group, else `all`."""
    request_timeout_s: Annotated[float, Range(0.1, LONGEST_WAIT_S)] = 600.0
    """Seconds for a generation request, without pauses of the engine, beyond which the run ends.
    More than `engine.stall_timeout_s`, after which a hung engine is replaced."""

    def check(self) -> None:
        require(
            all(self.stop) and len(self.stop) <= MOST_STOPS,
            f"RolloutConfig.stop has {len(self.stop)} texts, {self.stop.count('')} of them empty;"
            f" set at most {MOST_STOPS}, none empty",
        )
        if self.dispatch == "ordered":
            return
        batch, limit = self.groups_per_step, self.max_open_groups
        require(
            limit is None or limit >= batch,
            f"RolloutConfig.max_open_groups is {limit}, so that a step of {batch} groups would"
            f" never be complete; set it to {batch} or more",
        )
        require(
            self.placement == "disaggregated",
            f"RolloutConfig.dispatch is '{self.dispatch}', but placement is 'colocated', where"
            " engines sleep while the trainer works; set dispatch to 'ordered'",
        )
        require(
            self.most_open_groups > batch,
            f"RolloutConfig.dispatch is '{self.dispatch}', but max_staleness is"
            f" {self.max_staleness} and at most {self.most_open_groups} groups are open, as many as"
            " a step needs, so that it would do nothing; set max_staleness to 1 or more, or"
            f" max_open_groups above {batch}, or dispatch to 'ordered'",
        )

    @property
    def most_open_groups(self) -> int:
        """Most groups that are started and neither trained nor rejected."""
        usual = (1 + self.max_staleness) * self.groups_per_step
        return usual if self.max_open_groups is None else self.max_open_groups

    @property
    def sampling(self) -> Sampling:
        """top_p, top_k, min_p and stop for the engines."""
        return Sampling(self.top_p, self.top_k, self.min_p, self.stop)
