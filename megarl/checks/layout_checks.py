"""Checks that the trainer's layout fits the ranks, the model and the device."""

from __future__ import annotations

import importlib.util

import torch
import transformers

from megarl.kernels.block_flash import WIDEST
from megarl.kernels.packed_varlen import provider
from megarl.parallel.layout import Layout, resolve
from megarl.parallel.mesh import Axis, local_device
from megarl.schema import require
from megarl.trainer.attention import prove_attention
from megarl.trainer.autotp import refuse_autotp, refuse_cut_parameters
from megarl.trainer.config import ModelConfig, SequenceConfig, TrainingConfig
from megarl.trainer.heads import HeadName
from megarl.trainer.loading import empty_model
from megarl.trainer.logits import logit_transform
from megarl.trainer.norms import use_torch_norms
from megarl.trainer.optimizers import refuse_optimizer
from megarl.trainer.precision import check_precision
from megarl.trainer.sharding import kv_heads, refuse_tensor, shard_model


def check_layout(training: TrainingConfig, num_ranks: int) -> Layout:
    """The parallel layout for `num_ranks` ranks. Raises `ValueError` if settings contradict each
    other.
    """
    wanted = training.layout
    require(
        wanted.sequence % training.sequence.ulysses == 0,
        f"training.sequence.ulysses is {training.sequence.ulysses}, which does not divide"
        f" training.layout.sequence = {wanted.sequence}; set it to a divisor",
    )
    require(
        wanted.sequence > 1 or training.sequence == SequenceConfig(block=training.sequence.block),
        "training.sequence has settings besides block, but training.layout.sequence is 1, where"
        " they do nothing; leave them out, or set training.layout.sequence above 1",
    )
    require(
        wanted.sequence == 1
        or training.sequence.ulysses < wanted.sequence
        or training.sequence.transport == "auto",
        f"training.sequence.ulysses is {training.sequence.ulysses}, all of"
        " training.layout.sequence, so that nothing is left for transport"
        f" {training.sequence.transport!r}; leave the transport out, or lower ulysses",
    )
    return resolve(
        data=wanted.data, sequence=wanted.sequence, tensor=wanted.tensor, num_ranks=num_ranks
    )


def check_cut(
    training: TrainingConfig,
    config: ModelConfig,
    hf: transformers.PretrainedConfig,
    head: HeadName = "logprobs",
) -> None:
    """Raise `ValueError` unless the model can be sharded over the layout, its attention can be
    computed on packed sequences, and `head` on its states. `hf`: the model's transformers
    configuration.
    """
    refuse = refuse_autotp if training.tensor_backend == "autotp" else refuse_tensor
    refuse(hf, training.layout.tensor)
    empty = empty_model(config)
    prove_attention(empty)
    if training.tensor_backend == "autotp":
        refuse_cut_parameters(empty, training.layout.tensor)
    # AutoTP cuts the same layers, and does not look at what else is in them.
    shard_model(
        empty,
        Axis("tensor", training.layout.tensor, 0, tuple(range(training.layout.tensor)), None),
    )
    refuse_optimizer(training, local_device())
    check_precision(training, local_device())
    if training.logprobs == "liger" and head == "logprobs":
        refuse_liger(training.layout.tensor, hf)
    refuse_kernels(training, hf, empty)
    text, ulysses = hf.get_text_config(), training.sequence.ulysses
    heads = {
        "num_attention_heads": text.num_attention_heads // training.layout.tensor,
        "num_key_value_heads": max(1, kv_heads(hf) // training.layout.tensor),
    }
    for name, here in heads.items():
        fits = here % ulysses == 0 or (name == "num_key_value_heads" and ulysses % here == 0)
        require(
            fits,
            f"training.sequence.ulysses is {ulysses}, but each rank has {here} of the model's"
            f" {name} (training.layout.tensor is {training.layout.tensor}); set"
            f" training.sequence.ulysses to a divisor of {here}",
        )


def refuse_liger(tensor: int, hf: transformers.PretrainedConfig) -> None:
    """Raise `ValueError` if Liger's log-probs cannot run: Liger needs a GPU, its package, logits
    without a soft cap, and a vocabulary that is not split over tensor-parallel ranks.
    """
    missing = {
        "a GPU": local_device().type == "cuda",
        "training.layout.tensor 1": tensor == 1,
        f"logits without a soft cap (model type {hf.model_type} has one)": (
            logit_transform(hf).cap is None
        ),
        "the package liger-kernel": importlib.util.find_spec("liger_kernel") is not None,
    }
    lacking = [name for name, there in missing.items() if not there]
    require(
        not lacking,
        f"training.logprobs is 'liger', which needs {' and '.join(lacking)}; set it to 'chunked'",
    )


def refuse_kernels(
    training: TrainingConfig, hf: transformers.PretrainedConfig, empty: torch.nn.Module
) -> None:
    """Raise `ValueError` if a configured kernel (`training.attention`, `training.sequence.block`,
    `training.norms`, `training.elementwise`) cannot run here, or not with the model `empty`, whose
    parameters have no storage.
    """
    if training.norms == "torch":
        use_torch_norms(empty)
    if training.elementwise == "triton":
        there = local_device().type == "cuda" and importlib.util.find_spec("triton") is not None
        require(
            there,
            "training.elementwise is 'triton', which needs a GPU and the package triton; set it to"
            " 'model'",
        )
        from megarl.trainer.elementwise import use_triton_elementwise  # needs triton

        use_triton_elementwise(empty)
    if training.sequence.block != "auto":
        refuse_block(training, hf)
    if training.attention != "flash_attn":
        return
    device = local_device()
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
    missing = {
        "a GPU": on_gpu,
        "training.precision 'bfloat16' or 'float16'": training.dtype != "float32",
        "a package flash-attn (pip install -e '.[flash-attn-4]' for compute capability 9 and 10, or"
        " flash-attn)": bool(provider(capability)),
    }
    lacking = [name for name, there in missing.items() if not there]
    require(
        not lacking,
        f"training.attention is 'flash_attn', which needs {' and '.join(lacking)}; set it to"
        " 'torch'",
    )


def refuse_block(training: TrainingConfig, hf: transformers.PretrainedConfig) -> None:
    """Raise `ValueError` if the configured attention kernel (`training.sequence.block`) does not
    support the device, the model's head width or its attention scores.
    """
    block, on_gpu, text = (
        training.sequence.block,
        local_device().type == "cuda",
        hf.get_text_config(),
    )
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    flash, cap = block == "flash", getattr(text, "attn_logit_softcapping", None)
    missing = {
        "a GPU": on_gpu or block not in ("triton", "flash"),
        "ranks without GPUs": not on_gpu or block != "cpu",
        "the package triton": block != "triton" or importlib.util.find_spec("triton") is not None,
        "training.precision 'bfloat16' or 'float16'": not flash or training.dtype != "float32",
        f"heads of 8, 16, ... {WIDEST} (here {width})": (
            not flash or (width % 8 == 0 and width <= WIDEST)
        ),
        f"scores without a soft cap (attn_logit_softcapping of {hf.model_type} is {cap})": (
            not flash or not cap
        ),
    }
    lacking = [name for name, there in missing.items() if not there]
    require(
        not lacking,
        f"training.sequence.block is {block!r}, which needs {' and '.join(lacking)}; set the block"
        " to 'auto'",
    )
