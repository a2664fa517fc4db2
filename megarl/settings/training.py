"""Settings of the model that learns and of how it is trained: layout, ZeRO stage, precision,
optimizer, packing, checkpoints.
"""

from typing import Annotated, Literal

from megarl.settings.limits import LONGEST_WAIT_S, MOST_RANKS, MOST_SAMPLES, MOST_STEPS, MOST_TOKENS
from megarl.settings.recipe_paths import OutputText, PathText
from megarl.settings.schema import Config, Excludes, Needs, Of, Range, require, section

SharePrefix = Literal["auto", "on", "off"]
Task = Literal["rl", "sft", "preference", "reward_model", "distill"]
Precision = Literal["auto", "float32", "bfloat16", "float16", "bfloat16x2"]
DtypeName = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Config):
    """A Hugging Face causal language model and its tokenizer: where they are, and how they are
    loaded.
    """

    path: PathText = ""
    """A folder or a hub name with config.json, weights and a tokenizer."""
    tokenizer: PathText = ""
    """Folder, hub name or SentencePiece .model file; empty means the model's own."""
    from_scratch: bool = False
    """Initialise the weights at random, from the run's seed, instead of loading them."""
    trust_remote_code: bool = False
    """Allow the model to run Python code from its repository."""


WITH_PATH = Of("model.path", why="but no path, so that they would do nothing")
"""Marks the section `model` of a model beside the policy, which has the policy's weights where
`model.path` is empty: other settings of the section are refused then."""


class AnyRunConfig(Config):
    """Settings that every run that trains has: run folder, length, seed, and whether it resumes."""

    task: Task = "rl"
    """What the run does. Every recipe says it: a recipe of one task is none of another."""
    folder: Annotated[OutputText, Needs("set it to where the run may write: runs/my-run")] = ""
    """Run folder for the resolved recipe, metrics, transcripts, checkpoints and report."""
    steps: Annotated[int, Range(1, MOST_STEPS)] = 100
    """Training steps of the whole run."""
    epochs: Annotated[float | None, Range(1e-6, 1e6)] = None
    """Passes over the data, used instead of `steps`; the last step is filled up from the next
    pass."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 1
    """Seed of all random numbers: initial weights, data order, sampling."""
    resume: Literal[True, False, "auto"] = False
    """Continue from the newest complete checkpoint in `folder`; "auto": if there is one, otherwise
    begin a new run. The checkpoint may be of another layout or ZeRO stage."""


TrainedModel = Annotated[ModelConfig, Needs("set it to a model folder or hub name", "path")]


class LayoutConfig(Config):
    """Parallel degrees of the trainer; data x sequence x tensor is the number of ranks."""

    data: Annotated[int, Range(0, MOST_RANKS)] = 0
    """Data-parallel degree; 0 means the number of ranks divided by the other degrees."""
    sequence: Annotated[int, Range(1, MOST_RANKS)] = 1
    """Sequence-parallel (context-parallel) degree: the ranks that split the tokens of a
    sequence."""
    tensor: Annotated[int, Range(1, MOST_RANKS)] = 1
    """Tensor-parallel degree: the ranks that split the weights of each layer."""


class RoleConfig(Config):
    """A model beside the policy, such as the reference: its weights, ranks and sharding."""

    model: Annotated[ModelConfig, WITH_PATH] = section(ModelConfig)
    """The model; with an empty path the policy's. The tokenizer is always the policy's."""
    ranks: Annotated[tuple[int, ...], Range(0, MOST_RANKS - 1)] = ()
    """Numbers of the ranks that only this role uses; empty: the role shares the policy's ranks."""
    layout: LayoutConfig = section(LayoutConfig)
    """Parallel degrees of this role. On the policy's ranks the default is the policy's layout."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed ZeRO stage; None means the policy's. A frozen role has only weights, which stage 3
    shards."""


OTHER_MODEL = "a model without adapters"
ReferenceLora = Annotated[Literal["start", "base"], Excludes("model.path", OTHER_MODEL)]


class ReferenceRoleConfig(RoleConfig):
    """The frozen reference of the KL penalty: its weights, ranks and sharding."""

    lora: ReferenceLora = "start"
    """With `training.lora.adapter`, and no `model.path` here: whether the reference is the model
    with the adapter that the run starts from (start), or the model without adapters (base)."""


class SequenceConfig(Config):
    """How the sequence-parallel ranks (`layout.sequence`) share the attention of a packed
    sequence.
    """

    transport: Literal["auto", "ring", "ring_lean", "all_gather"] = "auto"
    """How keys and values reach the other ranks: in a ring, overlapped with computation; in a ring,
    one block at a time with less memory (lean); or by one all-gather. auto is lean on CPU, where
    overlap gains nothing, and the overlapped ring on GPUs."""
    ulysses: Annotated[int, Range(1, MOST_RANKS)] = 1
    """DeepSpeed-Ulysses degree: so many neighbouring ranks first exchange tokens for heads by
    all-to-all. If it equals layout.sequence, there is no further exchange of keys and values."""
    cut: Literal["auto", "contiguous", "zigzag", "zigzag_document", "striped"] = "auto"
    """Which tokens each rank holds. auto chooses, for each packed sequence, the way with the most
    even work."""
    block: Literal["auto", "cpu", "triton", "flash", "reference"] = "auto"
    """Kernel of attention between the tokens of two ranks, and on one rank too of attention with
    shared prefixes, within a sliding window, with a soft cap or with sinks. auto is triton on GPUs
    and cpu elsewhere; flash is torch's FlashAttention-2."""


LEARNS = "set it above 0, where the weights change, and to at most 1, for example to 1e-6"
LearningRate = Annotated[float, Range(1e-30, 1.0, fix=LEARNS)]


class OptimizerConfig(Config):
    """Settings of AdamW: its implementation, learning rate, betas, eps, weight decay and gradient
    clipping.
    """

    kind: Literal["torch", "apex", "deepspeed_cpu"] = "torch"
    """Implementation of AdamW: torch's fused one; FusedAdam of NVIDIA apex (GPUs); or
    DeepSpeedCPUAdam, which is compiled at first use, for optimizer state in host memory
    (`offload_optimizer`, or no GPU)."""
    learning_rate: LearningRate = 1e-6
    """Peak learning rate of the schedule; above 0."""
    beta1: Annotated[float, Range(0.0, 0.999999)] = 0.9
    beta2: Annotated[float, Range(0.0, 0.999999)] = 0.999
    eps: Annotated[float, Range(0.0, 1.0)] = 1e-8
    weight_decay: Annotated[float, Range(0.0, 1000.0)] = 0.0
    clip_norm: Annotated[float, Range(0.0, 1e6)] = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it. 0 turns clipping
    off."""


class ScheduleConfig(Config):
    """Learning-rate schedule over optimizer steps: linear warm-up, then constant, linear or
    cosine.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Range(0, MOST_STEPS)] = 0
    final_ratio: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Learning rate of the last step as a share of the peak (linear and cosine)."""


class LoraConfig(Config):
    """LoRA (arXiv:2106.09685): the model's weights are frozen, and low-rank adapters of its linear
    layers are trained instead. A score head is trained whole.
    """

    rank: Annotated[int, Range(0, 4096)] = 0
    """Rank of every adapter; 0 trains the model's own weights."""
    alpha: Annotated[float, Range(1e-6, 1e6), Of("rank")] = 32.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], Of("rank")] = ()
    """Last names of the layers to adapt, such as `q_proj`; empty: all linear layers of the
    transformer blocks."""
    adapter: Annotated[PathText, Of("rank")] = ""
    """Folder of an adapter in PEFT's format to start from; empty starts new ones, which change
    nothing at first."""
    publish: Annotated[Literal["merged", "adapter"], Of("rank")] = "merged"
    """What engines get after each step: the whole weights, with the adapters added on the way; or
    only the adapters, which vLLM applies to the weights that it has read from `model.path`."""

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained, which is so with a `rank` above 0."""
        return self.rank > 0


class CriticOptimizerConfig(OptimizerConfig):
    """Settings of AdamW for the critic, whose learning rate is usually ten times the policy's."""

    learning_rate: LearningRate = 1e-5
    """Peak learning rate of the schedule; above 0."""


class CriticConfig(RoleConfig):
    """PPO's critic, which predicts the return from each state; used with `algorithm.advantage:
    gae`, or in `critics` by an advantage of your own. It starts with the weights of its model and a
    value head that predicts 0, and is trained in the same mini-batches and epochs as the policy.
    """

    optimizer: CriticOptimizerConfig = section(CriticOptimizerConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    warmup_steps: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Number of steps at the start of the run in which only critics learn; of several critics the
    largest number counts."""
    value_clip: Annotated[float | None, Range(1e-6, 1e6)] = 0.2
    """How far an update may move a value without loss: PPO's value clipping, in the units of the
    reward; null for none."""


CLASSIFIER = "set it to a sequence classifier, such as task: reward_model trains"


class RewardModelRoleConfig(RoleConfig):
    """A frozen reward model: a Hugging Face sequence classifier with one label, such as `megarl
    reward-model` trains. It reads the policy's tokens, so its tokenizer is the policy's.
    """

    model: Annotated[ModelConfig, Needs(CLASSIFIER, "path")] = section(ModelConfig)
    weight: Annotated[float, Range(-1e6, 1e6)] = 1.0
    """Factor of its score in the reward of a response."""


class TeacherConfig(RoleConfig):
    """The teacher of `task: distill`: a frozen model whose next-token distributions the policy is
    trained to match. It may be of any size and family, but must have the policy's tokenizer.
    """


class CheckpointConfig(Config):
    """When and how checkpoints are written. A checkpoint is written to a temporary folder, synced
    to disk and then renamed, so an interrupted save leaves no incomplete checkpoint.
    """

    every: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Number of steps between two checkpoints. 0: the number of steps causes none; `every_minutes`
    may. One more is written after the last step of a run."""
    every_minutes: Annotated[float | None, Range(0.0, 10**6)] = None
    """Minutes between two checkpoints, or between the start and the first: a checkpoint is written
    at the end of the step in which they have passed. 0: time causes no checkpoint. None, the
    default: 20 where `every` is 0, otherwise 0."""
    keep: Annotated[int, Range(1, 10**5)] = 2
    """Number of checkpoints to keep; older ones are removed once a newer one is complete."""
    best: str = ""
    """Also keep the checkpoint with the highest value of this metric of an evaluation, such as
    eval/accuracy, or with the lowest, as in min:eval/loss; of equal ones the newest. Each step with
    an evaluation gets a checkpoint then. Empty: the newest `keep` alone are kept."""
    background: bool = True
    """Train on while a checkpoint is written, from a copy in the host's memory: 12 bytes for each
    trained parameter and the weights, divided by the ranks that share them. What would leave less
    than a tenth of the host's memory is written before training goes on."""
    save_within_s: Annotated[float, Range(1.0, LONGEST_WAIT_S)] = 6.0
    """Seconds after SIGTERM or Ctrl-C until the step that the run is in and its checkpoint must be
    finished; later there is no checkpoint of this moment. What starts the ranks must wait for
    longer: `megarl run` does, torchrun needs --shutdown-timeout."""
    owner_timeout_s: Annotated[float, Range(15.0, LONGEST_WAIT_S)] = 60.0
    """Seconds after which a run takes over the run folder of a run on another host that gives no
    sign of life; a run gives one every 5 seconds. On one host the process itself is looked for."""

    @property
    def minutes(self) -> float:
        """Minutes between two checkpoints; 0: time causes no checkpoint. The value is
        `every_minutes` if that is set. Otherwise it is 20 if `every` is 0, and 0 if `every` counts
        steps.
        """
        if self.every_minutes is None:
            return 0.0 if self.every else 20.0
        return self.every_minutes


class TrainingConfig(Config):
    """How the policy is trained: parallel layout, DeepSpeed, optimizer and batches."""

    layout: LayoutConfig = section(LayoutConfig)
    sequence: SequenceConfig = section(SequenceConfig)
    tensor_backend: Literal["plan", "autotp"] = "plan"
    """Implementation of tensor parallelism: megarl's own layers, or DeepSpeed AutoTP, which does
    not shard embedding and output head."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage. Over data x sequence ranks, 1 partitions optimizer state, 2 also
    gradients, 3 also parameters."""
    precision: Precision = "float32"
    """Dtype of weights and activations; with bfloat16 and float16 the optimizer keeps float32
    master weights. float16, for GPUs without bfloat16: the loss is multiplied by a scale, which is
    halved where gradients overflow, and the step is computed again. bfloat16x2, on CPU: float32,
    whose matrix products are sums of products of bfloat16 numbers; processors with AMX are faster
    at them. auto: bfloat16x2 on processors with AMX; with a ZeRO stage of 1 or more bfloat16 on
    GPUs that have it, and float16 on others; else float32; a line at the start says which."""
    reduce_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype in which gradients are summed over the data x sequence ranks; auto: the dtype of
    weights and activations. A rank adds up its micro-batches in float32 in any case. float32 sends
    twice the bytes of bfloat16. Measured on two ranks that train in bfloat16: the gradient is 2.3 %
    away from float32's with both. With more ranks bfloat16 rounds more often."""
    num_mini_batches: Annotated[int, Range(1, MOST_SAMPLES)] = 1
    """Parts of each step's batch, with an optimizer step each; after the first, training is
    off-policy."""
    epochs_per_step: Annotated[int, Range(1, 1000)] = 1
    """Passes over each step's batch, PPO's epochs; each makes `num_mini_batches` optimizer
    steps."""
    micro_batch_tokens: Annotated[int, Range(2, MOST_TOKENS)] = 8192
    """Maximum number of tokens of a packed sequence for each rank; a longer sample is packed alone.
    With sequence parallelism the limit of a packed sequence is this times `layout.sequence`."""
    share_prefix: SharePrefix = "auto"
    """Compute a prefix that several samples of a packed sequence have in common, such as the prompt
    of a group, once for all of them: where that saves at least a sixteenth of their tokens (auto),
    wherever it saves a token (on), or never."""
    attention: Literal["auto", "torch", "flash_attn", "reference"] = "auto"
    """Kernel of attention within the documents of a packed sequence, on one rank: torch's; that of
    the package flash-attn (GPU, 16 bit); FlashAttention-4 where it is installed and supports the
    GPU, and else torch's (auto), which a run on GPUs says at its start; or matrix products, to
    compare with. Sequence parallelism, shared prefixes, sliding windows, soft caps and sinks use
    `sequence.block` instead."""
    norms: Literal["model", "torch"] = "model"
    """RMSNorm by the model's code in transformers, which is several kernels, or by torch's
    function, which is one on a GPU. In 16 bit they round differently."""
    elementwise: Literal["model", "triton"] = "model"
    """Rotary embeddings, and the activation of an MLP's gate times its other half, by the model's
    code in transformers, which is several kernels each, or by megarl's Triton kernels, one each,
    which need a GPU. In 16 bit they round differently."""
    logprobs: Literal["chunked", "liger"] = "chunked"
    """Implementation of log-probs and entropies: megarl's own kernels, or Liger's, which needs a
    GPU and tensor-parallel degree 1."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    offload_optimizer: Annotated[bool, Of("zero_stage", 1, 2, 3)] = False
    """Keep optimizer state in host memory (ZeRO 1-3)."""
    offload_gradients: Annotated[
        Literal["step", "micro_batch"], Of("offload_optimizer", True), Of("zero_stage", 3)
    ] = "step"
    """When gradients are moved to the host, with `offload_optimizer`. step: once an optimizer step;
    until then their sums stay on the device, in float32. micro_batch, for ZeRO 3: in every
    micro-batch, and back for the next one; slower, without that memory on the device. Roles with a
    ZeRO stage 1 or 2 of their own move them once a step."""
    max_skipped_steps: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Number of times that the policy, and the critic, may each skip an optimizer step because a
    log-prob, a value, the loss or a gradient is NaN or infinite; continuations of the run count
    anew. A skipped step changes neither weights nor optimizer state. Once more ends the run; 0 ends
    it at the first."""
    max_empty_steps: Annotated[int, Range(1, MOST_STEPS)] = 5
    """The run ends after this many steps in a row that trained on no token, because dynamic
    sampling has rejected every group. Once the weights have been updated, only steps count in which
    most responses were wrong."""
    lora: Annotated[LoraConfig, Of("tensor_backend", "plan")] = section(LoraConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    num_threads: Annotated[int, Range(0, 1024)] = 0
    """CPU threads of each trainer rank. 0: OMP_NUM_THREADS of the environment, which `torchrun`
    sets to 1 and `megarl run` does not; where that is not set, the machine's cores, divided
    among its ranks; with `rollout.max_staleness` above 0, half of the cores."""
    collective_timeout_s: Annotated[float, Range(1.0, LONGEST_WAIT_S)] = 720.0
    """The run ends with an error if a collective takes longer, in seconds. The limit also holds for
    the time that the other ranks wait for rank 0 to read and tokenise the data. Where roles have
    ranks of their own, it holds for the time without a sign of life of rank 0, and ten times as
    much for the time that a rank waits for another role to load, score or train a step."""

    @property
    def dtype(self) -> DtypeName:
        """Dtype of weights and activations: "float32", "bfloat16" or "float16". For a `precision`
        of "auto", which each rank resolves for its device, this is only the guess of memory
        estimates: "bfloat16" with a ZeRO stage of 1 or more, else "float32".
        """
        if self.precision == "auto" and self.zero_stage > 0:
            return "bfloat16"
        return self.precision if self.precision in ("bfloat16", "float16") else "float32"

    @property
    def reduced_dtype(self) -> DtypeName:
        """Dtype in which gradients are summed over ranks: `reduce_dtype`, or `dtype` for "auto"."""
        return self.dtype if self.reduce_dtype == "auto" else self.reduce_dtype

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps for the batch of one training step: mini-batches x epochs."""
        return self.num_mini_batches * self.epochs_per_step

    def check(self) -> None:
        require(
            self.dtype == "float32" or self.zero_stage > 0,
            f"training.precision {self.dtype} needs DeepSpeed's ZeRO; set training.zero_stage to 1,"
            " 2 or 3",
        )
