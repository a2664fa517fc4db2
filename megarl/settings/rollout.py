"""How rollouts are generated: engines, sampling, groups, staleness."""

import dataclasses
from typing import Annotated, Literal

from megarl.settings.limits import LONGEST_WAIT_S, MOST_RANKS, MOST_SAMPLES, MOST_TOKENS
from megarl.settings.recipe_paths import IsPath
from megarl.settings.schema import Config, Of, Range, require, section

ENGINE_STARTS = 3
"""Times in a row that the start of an engine may fail before the run goes on without it."""
MOST_STOPS = 16
"""Largest number of texts in the setting `rollout.stop`."""
DispatchName = Literal["ordered", "windowed"]
"""Names of the dispatch policies, which decide when a group of rollouts starts and which step it is
trained in; they are in `megarl.rollout.dispatch.policy_table`."""
WINDOWED = Of("dispatch", "windowed")
FILTER = IsPath("code", ("", "differing", "all"))
LEARNABLE = "set it above 0 (greedy rollouts cannot learn), from 0.01 to 2, where vLLM samples"
"""Advice for a sampling temperature out of vLLM's range; below 0.01 vLLM samples at 0.01."""


class EngineConfig(Config):
    """Settings of an inference engine, which generates rollouts; they are the same for all
    `rollout.num_engines` engines.
    """

    kind: Annotated[str, IsPath("code", ("vllm",), "Class")] = "vllm"
    """`vllm`, or a class of your own, such as my_engine.py:MyEngine, which does what
    `megarl.engines.interface.InferenceEngine` says (docs/howto/own_engine.md)."""
    tensor: Annotated[int, Range(1, MOST_RANKS)] = 1
    """Tensor-parallel degree of an engine."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kv_cache_gib: Annotated[int, Range(1, 10**6)] = 1
    """CPU only: memory of the key-value cache in GiB. On GPUs see gpu_memory_utilization."""
    gpu_memory_utilization: Annotated[float, Range(0.05, 0.98)] = 0.5
    """Fraction of a GPU's memory that the engine may use. A colocated trainer uses the same GPU."""
    max_num_sequences: Annotated[int, Range(1, MOST_SAMPLES)] = 256
    """Maximum number of requests decoded at the same time; further ones wait in the engine's queue.
    """
    max_batched_tokens: Annotated[int, Range(16, MOST_TOKENS)] = 8192
    """Maximum number of tokens of one engine step, prompt tokens included."""
    num_threads: Annotated[int, Range(0, 1024)] = 0
    """CPU only: threads of the engine's kernels. 0: OMP_NUM_THREADS of the environment; where that
    is not set, the machine's cores, divided among its engines; in training with `max_staleness`
    above 0, when trainer and engines compute at the same time, half of the cores."""
    compile: bool = True
    """CUDA only: use CUDA graphs and torch.compile. Without them an engine starts faster and
    generates more slowly."""
    start_timeout_s: Annotated[float, Range(1.0, LONGEST_WAIT_S)] = 600.0
    """Seconds that an engine may take to be ready. At the start of a run a longer one ends it;
    later the engine is started again, up to three times in a row; then the run goes on with the
    engines that are left."""
    stall_timeout_s: Annotated[float, Range(1.0, LONGEST_WAIT_S)] = 180.0
    """An engine that has requests but makes no step for this many seconds, or does not say for as
    long that it lives, is taken for hung: it is ended, and a new engine replaces it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine samples, besides the temperature: from which tokens, and at which texts a
    response ends. The fields are settings of `rollout`, and by default switch nothing on.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @property
    def truncation(self) -> dict[str, float]:
        """{setting: value} of those of top_p, top_k and min_p that keep some tokens from being
        sampled; empty if none does.
        """
        found = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return {name: value for name, value in found.items() if value != getattr(PLAIN, name)}


PLAIN = Sampling()
"""Sampling from all tokens, up to an end-of-sequence token."""


class DynamicSamplingConfig(Config):
    """DAPO's dynamic sampling: a group (all rollouts of a prompt) that `rollout.filter` does not
    keep, by default one whose rewards are all equal, so that its advantages are zero, is replaced
    by a new group.
    """

    enabled: bool = True
    max_draws: Annotated[float, Range(1.0, 1000.0)] = 3.0
    """A step draws at most `max_draws x groups_per_step` groups. It then trains on the accepted
    ones, even if they are fewer than `groups_per_step`."""


class RolloutConfig(Config):
    """How rollouts (the model's responses to prompts) are sampled: engines, group size, sampling
    parameters and staleness.
    """

    num_engines: Annotated[int, Range(1, MOST_RANKS)] = 1
    engine: EngineConfig = section(EngineConfig)
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """On GPUs: whether the engines have GPUs of their own or share those of the trainer."""
    groups_per_step: Annotated[int, Range(1, MOST_SAMPLES)] = 16
    """Prompts (groups of rollouts) that one training step uses."""
    group_size: Annotated[int, Range(1, MOST_SAMPLES)] = 16
    """Rollouts of each prompt."""
    max_new_tokens: Annotated[int, Range(1, MOST_TOKENS)] = 256
    """Length limit of a response in tokens."""
    temperature: Annotated[float, Range(0.01, 2.0, fix=LEARNABLE)] = 1.0
    """Sampling temperature; the trainer's log-probs are computed at the same temperature."""
    top_p: Annotated[float, Range(1e-6, 1.0)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 1: from all. Log-probs
    are those of the remaining tokens, renormalised, so that `algorithm.old_logprobs: engine` is
    needed. Greedy evaluation does not use it."""
    top_k: Annotated[int, Range(0, 2**20)] = 0
    """Sample from this many likeliest tokens; 0: from all. Log-probs as with `top_p`."""
    min_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Sample from tokens that have at least this fraction of the likeliest token's probability; 0:
    from all. Log-probs as with `top_p`."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides the tokens that end a turn. The response includes the
    tokens of the text, with the log-probs they were sampled with. Stop texts do not change any
    log-prob, unlike `top_p`, `top_k` and `min_p`."""
    max_staleness: Annotated[int, Range(0, 1000)] = 0
    """Maximum number of steps by which the weights that generate a rollout may be older than those
    that train on it; 0 is synchronous."""
    dispatch: DispatchName = "ordered"
    """`ordered`: steps use groups in the order of the data, so that runs can be repeated exactly;
    one long answer holds its step back. `windowed`: steps use groups as they finish; a group that
    would be older than `max_staleness` is cancelled and rejected as stale. Slow groups are thus
    trained on less often, which is a bias where the length of an answer says something about its
    quality (measured: answers of 14 tokens in the mean instead of 69); `ordered` has none."""
    max_open_groups: Annotated[int | None, Range(1, MOST_SAMPLES), WINDOWED] = None
    """`windowed` only: maximum number of groups that are started and neither trained nor rejected;
    null: (1 + max_staleness) x groups_per_step. More keep the engines fuller, and more groups are
    rejected as stale."""
    dynamic_sampling: DynamicSamplingConfig = section(DynamicSamplingConfig)
    filter: Annotated[str, FILTER, Of("dynamic_sampling.enabled")] = ""
    """Which groups are trained on: `differing`, those whose rewards are not all equal; `all`; or a
    function of your own (docs/reference_extending.md). Empty: `differing` with an
    `algorithm.advantage` of the house that compares the samples of a group, otherwise (`remax`,
    `reinforce_plus_plus`, `reinforce_plus_plus_tokens`, `gae`, an advantage of your own,
    `task: distill`) `all`."""
    request_timeout_s: Annotated[float, Range(0.1, LONGEST_WAIT_S)] = 600.0
    """The run ends with an error if an engine needs longer for a generation request, in seconds.
    Time in which the engine is paused, for new weights or a colocated trainer, does not count. It
    is to be longer than `engine.stall_timeout_s`, after which a hung engine is replaced."""

    def check(self) -> None:
        require(
            all(self.stop) and len(self.stop) <= MOST_STOPS,
            f"RolloutConfig.stop has {len(self.stop)} texts, {self.stop.count('')} of them empty;"
            f" set at most {MOST_STOPS}, none empty",
        )
        if self.dispatch == "ordered":
            return
        batch, wanted = self.groups_per_step, self.max_open_groups
        require(
            wanted is None or wanted >= batch,
            f"RolloutConfig.max_open_groups is {wanted}, so that a step of {batch} groups would"
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
        """Maximum number of groups (all rollouts of a prompt) that are started and neither trained
        nor rejected: `max_open_groups` or, if that is null, (1 + `max_staleness`) x
        `groups_per_step`.
        """
        usual = (1 + self.max_staleness) * self.groups_per_step
        return usual if self.max_open_groups is None else self.max_open_groups

    @property
    def sampling(self) -> Sampling:
        """The settings of sampling besides the temperature (top_p, top_k, min_p, stop), as an
        object for the engines.
        """
        return Sampling(self.top_p, self.top_k, self.min_p, self.stop)
