"""Memory that a training step needs beside weights, gradients and optimizer state, term by term, as
an upper bound computed before anything is started.

    config.json, parameter table, layout, settings --working_memory--> {term: bytes on a rank's GPU}

The formulas are in docs/reference_layouts.md. T are the tokens of a packed sequence on a rank, b
the bytes of an activation: 2 in bfloat16, 4 in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config import RunConfig
from megarl.kernels.logprobs import CHUNK_BYTES
from megarl.parallel.layout import Layout
from megarl.trainer.config import TrainingConfig
from megarl.trainer.memory import BYTES, GRADIENT_BYTES, on_rank, role_memory, trained_elements
from megarl.weight_sync.config import BUCKET_BYTES
from megarl.weight_sync.parameters import ParameterSpec

BUCKET_ELEMENTS = 500_000_000
"""Elements of DeepSpeed's buffer in which gradients are reduced (`reduce_bucket_size`), at most:
it has no more than are trained."""
LIVE_ELEMENTS = 1_000_000_000
"""Elements of gathered parameters that a role holds under ZeRO 3, at most, beside its largest
module (DeepSpeed's `stage3_max_live_parameters` and `stage3_max_reuse_distance`)."""
TOKEN_BYTES = 57
"""Bytes of a token of the packed batch: five int64, a bool and two float32 in
`megarl.types.MicroBatch`, its advantage and its log-prob."""
DIGEST_BYTES = 2**28
"""Bytes that the digest of a region needs on a GPU, at most: eight rows of `checksums.NUM_WORDS`
64-bit integers."""
RUNTIME_BYTES = 2 * 2**30
"""Bytes of CUDA's context, the libraries' kernels, and NCCL's buffers."""


def working_memory(
    table: Sequence[ParameterSpec],
    model: Mapping[str, Any],
    layout: Layout,
    training: TrainingConfig,
    *,
    longest: int,
    samples: int,
) -> dict[str, int]:
    """Upper bounds, in bytes, of the GPU memory that a training step of one model needs beside
    weights, gradients and optimizer state, on the rank that needs most. Returns {purpose, such as
    "a chunk of logits": bytes}, to be added up.

    `table`: the model's parameters with shapes and how tensor-parallel ranks split them. `model`:
    the content of config.json. `layout`: degrees of parallelism. `training`: dtype, ZeRO stage,
    recomputation and the like. `longest`: tokens of the longest sample, prompt included. `samples`:
    samples of a step, over all ranks.
    """
    each, tensor = BYTES[training.dtype], layout.tensor
    tokens = max(training.micro_batch_tokens, -(-longest // layout.sequence))
    layers, hidden = model["num_hidden_layers"], model["hidden_size"]
    # A row that is kept whole, such as a norm's input, is on every tensor-parallel rank.
    one_layer = tokens * each * (5 * hidden + _wide_rows(model, tensor))
    kept = layers * tokens * hidden * each
    sizes = [on_rank(one, tensor) for one in table]
    head = max(sizes, default=0)
    trained_head = 0 if training.lora.is_on else head
    trained = sum(trained_elements(table, layout, training))
    found = {
        "inputs of layers": kept if training.gradient_checkpointing else layers * one_layer,
        "one layer recomputed": one_layer if training.gradient_checkpointing else 0,
        "gradient of the head": trained_head * (GRADIENT_BYTES + each),
        "a chunk of logits": CHUNK_BYTES["cuda"],
        "the packed batch": -(-samples // layout.data)
        * -(-longest // layout.sequence)
        * TOKEN_BYTES,
        "reduce bucket": min(BUCKET_ELEMENTS, trained) * _reduced_bytes(training),
        "offload buffer": 0,
        "gathered parameters": 0,
        "CUDA and NCCL": RUNTIME_BYTES,
    }
    if training.zero_stage == 3:
        found["gathered parameters"] = _gathered(sizes, training)
    elif training.offload_optimizer:
        # ZeRO 1 and 2 have a buffer of the largest trained parameter, whether they use it or not.
        found["offload buffer"] = each * trained_head
    return {name: size for name, size in found.items() if size}


def kept_memory(table: Sequence[ParameterSpec], layout: Layout, config: RunConfig) -> int:
    """Bytes that the policy keeps on each GPU while inference engines use the rest of the same GPU:
    its weights, the parameters that ZeRO 3 gathers at most, two of the buckets in which weights are
    sent to the engines, room for digests of weights, and a constant for CUDA and NCCL. `table`: the
    policy's parameters with shapes and how tensor-parallel ranks split them. `config`: the run's
    settings.
    """
    training, bucket = config.training, config.weight_sync.bucket_bytes or BUCKET_BYTES["cuda"]
    weights = role_memory(table, layout, training, trains=True).weights
    gathered = _gathered([on_rank(one, layout.tensor) for one in table], training)
    return weights + gathered + 2 * bucket + DIGEST_BYTES + RUNTIME_BYTES


def most_share(kept: int, gpu_bytes: float) -> float:
    """The largest `rollout.engine.gpu_memory_utilization`, rounded to hundredths toward 0, with
    which an inference engine fits on a GPU of `gpu_bytes` bytes beside the policy, which keeps
    `kept` bytes. Not above 0 if no engine fits.
    """
    return int(100 * (1 - kept / gpu_bytes)) / 100


def _gathered(sizes: Sequence[int], training: TrainingConfig) -> int:
    """Bytes of the parameters that ZeRO 3 gathers at most; `sizes`: elements of all parameters."""
    # Fetching ahead stops at a limit, but not the fetch of what is needed at once.
    most = min(sum(sizes), LIVE_ELEMENTS + max(sizes, default=0))
    return BYTES[training.dtype] * most if training.zero_stage == 3 else 0


def _wide_rows(model: Mapping[str, Any], tensor: int) -> int:
    """Elements of a token's rows in one layer that are as wide as heads or the MLP, on one
    tensor-parallel rank, kept for the backward pass: queries, keys and values, those two rotated,
    keys and values repeated for all heads, attention's output; gate, up, activation and product.
    """
    heads = model["num_attention_heads"]
    width = model.get("head_dim") or model["hidden_size"] // heads
    keys = model.get("num_key_value_heads") or heads
    attention = 2 * (heads + keys) + keys + 2 * heads + heads
    return (attention * width + 4 * model["intermediate_size"]) // tensor


def _reduced_bytes(training: TrainingConfig) -> int:
    """Bytes of an element in DeepSpeed's reduction buffer; 0 without ZeRO."""
    own, sent = BYTES[training.dtype], BYTES[training.reduced_dtype]
    # ZeRO 2 keeps gradients in their own dtype, and copies what is sent in another one.
    of_stage = {0: 0, 1: GRADIENT_BYTES, 2: own if own == sent else own + sent, 3: sent}
    return of_stage[training.zero_stage]
