"""The model that learns and how it is trained: layout, ZeRO stage, precision, optimizer, packing,
checkpoints.
"""

from __future__ import annotations

from typing import Literal

from megarl.schema import config, require, require_range


@config
class ModelConfig:
    """A Hugging Face causal language model and its tokenizer."""

    path: str = ""
    """A folder or a hub name with config.json, weights and a tokenizer."""
    tokenizer: str = ""
    """Folder, hub name or SentencePiece .model file; empty means the model's own."""
    from_scratch: bool = False
    """Initialise the weights at random, from the run's seed, instead of loading them."""
    trust_remote_code: bool = False
    """Allow the model to run Python code from its repository."""


@config
class LayoutConfig:
    """Parallel degrees of the trainer; their product is the number of ranks."""

    data: int = 0
    """Data-parallel degree; 0 means the number of ranks divided by the other degrees."""
    sequence: int = 1
    """Sequence-parallel (context-parallel) degree: the ranks that split the tokens of a
    sequence."""
    tensor: int = 1
    """Tensor-parallel degree: the ranks that split the weights of each layer."""

    def __post_init__(self) -> None:
        require_range("training.layout.data", self.data, 0)
        require_range("training.layout.sequence", self.sequence, 1)
        require_range("training.layout.tensor", self.tensor, 1)


@config
class RoleConfig:
    """A model other than the policy, such as the reference: its weights, ranks and sharding."""

    model: ModelConfig = ModelConfig()
    """Model and tokenizer; with an empty path the policy's."""
    ranks: tuple[int, ...] = ()
    """Numbers of the ranks that only this role uses; empty: the role shares the policy's ranks."""
    layout: LayoutConfig = LayoutConfig()
    """Parallel degrees of this role. On the policy's ranks the default is the policy's layout."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed ZeRO stage; None means the policy's. A frozen role has only weights, which stage 3
    shards."""


@config
class SequenceConfig:
    """How the ranks of `layout.sequence` share the attention of a packed sequence."""

    transport: Literal["auto", "ring", "ring_lean", "all_gather"] = "auto"
    """How keys and values reach the other ranks: in a ring, overlapped with computation; in a ring,
    one block at a time with less memory (lean); or by one all-gather. auto is lean on CPU, where
    overlap gains nothing, and the overlapped ring on GPUs."""
    ulysses: int = 1
    """DeepSpeed-Ulysses degree: so many neighbouring ranks first exchange tokens for heads by
    all-to-all. If it equals layout.sequence, there is no further exchange of keys and values."""
    cut: Literal["auto", "contiguous", "zigzag", "zigzag_document", "striped"] = "auto"
    """Which tokens each rank holds. auto chooses, for each packed sequence, the way with the most
    even work."""
    block: Literal["auto", "cpu", "triton", "flash", "cudnn", "reference"] = "auto"
    """Kernel that computes attention between the tokens of two ranks. auto is triton on GPUs and
    cpu elsewhere; flash and cudnn are torch's kernels."""

    def __post_init__(self) -> None:
        require_range("training.sequence.ulysses", self.ulysses, 1)


@config
class OptimizerConfig:
    """Settings of AdamW."""

    kind: Literal["torch", "apex", "deepspeed_cpu"] = "torch"
    """Implementation of AdamW: torch's fused one; FusedAdam of NVIDIA apex (GPUs); or
    DeepSpeedCPUAdam, which is compiled at first use, for optimizer state in host memory
    (`offload_optimizer`, or no GPU)."""
    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it. 0 turns clipping
    off."""

    def __post_init__(self) -> None:
        require_range("training.optimizer.learning_rate", self.learning_rate, 0.0)
        require_range("training.optimizer.beta1", self.beta1, 0.0, 0.999999)
        require_range("training.optimizer.beta2", self.beta2, 0.0, 0.999999)
        require_range("training.optimizer.eps", self.eps, 0.0)
        require_range("training.optimizer.weight_decay", self.weight_decay, 0.0)
        require_range("training.optimizer.clip_norm", self.clip_norm, 0.0)


@config
class ScheduleConfig:
    """Learning-rate schedule over optimizer steps: linear warm-up, then constant, linear or
    cosine.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final_ratio: float = 0.0
    """Learning rate of the last step as a share of the peak (linear and cosine)."""

    def __post_init__(self) -> None:
        require_range("training.schedule.warmup_steps", self.warmup_steps, 0)
        require_range("training.schedule.final_ratio", self.final_ratio, 0.0, 1.0)


@config
class CheckpointConfig:
    """When checkpoints are written. A checkpoint is written to a temporary folder, synced to disk
    and then renamed, so an interrupted save leaves no incomplete checkpoint.
    """

    every: int = 0
    """Number of steps between checkpoints; 0 writes one only after the last step."""
    keep: int = 2
    """Number of checkpoints to keep; older ones are removed once a newer one is complete."""

    def __post_init__(self) -> None:
        require_range("training.checkpoint.every", self.every, 0)
        require_range("training.checkpoint.keep", self.keep, 1)


@config
class TrainingConfig:
    """How the policy is trained: parallel layout, DeepSpeed, optimizer and batches."""

    layout: LayoutConfig = LayoutConfig()
    sequence: SequenceConfig = SequenceConfig()
    tensor_backend: Literal["plan", "autotp"] = "plan"
    """Implementation of tensor parallelism: megarl's own layers, or DeepSpeed AutoTP, which does
    not shard embedding and output head."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage. Over data x sequence ranks, 1 partitions optimizer state, 2 also
    gradients, 3 also parameters."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and activations; with bfloat16 the optimizer keeps float32 master
    weights."""
    num_mini_batches: int = 1
    """Optimizer steps for each step's batch; after the first, training is off-policy."""
    micro_batch_tokens: int = 8192
    """Maximum number of tokens of a packed sequence for each rank; a longer sample is packed alone.
    With sequence parallelism the limit of a packed sequence is this times `layout.sequence`."""
    logprobs: Literal["chunked", "liger"] = "chunked"
    """Implementation of log-probs and entropies: megarl's own kernels, or Liger's, which needs a
    GPU and tensor-parallel degree 1."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory (ZeRO 1-3)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    num_threads: int = 1
    """CPU only: torch threads of each trainer rank."""
    collective_timeout_s: float = 600.0
    """The run ends with an error if a collective takes longer, in seconds. The limit also holds for
    the time that the other ranks wait for rank 0 to read and tokenise the data."""

    def __post_init__(self) -> None:
        require_range("training.num_mini_batches", self.num_mini_batches, 1)
        require_range("training.micro_batch_tokens", self.micro_batch_tokens, 2)
        require_range("training.num_threads", self.num_threads, 1)
        require_range("training.collective_timeout_s", self.collective_timeout_s, 1)
        require(
            self.precision == "float32" or self.zero_stage > 0,
            "training.precision bfloat16 needs DeepSpeed's ZeRO; set training.zero_stage to 1, 2"
            " or 3",
        )
        require(
            not self.offload_optimizer or self.zero_stage > 0,
            "training.offload_optimizer needs ZeRO; set training.zero_stage to 1, 2 or 3",
        )
