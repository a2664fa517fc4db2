"""Everything that can be known to be wrong before anything heavy starts, each with one message that
says what to set.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerBase

from megarl.checkpoints.progress import choose, fingerprint, written_under
from megarl.config import RunConfig, SftConfig, longest_request
from megarl.data.config import DemonstrationsConfig, PromptsConfig
from megarl.data.demonstrations import load_demonstrations
from megarl.data.source import load_prompts
from megarl.data.tokenizer import check_tokenizer, load_tokenizer
from megarl.environments.config import EnvironmentConfig
from megarl.environments.scoring import Environment
from megarl.kernels.block_cuda import WIDEST
from megarl.parallel.layout import Layout, resolve
from megarl.parallel.mesh import Axis, local_device, num_ranks, rank
from megarl.parallel.tensor import whole_shapes
from megarl.schema import as_plain, require
from megarl.trainer.attention import prove_attention, refuse_unsupported
from megarl.trainer.autotp import refuse_autotp
from megarl.trainer.config import ModelConfig, SequenceConfig, TrainingConfig
from megarl.trainer.context import RunInputs
from megarl.trainer.loading import check_weights, empty_model, load_model_config
from megarl.trainer.sharding import kv_heads, refuse_tensor, shard_model
from megarl.weight_sync.families import parameter_table, refuse_engine_tensor

CPU_HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's CPU attention is compiled for; kept equal to its own list by a test."""

MIN_FREE_BYTES = 64 * 2**20


def check_train(config: RunConfig) -> RunInputs:
    """The checks of `megarl train` on this machine and these ranks; raises `ValueError`."""
    return check_run(config, num_ranks=num_ranks(), on_cpu=local_device().type == "cpu")


def check_sft(config: SftConfig) -> RunInputs:
    """The checks of `megarl sft`; raises `ValueError`."""
    return check_sft_run(config, num_ranks=num_ranks())


def check_eval(config: RunConfig) -> RunInputs:
    """The checks of `megarl eval`; raises `ValueError`."""
    require(
        num_ranks() == 1,
        f"megarl eval runs as one process, but was started as {num_ranks()} ranks",
    )
    require(
        bool(config.evaluation.prompts.source),
        "evaluation.prompts.source is empty; set it to held-out problems",
    )
    return check_run(config, num_ranks=1, on_cpu=local_device().type == "cpu", new=False)


def check_run(config: RunConfig, *, num_ranks: int, on_cpu: bool, new: bool = True) -> RunInputs:
    """All checks of `megarl train`; raises `ValueError`. Without `new`, the run folder is neither
    used nor looked at.
    """
    layout = check_layout(config.training, num_ranks)
    samples = (
        config.rollout.groups_per_step
        * config.rollout.group_size
        // config.training.num_mini_batches
    )
    require(
        samples >= layout.data,
        f"a mini-batch has {samples} samples for {layout.data} data ranks; raise"
        " rollout.groups_per_step or group_size, or lower training.num_mini_batches",
    )
    if new:
        check_folder(config.folder, resume=config.resume)
    tokenizer, hf = check_model(config.model)
    check_cut(config.training, config.model, hf)
    check_verifier(config.environment)
    prompts = load_prompts(config.prompts, tokenizer, seed=config.seed)
    held_out = (
        load_prompts(config.evaluation.prompts, tokenizer, seed=config.seed)
        if config.evaluation.prompts.source
        else None
    )
    longest = longest_request(config)
    limit = getattr(hf.get_text_config(), "max_position_embeddings", None)
    require(
        limit is None or longest <= limit,
        "the longest prompt (max_prompt_tokens of prompts and of evaluation.prompts) +"
        f" rollout.max_new_tokens is {longest}, but the model's max_position_embeddings is {limit};"
        " lower one of them",
    )
    if new:
        parameter_table(hf.to_dict())
        refuse_engine_tensor(hf.to_dict(), config.rollout.engine.tensor)
        check_weights(config.model)
        check_placement(config, num_ranks=num_ranks, shares_gpus=not on_cpu)
    if on_cpu:
        check_cache_memory(config, hf, longest)
    data = data_name(config.prompts, len(prompts))
    checkpoint = find_checkpoint(config, layout, data) if new else None
    stops = stop_tokens(tokenizer, config.model)
    return RunInputs(layout, tokenizer, hf, stops, data, prompts, held_out, resume_from=checkpoint)


def check_sft_run(config: SftConfig, *, num_ranks: int) -> RunInputs:
    """All checks of `megarl sft`; raises `ValueError`."""
    layout = check_layout(config.training, num_ranks)
    require(
        config.samples_per_step >= layout.data,
        f"samples_per_step is {config.samples_per_step} for {layout.data} data ranks; raise it",
    )
    check_folder(config.folder, resume=config.resume)
    tokenizer, hf = check_model(config.model)
    check_cut(config.training, config.model, hf)
    check_weights(config.model)
    demonstrations = load_demonstrations(config.demonstrations, tokenizer, seed=config.seed)
    data = data_name(config.demonstrations, len(demonstrations))
    checkpoint = find_checkpoint(config, layout, data)
    stops = stop_tokens(tokenizer, config.model)
    return RunInputs(
        layout, tokenizer, hf, stops, data, demonstrations=demonstrations, resume_from=checkpoint
    )


def data_name(config: PromptsConfig | DemonstrationsConfig, num_rows: int) -> str:
    """What must be the same for a cursor into the data to mean the same rows."""
    order = {
        key: value
        for key, value in as_plain(config).items()
        if key in ("subset", "split", "unique", "shuffle", "limit")
    }
    return f"{Path(config.source).name}, {num_rows} rows, {order}"


def check_layout(training: TrainingConfig, num_ranks: int) -> Layout:
    """The layout for `num_ranks`."""
    wanted = training.layout
    require(
        wanted.sequence % training.sequence.ulysses == 0,
        f"training.sequence.ulysses is {training.sequence.ulysses}, which does not divide"
        f" training.layout.sequence = {wanted.sequence}; set it to a divisor",
    )
    require(
        wanted.sequence > 1 or training.sequence == SequenceConfig(),
        "training.sequence has settings, but training.layout.sequence is 1, where they do nothing;"
        " leave them out, or set training.layout.sequence above 1",
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
    training: TrainingConfig, config: ModelConfig, hf: transformers.PretrainedConfig
) -> None:
    """The layout's axes fit the model's heads, widths and words; its attention is one that a row
    can be packed and split for.
    """
    refuse = refuse_autotp if training.tensor_backend == "autotp" else refuse_tensor
    refuse(hf, training.layout.tensor)
    empty = empty_model(config)
    prove_attention(empty)
    if training.tensor_backend == "plan":
        shard_model(
            empty,
            Axis("tensor", training.layout.tensor, 0, tuple(range(training.layout.tensor)), None),
        )
    if training.logprobs == "liger":
        refuse_liger(training.layout.tensor)
    if training.sequence.block != "auto":
        refuse_block(training, hf)
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


def refuse_liger(tensor: int) -> None:
    """Liger's log-probs need a GPU, the package, and all words on one rank."""
    missing = {
        "a GPU": local_device().type == "cuda",
        "training.layout.tensor 1": tensor == 1,
        "the package liger-kernel": importlib.util.find_spec("liger_kernel") is not None,
    }
    lacking = [name for name, there in missing.items() if not there]
    require(
        not lacking,
        f"training.logprobs is 'liger', which needs {' and '.join(lacking)}; set it to 'chunked'",
    )


def refuse_block(training: TrainingConfig, hf: transformers.PretrainedConfig) -> None:
    """A block of attention that is asked for can run on this rank's device with this model, and is
    used.
    """
    block, on_gpu, text = (
        training.sequence.block,
        local_device().type == "cuda",
        hf.get_text_config(),
    )
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    widest = WIDEST.get(block)
    missing = {
        "a GPU": on_gpu or block not in ("triton", "flash", "cudnn"),
        "ranks without GPUs": not on_gpu or block != "cpu",
        "the package triton": block != "triton" or importlib.util.find_spec("triton") is not None,
        "training.precision 'bfloat16'": widest is None or training.precision == "bfloat16",
        f"heads of 8, 16, ... {widest} (here {width})": (
            widest is None or (width % 8 == 0 and width <= widest)
        ),
    }
    lacking = [name for name, there in missing.items() if not there]
    require(
        not lacking,
        f"training.sequence.block is {block!r}, which needs {' and '.join(lacking)}; set the block"
        " to 'auto'",
    )


def check_folder(folder: str, *, resume: bool) -> None:
    """The run folder is new, or `resume` says to go on; its disk has room."""
    path = Path(folder)
    holds_run = (path / "metrics.jsonl").exists() or (path / "checkpoints").exists()
    require(
        resume or not holds_run,
        f"folder {folder} already holds a run; set resume to true to go on with it, or folder to a"
        " new one",
    )
    existing = path
    while not existing.exists():
        existing = existing.parent
    require(
        existing.is_dir(),
        f"folder {folder}: {existing} is a file; set folder to a place where a folder can be made",
    )
    free = shutil.disk_usage(existing).free
    require(
        free >= MIN_FREE_BYTES,
        f"the disk of folder {folder} has {free / 2**20:.0f} MiB free; make room or set another"
        " folder",
    )


def check_verifier(config: EnvironmentConfig) -> None:
    """The verifier loads, in a process of its own as it will in the run."""

    async def load_once() -> None:
        environment = Environment(config)
        try:
            await environment.start()
        finally:
            await environment.close()

    asyncio.run(load_once())


def find_checkpoint(config: RunConfig | SftConfig, layout: Layout, data: str) -> Path | None:
    """The checkpoint to resume, on rank 0; None for a new run."""
    if not config.resume or rank() != 0:
        return None
    return choose(
        Path(config.folder) / "checkpoints",
        layout=written_under(layout, config.training),
        model=fingerprint(whole_shapes(empty_model(config.model), {})),
        seed=config.seed,
        data=data,
    )


def check_model(
    config: ModelConfig,
) -> tuple[PreTrainedTokenizerBase, transformers.PretrainedConfig]:
    """Tokenizer and model description, which must fit each other."""
    hf = load_model_config(config)
    refuse_unsupported(hf)
    if not config.from_scratch and Path(config.path).is_dir():
        require(
            any(Path(config.path).glob("*.safetensors")),
            f"model.path {config.path!r} has no .safetensors weights; set model.from_scratch to"
            " true for random weights, or point model.path at a trained model",
        )
    name = config.tokenizer or config.path
    tokenizer = load_tokenizer(name, trust_remote_code=config.trust_remote_code)
    check_tokenizer(tokenizer, hf.get_text_config().vocab_size, source=name)
    return tokenizer, hf


def stop_tokens(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> list[int]:
    """Ids that end a response: the tokenizer's own, and those of the model's generation
    settings.
    """
    found = [tokenizer.eos_token_id]
    try:
        more = transformers.GenerationConfig.from_pretrained(config.path).eos_token_id
    except OSError:
        more = None
    for token in more if isinstance(more, list) else [more]:
        if token is not None and token not in found:
            found.append(token)
    return [int(token) for token in found]  # type: ignore[arg-type]


def check_placement(config: RunConfig, *, num_ranks: int, shares_gpus: bool) -> None:
    """Engines have room and weights a way to them; `shares_gpus`: trainer and engines are both on
    this machine's GPUs.
    """
    rollout, transport = config.rollout, config.weight_sync.transport
    colocated, engine_ranks = (
        rollout.placement == "colocated",
        rollout.num_engines * rollout.engine.tensor,
    )
    if colocated:
        require(
            engine_ranks == num_ranks,
            f"rollout.placement is 'colocated': {rollout.num_engines} engine(s) of"
            f" rollout.engine.tensor {rollout.engine.tensor} are {engine_ranks} engine ranks, but"
            f" there are {num_ranks} trainer ranks to share with; set rollout.num_engines so that"
            " they are as many",
        )
        require(
            rollout.max_staleness == 0,
            "rollout.placement is 'colocated', where engines sleep while the trainer works, but"
            f" rollout.max_staleness is {rollout.max_staleness}; set it to 0, or the placement to"
            " 'disaggregated'",
        )
    require(
        not (colocated and shares_gpus)
        or config.training.zero_stage > 0
        or config.training.offload_optimizer,
        "rollout.placement is 'colocated' and training.zero_stage 0, under which DeepSpeed cannot"
        " give the optimizer's memory to the engines; set training.zero_stage to 1 or more",
    )
    require(
        transport != "cuda_ipc" or (colocated and shares_gpus),
        "weight_sync.transport is 'cuda_ipc', which is for engines on the trainer's GPUs; set it to"
        " 'shared_memory' or 'point_to_point', or rollout.placement to 'colocated'",
    )
    require(
        (transport == "disk") == bool(config.weight_sync.folder),
        f"weight_sync.transport is {transport!r} and weight_sync.folder is"
        f" {config.weight_sync.folder!r}: a folder is for the transport 'disk', which needs one"
        " that trainer and engines see under the same name",
    )
    hosts = num_ranks // int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    require(
        hosts == 1 or transport in ("point_to_point", "disk"),
        f"weight_sync.transport is {transport!r}, which works within one host, but this run has"
        f" {hosts}; set it to 'point_to_point'",
    )
    require(
        colocated or not shares_gpus or bool(os.environ.get("RAY_ADDRESS")),
        "on GPUs the engines need GPUs that the trainer ranks do not see; start the run with"
        " launch/dapo_14b.sh --recipe, or start Ray with only the engines' GPUs visible and set"
        " RAY_ADDRESS",
    )


def check_cache_memory(config: RunConfig, hf: transformers.PretrainedConfig, longest: int) -> None:
    """The engines have attention for this model on CPU, and their caches fit into memory and hold
    one longest request.
    """
    import psutil

    text, engine = hf.get_text_config(), config.rollout.engine
    heads = kv_heads(hf)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    require(
        width in CPU_HEAD_WIDTHS,
        f"the model's attention heads are {width} wide, which vLLM does not have on CPU; choose a"
        f" model with one of {', '.join(map(str, CPU_HEAD_WIDTHS))}",
    )
    per_token = (
        2
        * text.num_hidden_layers
        * max(1, heads // engine.tensor)
        * width
        * (4 if engine.dtype == "float32" else 2)
    )
    need = longest * per_token / 2**30
    require(
        need <= engine.kv_cache_gib,
        f"rollout.engine.kv_cache_gib is {engine.kv_cache_gib:g}, but one request of {longest}"
        f" tokens needs {need:.2f} GiB; raise it or lower rollout.max_new_tokens",
    )
    total, free = (
        engine.kv_cache_gib * engine.tensor * config.rollout.num_engines,
        psutil.virtual_memory().available / 2**30,
    )
    require(
        total <= free,
        f"{config.rollout.num_engines} engine(s) x {engine.tensor} rank(s) x"
        f" rollout.engine.kv_cache_gib = {total:g} GiB of cache, but this machine has {free:.1f}"
        " GiB of memory available; lower rollout.engine.kv_cache_gib or rollout.num_engines",
    )
