"""Settings of the model that learns and of its training."""

from typing import Annotated, Literal

from megarl.settings.limits import LONGEST_WAIT_S, MOST_RANKS, MOST_SAMPLES, MOST_STEPS, MOST_TOKENS
from megarl.settings.recipe_paths import IsPath, OutputText, PathText
from megarl.settings.schema import Config, Excludes, Needs, Of, Range, Without, require, section

SharePrefix = Literal["auto", "on", "off"]
Task = Literal["rl", "sft", "preference", "reward_model", "distill"]
Precision = Literal["auto", "float32", "bfloat16", "float16", "bfloat16x2"]
DtypeName = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Config):
    """A Hugging Face causal language model and its tokenizer."""

    path: PathText = ""
    """Folder or hub name with config.json, weights and a tokenizer."""
    tokenizer: PathText = ""
    """Folder, hub name or SentencePiece .model file; empty: the model's own."""
    from_scratch: bool = False
    """Start from random weights, drawn by the run's seed."""
    trust_remote_code: bool = False
    """Let the model run Python code from its repository."""


WITH_PATH = Of("model.path", why="but no path, so that they would do nothing")
"""Marks the section `model` of a model that has the policy's weights where `model.path` is
empty."""
POLICY_TOKENS = Without("tokenizer", why="but the tokens are the policy's")
JUDGES_NOTHING = Without("from_scratch", why="but random weights judge nothing")


class AnyRunConfig(Config):
    """Settings of every run that trains."""

    task: Task = "rl"
    """What the run does; every recipe says it."""
    folder: Annotated[OutputText, Needs("set it to where the run may write: runs/my-run")] = ""
    """Run folder: resolved recipe, metrics, transcripts, checkpoints and report."""
    steps: Annotated[int, Range(1, MOST_STEPS)] = 100
    """Training steps of the whole run."""
    epochs: Annotated[float | None, Range(1e-6, 1e6)] = None
    """Passes over the data, instead of `steps`; the last step is filled up from the next pass."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 1
    """Seed of all random numbers: initial weights, data order, sampling."""
    resume: Literal[True, False, "auto"] = False
    """Continue from the newest complete checkpoint in `folder`, also of another layout or ZeRO
    stage; "auto": if there is one, else begin a new run."""


TrainedModel = Annotated[ModelConfig, Needs("set it to a model folder or hub name", "path")]


class LayoutConfig(Config):
    """Parallel degrees of the trainer; data x sequence x tensor is the number of ranks."""

    data: Annotated[int, Range(0, MOST_RANKS)] = 0
    """Data-parallel degree; 0: the number of ranks divided by the other degrees."""
    sequence: Annotated[int, Range(1, MOST_RANKS)] = 1
    """Sequence-parallel (context-parallel) degree: ranks that split the tokens of a sequence."""
    tensor: Annotated[int, Range(1, MOST_RANKS)] = 1
    """Tensor-parallel degree: ranks that split the weights of each layer."""
    expert: Annotated[int, Range(1, MOST_RANKS)] = 1
    """Expert-parallel degree, a divisor of data x sequence: neighbours of these ranks divide the
    experts of each layer, as tensor-parallel ranks do."""


class RoleConfig(Config):
    """A model beside the policy, such as the reference: its weights, ranks and sharding."""

    model: Annotated[ModelConfig, WITH_PATH, POLICY_TOKENS] = section(ModelConfig)
    """The model; with an empty path the policy's. The tokenizer is always the policy's."""
    ranks: Annotated[tuple[int, ...], Range(0, MOST_RANKS - 1)] = ()
    """Ranks that only this role uses; empty: it shares the policy's ranks."""
    layout: LayoutConfig = section(LayoutConfig)
    """Parallel degrees of this role; on the policy's ranks by default the policy's."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed ZeRO stage; null: the policy's. Frozen roles have only weights, which stage 3
    shards."""


OTHER_MODEL = "a model without adapters"
ReferenceLora = Annotated[Literal["start", "base"], Excludes("model.path", OTHER_MODEL)]


class ReferenceRoleConfig(RoleConfig):
    """The frozen reference of the KL penalty."""

    lora: ReferenceLora = "start"
    """With `training.lora.adapter`, and no `model.path` here: `start` is the model with the adapter
    that the run starts from, `base` the model without adapters."""


BLOCK = IsPath("code", ("auto", "cpu", "triton", "flash", "cudnn", "reference"), "Class")


class SequenceConfig(Config):
    """How sequence-parallel ranks (`layout.sequence`) share the attention of a packed sequence."""

    transport: Literal["auto", "ring", "ring_lean", "all_gather"] = "auto"
    """How keys and values reach the other ranks: a `ring`, overlapped with computation;
    `ring_lean`, one block at a time with less memory; one `all_gather`. auto: ring_lean on CPUs,
    ring on GPUs."""
    ulysses: Annotated[int, Range(1, MOST_RANKS)] = 1
    """DeepSpeed-Ulysses degree: so many neighbouring ranks exchange tokens for heads by all-to-all.
    If it equals layout.sequence, keys and values are not exchanged further."""
    cut: Literal["auto", "contiguous", "zigzag", "zigzag_document", "striped"] = "auto"
    """Which tokens each rank holds; auto: the most even work for each packed sequence."""
    block: Annotated[str, BLOCK] = "auto"
    """Kernel of attention between two ranks' tokens, and on one rank with shared prefixes, sliding
    windows, soft caps or sinks. auto: triton on GPUs, else cpu; flash is torch's FlashAttention-2;
    cudnn, like it, takes 16 bit and no soft caps; your own, path/to/file.py:Class, computes all
    attention."""


LEARNS = "set it above 0, where the weights change, and to at most 1, for example to 1e-6"
LearningRate = Annotated[float, Range(1e-30, 1.0, fix=LEARNS)]


class OptimizerConfig(Config):
    """AdamW and gradient clipping."""

    kind: Literal["torch", "apex", "deepspeed_cpu"] = "torch"
    """Implementation of AdamW: torch's fused one; FusedAdam of NVIDIA apex (GPUs); or
    DeepSpeedCPUAdam, compiled at first use, for optimizer state in host memory."""
    learning_rate: LearningRate = 1e-6
    """Peak learning rate of the schedule."""
    beta1: Annotated[float, Range(0.0, 0.999999)] = 0.9
    beta2: Annotated[float, Range(0.0, 0.999999)] = 0.999
    eps: Annotated[float, Range(0.0, 1.0)] = 1e-8
    weight_decay: Annotated[float, Range(0.0, 1000.0)] = 0.0
    clip_norm: Annotated[float, Range(0.0, 1e6)] = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0: no clipping."""


class ScheduleConfig(Config):
    """Learning rate over optimizer steps: linear warm-up, then constant, linear or cosine."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Range(0, MOST_STEPS)] = 0
    final_ratio: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Last learning rate as a share of the peak (linear and cosine)."""


class LoraConfig(Config):
    """LoRA (arXiv:2106.09685): only low-rank adapters of linear layers are trained, and a score
    head whole.
    """

    rank: Annotated[int, Range(0, 4096)] = 0
    """Rank of every adapter; 0: no adapters, all weights are trained."""
    alpha: Annotated[float, Range(1e-6, 1e6), Of("rank")] = 32.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], Of("rank")] = ()
    """Last names of the adapted layers, such as `q_proj`; empty: all linear layers of the
    transformer blocks."""
    adapter: Annotated[PathText, Of("rank")] = ""
    """Folder of an adapter in PEFT's format to start from; empty: a new one, which changes nothing
    at first."""
    publish: Annotated[Literal["merged", "adapter"], Of("rank")] = "merged"
    """What engines get after each step: `merged`, all weights with the adapters added; `adapter`,
    only the adapters, which vLLM applies to the weights of `model.path`."""

    @property
    def is_on(self) -> bool:
        return self.rank > 0


class ExpertsConfig(Config):
    """How training evens out the load of the experts of a mixture; by default not at all."""

    balance_coefficient: Annotated[float, Range(0.0, 100.0)] = 0.0
    """Factor of the load-balancing loss (Switch Transformer), as `router_aux_loss_coef` of
    config.json: K if all experts get as many tokens, of which each goes to K experts. Costs one
    more forward pass of every mini-batch, which counts."""
    z_coefficient: Annotated[float, Range(0.0, 100.0)] = 0.0
    """Factor of the router z-loss (ST-MoE), which keeps the router's logits small."""
    bias_rate: Annotated[float, Range(0.0, 1.0)] = 0.0
    """What each optimizer step adds to the routing bias of experts with fewer tokens than the mean,
    and takes from the others (DeepSeek-V3), where the model's routers have one."""

    @property
    def is_on(self) -> bool:
        return max(self.balance_coefficient, self.z_coefficient, self.bias_rate) > 0


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic, whose learning rate is usually ten times the policy's."""

    learning_rate: LearningRate = 1e-5
    """Peak learning rate of the schedule."""


class CriticConfig(RoleConfig):
    """A critic, which predicts returns; for `advantage: gae`, or in `critics` for your own. It
    starts with its model's weights and a value head that predicts 0, and learns on the policy's
    mini-batches.
    """

    optimizer: CriticOptimizerConfig = section(CriticOptimizerConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    warmup_steps: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Steps at the start of the run in which only critics learn; of several critics the largest
    number."""
    value_clip: Annotated[float | None, Range(1e-6, 1e6)] = 0.2
    """How far an update may move a value without loss (PPO's value clipping), in rewards; null: no
    clipping."""


CLASSIFIER = "set it to a sequence classifier, such as task: reward_model trains"


class RewardModelRoleConfig(RoleConfig):
    """A frozen reward model: a sequence classifier with one label, such as `task: reward_model`
    trains. It reads the policy's tokens, so its tokenizer is the policy's.
    """

    model: Annotated[ModelConfig, Needs(CLASSIFIER, "path"), POLICY_TOKENS, JUDGES_NOTHING] = (
        section(ModelConfig)
    )
    weight: Annotated[float, Range(-1e6, 1e6)] = 1.0
    """Factor of its score in the reward."""


class TeacherConfig(RoleConfig):
    """The frozen teacher of `task: distill`, of any size and family, but with the policy's
    tokenizer.
    """


class CheckpointConfig(Config):
    """When and how checkpoints are written. An interrupted save leaves no incomplete checkpoint."""

    every: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Steps between two checkpoints; 0: none by steps. One more is written after the last step."""
    every_minutes: Annotated[float | None, Range(0.0, 10**6)] = None
    """Minutes until the next checkpoint, written at the end of the step in which they have passed.
    0: none by time. null: 20 where `every` is 0, else 0."""
    keep: Annotated[int, Range(1, 10**5)] = 2
    """Newest checkpoints to keep."""
    best: str = ""
    """Also keep the checkpoint with the highest value of this metric of evaluations, such as
    eval/accuracy, or the lowest, as in min:eval/loss. Each step with an evaluation then gets a
    checkpoint."""
    background: bool = True
    """Train on while a checkpoint is written from a copy in the host's memory: the weights and 12
    bytes a trained parameter, divided among the ranks; not if that leaves less than a tenth
    free."""
    save_within_s: Annotated[float, Range(1.0, LONGEST_WAIT_S)] = 6.0
    """Seconds after SIGTERM or Ctrl-C for the step and its checkpoint. The launcher must wait
    longer: `megarl run` does, torchrun needs --shutdown-timeout."""
    owner_timeout_s: Annotated[float, Range(15.0, LONGEST_WAIT_S)] = 60.0
    """Seconds without a sign of life (one every 5 seconds) after which a run on another host may
    take over the run folder."""

    @property
    def minutes(self) -> float:
        """Minutes between two checkpoints; 0: none by time."""
        if self.every_minutes is None:
            return 0.0 if self.every else 20.0
        return self.every_minutes


class TrainingConfig(Config):
    """How the policy is trained: layout, DeepSpeed, optimizer and batches."""

    layout: LayoutConfig = section(LayoutConfig)
    sequence: SequenceConfig = section(SequenceConfig)
    tensor_backend: Literal["plan", "autotp"] = "plan"
    """Tensor parallelism by megarl's layers, or by DeepSpeed AutoTP, which does not shard embedding
    and output head."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage over data x sequence ranks: 1 partitions optimizer state, 2 also
    gradients, 3 also parameters."""
    precision: Precision = "float32"
    """Dtype of weights and activations; in 16 bit the optimizer keeps float32 master weights.
    float16, for GPUs without bfloat16, scales the loss and repeats steps that overflow. bfloat16x2,
    for CPUs, is float32 with matrix products of bfloat16 numbers, faster with AMX. auto: bfloat16x2
    with AMX; on GPUs with `zero_stage` above 0 bfloat16, or float16 where they lack it; else
    float32; the start says which."""
    reduce_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype in which gradients are summed over data x sequence ranks; auto: that of weights and
    activations. float32 sends twice the bytes and rounds less with many ranks; with two there is no
    difference."""
    num_mini_batches: Annotated[int, Range(1, MOST_SAMPLES)] = 1
    """Parts of each step's batch, with an optimizer step each; after the first, training is
    off-policy."""
    epochs_per_step: Annotated[int, Range(1, 1000)] = 1
    """Passes over each step's batch (PPO's epochs), each of `num_mini_batches` optimizer steps."""
    micro_batch_tokens: Annotated[int, Range(2, MOST_TOKENS)] = 8192
    """Most tokens of a packed sequence for each rank, times `layout.sequence` for the whole; a
    longer sample is packed alone."""
    share_prefix: SharePrefix = "auto"
    """Compute a common prefix, such as a group's prompt, once for the samples of a packed sequence:
    where that saves a sixteenth of their tokens (auto), any token (on), or never."""
    attention: Literal["auto", "torch", "flash_attn", "cudnn", "reference"] = "auto"
    """Kernel of attention within documents, on one rank: torch's; flash-attn's or cuDNN's (GPU, 16
    bit); auto, cuDNN or FlashAttention-4 where they fit the GPU and a trial finds no error, else
    torch's; or matrix products, to compare with. See also `sequence.block`."""
    norms: Literal["model", "torch"] = "model"
    """RMSNorm by the model's code, of several kernels, or by torch's, one kernel on a GPU. In 16
    bit they round differently."""
    elementwise: Literal["model", "triton"] = "model"
    """Rotary embeddings and gated activations by the model's code, of several kernels each, or by
    one Triton kernel each (GPU). In 16 bit they round differently."""
    grouped: Literal["auto", "loop", "grouped", "triton"] = "auto"
    """Products of a mixture's experts: one expert after the other; by torch's kernel for all (16
    bit on GPUs of compute capability 8.0 or more); by megarl's Triton kernel for all (GPU); auto,
    the first on CPUs, torch's where it can, else Triton's."""
    logprobs: Literal["chunked", "liger"] = "chunked"
    """Log-probs and entropies by megarl's kernels, or by Liger's (GPU, tensor-parallel degree
    1)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    offload_optimizer: Annotated[bool, Of("zero_stage", 1, 2, 3)] = False
    """Keep optimizer state in host memory (ZeRO 1-3)."""
    offload_gradients: Annotated[
        Literal["step", "micro_batch"], Of("offload_optimizer", True), Of("zero_stage", 3)
    ] = "step"
    """When `offload_optimizer` moves gradients to the host: once an optimizer step, with float32
    sums on the device until then; or (ZeRO 3) in every micro-batch and back, which is slower and
    needs less memory."""
    max_skipped_steps: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Optimizer steps that policy and critic may each skip because a log-prob, value, loss or
    gradient is not finite; a continued run counts anew. One more ends the run."""
    max_empty_steps: Annotated[int, Range(1, MOST_STEPS)] = 5
    """Steps in a row without a trained token, after dynamic sampling, that end the run. After the
    first update only those count in which most responses were wrong."""
    lora: Annotated[LoraConfig, Of("tensor_backend", "plan")] = section(LoraConfig)
    experts: ExpertsConfig = section(ExpertsConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    num_threads: Annotated[int, Range(0, 1024)] = 0
    """CPU threads of each trainer rank. 0: OMP_NUM_THREADS, which `torchrun` sets to 1, or the
    machine's cores divided among its ranks; half of them with `rollout.max_staleness` above 0."""
    collective_timeout_s: Annotated[float, Range(1.0, LONGEST_WAIT_S)] = 720.0
    """Seconds for a collective, also while ranks wait for rank 0 to read the data; beyond it the
    run ends. Where roles have ranks of their own: seconds without a sign of life of rank 0; another
    role may take ten times as long to load, score or train a step."""

    @property
    def dtype(self) -> DtypeName:
        """Dtype of weights and activations. For `precision: auto`, which each rank resolves for its
        device, only the guess of memory estimates.
        """
        if self.precision == "auto" and self.zero_stage > 0:
            return "bfloat16"
        return self.precision if self.precision in ("bfloat16", "float16") else "float32"

    @property
    def reduced_dtype(self) -> DtypeName:
        return self.dtype if self.reduce_dtype == "auto" else self.reduce_dtype

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps for the batch of one training step."""
        return self.num_mini_batches * self.epochs_per_step

    def check(self) -> None:
        require(
            self.dtype == "float32" or self.zero_stage > 0,
            f"training.precision {self.dtype} needs DeepSpeed's ZeRO; set training.zero_stage to 1,"
            " 2 or 3",
        )
