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
    """Random weights of the run's seed instead of stored ones."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


@config
class LayoutConfig:
    """Degrees of the trainer's mesh; their product is the number of ranks."""

    data: int = 0
    """Ranks with different samples; 0 means: whatever the number of ranks leaves."""
    sequence: int = 1
    """Ranks that share a sample and split it by token (the field also says context parallel)."""
    tensor: int = 1
    """Ranks that share a token and split it by width."""

    def __post_init__(self) -> None:
        require_range("training.layout.data", self.data, 0)
        require_range("training.layout.sequence", self.sequence, 1)
        require_range("training.layout.tensor", self.tensor, 1)


@config
class RoleConfig:
    """A model beside the policy: which one, on which ranks, and how it is sharded there."""

    model: ModelConfig = ModelConfig()
    """An empty path means the policy's model."""
    ranks: tuple[int, ...] = ()
    """Ranks of its own, which the policy then does not use; empty: it shares the policy's ranks."""
    layout: LayoutConfig = LayoutConfig()
    """Degrees of its mesh. On the policy's ranks the default is the policy's layout."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """Of a frozen role only stage 3 shards the weights; None means the policy's stage."""


@config
class SequenceConfig:
    """How the ranks of `layout.sequence` share a packed row."""

    transport: Literal["auto", "ring", "ring_lean", "all_gather"] = "auto"
    """How keys and values reach the other ranks: round a ring while attention is computed, one
    block at a time in less memory (lean), or all at once. auto: lean on CPU, where it costs no
    time, and the overlapping ring on GPUs.
    """
    ulysses: int = 1
    """So many neighbours trade tokens for heads before that (DeepSpeed-Ulysses); equal to
    layout.sequence: nothing else.
    """
    cut: Literal["auto", "contiguous", "zigzag", "zigzag_document", "striped"] = "auto"
    """Which rank holds which tokens; auto takes the one with the most even work, row by row."""
    block: Literal["auto", "cpu", "triton", "flash", "cudnn", "reference"] = "auto"
    """What computes attention between ranks' tokens: auto is triton on GPUs and cpu elsewhere;
    flash and cudnn are torch's.
    """

    def __post_init__(self) -> None:
        require_range("training.sequence.ulysses", self.ulysses, 1)


@config
class OptimizerConfig:
    """AdamW."""

    kind: Literal["torch", "apex", "deepspeed_cpu"] = "torch"
    """Whose AdamW: torch's fused one; NVIDIA apex's FusedAdam (GPUs); or DeepSpeedCPUAdam, for
    optimizer state in host memory (`offload_optimizer`, or no GPU), compiled at first use.
    """
    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""

    def __post_init__(self) -> None:
        require_range("training.optimizer.learning_rate", self.learning_rate, 0.0)
        require_range("training.optimizer.beta1", self.beta1, 0.0, 0.999999)
        require_range("training.optimizer.beta2", self.beta2, 0.0, 0.999999)
        require_range("training.optimizer.eps", self.eps, 0.0)
        require_range("training.optimizer.weight_decay", self.weight_decay, 0.0)
        require_range("training.optimizer.clip_norm", self.clip_norm, 0.0)


@config
class ScheduleConfig:
    """Learning rate over optimizer steps: linear warm-up, then constant, linear or cosine."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final_ratio: float = 0.0
    """Learning rate of the last step as a share of the peak (linear and cosine)."""

    def __post_init__(self) -> None:
        require_range("training.schedule.warmup_steps", self.warmup_steps, 0)
        require_range("training.schedule.final_ratio", self.final_ratio, 0.0, 1.0)


@config
class CheckpointConfig:
    """Checkpoints are written aside, synced to disk and renamed: a folder that has its name is
    whole.
    """

    every: int = 0
    """Steps between checkpoints; 0 writes only the last."""
    keep: int = 2
    """Older ones are removed after a newer one is whole."""

    def __post_init__(self) -> None:
        require_range("training.checkpoint.every", self.every, 0)
        require_range("training.checkpoint.keep", self.keep, 1)


@config
class TrainingConfig:
    """One policy under DeepSpeed."""

    layout: LayoutConfig = LayoutConfig()
    sequence: SequenceConfig = SequenceConfig()
    tensor_backend: Literal["plan", "autotp"] = "plan"
    """Whose layers cut the model over `layout.tensor`: ours, or DeepSpeed AutoTP's, which keep
    embedding and head whole.
    """
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO: 1 splits optimizer state, 2 gradients, 3 parameters over data x sequence."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 keeps float32 master weights in the optimizer."""
    num_mini_batches: int = 1
    """Optimizer steps per step's batch; more than 1 makes the later ones off-policy."""
    micro_batch_tokens: int = 8192
    """Token budget of one packed row per rank; a longer sample gets a row of its own. Sequence
    ranks share a row, and add up.
    """
    logprobs: Literal["chunked", "liger"] = "chunked"
    """What computes log-probs and entropies: our own kernels, or Liger's on one tensor rank of a
    GPU.
    """
    gradient_checkpointing: bool = False
    """Recompute activations in backward."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory (ZeRO 1-3)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    num_threads: int = 1
    """CPU only: torch threads of each trainer rank."""
    collective_timeout_s: float = 600.0
    """A collective that takes longer ends the run with an error instead of waiting for ever. The
    other ranks wait as long for rank 0 to read and tokenise the data before the first collective.
    """

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
