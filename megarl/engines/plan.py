"""Engines, refused where they do not fit the model, the machine or the trainer."""

from __future__ import annotations

import importlib.util
import os
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING

import psutil

from megarl.engines.interface import InferenceEngine
from megarl.engines.vllm_engine import VLLM_RANKS
from megarl.environments.user_code import function_of
from megarl.parallel import launcher
from megarl.settings.config import RunConfig
from megarl.settings.rollout import EngineConfig
from megarl.settings.schema import is_own, require, shortened

if TYPE_CHECKING:
    import transformers

CPU_HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head widths that the CPU attention of vLLM 0.32 is compiled for."""


def plan_engines(
    config: RunConfig,
    hf: transformers.PretrainedConfig,
    num_policy_ranks: int,
    num_ranks: int,
    *,
    is_started: bool,
) -> None:
    """Raise `ValueError` unless the engines fit the model, the way of publishing, the policy's
    ranks and the devices. `is_started`: whether a launcher has started the ranks.
    """
    rollout, lora = config.rollout, config.training.lora
    if not is_own(rollout.engine.kind):
        check_engine_tensor(hf, rollout.engine.tensor)
    if lora.is_on and lora.publish == "adapter":
        require(
            lora.rank <= VLLM_RANKS[-1],
            f"training.lora.rank is {lora.rank} and training.lora.publish 'adapter', but vLLM"
            f" takes adapters up to rank {VLLM_RANKS[-1]}; set training.lora.publish to 'merged'",
        )
        require(
            rollout.placement != "colocated",
            "training.lora.publish is 'adapter' and rollout.placement 'colocated', where engines"
            " give up their weights in each step; set training.lora.publish to 'merged'",
        )
    from megarl.parallel.mesh import local_device  # torch, without which sizes can be checked

    on_gpus = local_device().type == "cuda"
    hosts = num_ranks // launcher.ranks_per_host() if is_started else 1
    check_placement(config, num_policy_ranks, hosts, shares_gpus=on_gpus, started=is_started)


def check_placement(
    config: RunConfig,
    num_policy_ranks: int,
    hosts: int,
    *,
    shares_gpus: bool,
    started: bool = True,
) -> None:
    """Raise `ValueError`, with what to set, unless there are devices for all engines, and the
    configured transport can bring weights to them. `num_policy_ranks`: whose GPUs colocated engines
    share. `hosts`: of the run. `shares_gpus`: trainer and engines both run on GPUs of this machine.
    `started`: whether a launcher has started the ranks.
    """
    rollout, transport = config.rollout, config.weight_sync.transport
    colocated = rollout.placement == "colocated"
    engine_ranks = rollout.num_engines * rollout.engine.tensor
    if colocated:
        require(
            engine_ranks == num_policy_ranks,
            f"rollout.placement is 'colocated': {rollout.num_engines} engine(s) of"
            f" rollout.engine.tensor {rollout.engine.tensor} are {engine_ranks} engine ranks, but"
            f" the policy has {num_policy_ranks} ranks to share with; set rollout.num_engines so"
            " that they are as many",
        )
        require(
            rollout.max_staleness == 0,
            "rollout.placement is 'colocated', where engines sleep while the trainer works, but"
            f" rollout.max_staleness is {rollout.max_staleness}; set it to 0, or the placement to"
            " 'disaggregated'",
        )
    require(
        transport != "cuda_ipc" or (colocated and shares_gpus),
        "weight_sync.transport is 'cuda_ipc', which is for engines on the trainer's GPUs; set it to"
        " 'shared_memory' or 'point_to_point', or rollout.placement to 'colocated'",
    )
    variable = expandable_segments() if transport == "cuda_ipc" else ""
    require(
        not variable,
        f"weight_sync.transport is 'cuda_ipc', but the environment variable {variable} has"
        " expandable_segments:True, with which another process can open a GPU's memory only where"
        " the system lets it copy file descriptors (ptrace); remove that from the variable, or set"
        " weight_sync.transport to 'shared_memory'",
    )
    require(
        hosts == 1 or transport == "point_to_point",
        f"weight_sync.transport is {transport!r}, which works within one host, but this run has"
        f" {hosts}; set it to 'point_to_point'",
    )
    require(
        not started or colocated or not shares_gpus or bool(os.environ.get("RAY_ADDRESS")),
        "on GPUs the engines need GPUs that the trainer ranks do not see; start the run with"
        " megarl run RECIPE.yaml, or start Ray with only the engines' GPUs visible and set"
        " RAY_ADDRESS",
    )


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""With settings of torch's GPU allocator, as NAME:VALUE,NAME:VALUE."""


def expandable_segments() -> str:
    """The environment variable that switches expandable segments on, or ""."""
    for variable in ALLOCATOR_VARIABLES:
        settings = os.environ.get(variable, "").lower().replace(" ", "").split(",")
        if "expandable_segments:true" in settings:
            return variable
    return ""


def check_engine_kind(
    kind: str, hf: transformers.PretrainedConfig, router_replay: str = "off"
) -> None:
    """Raise `ValueError` if `rollout.engine.kind` cannot be used: vLLM must be installed and
    support the model, an own class must have all async methods of `InferenceEngine`, and report
    experts for `algorithm.router_replay: rollout`.
    """
    if not is_own(kind):
        require(
            importlib.util.find_spec("vllm") is not None,
            "rollout.engine.kind is vllm, but vLLM is not installed; `pip install 'megarl[cuda]'`,"
            " or for the CPU see docs/howto/install.md",
        )
        check_engine_model(hf)
        return
    engine = function_of(kind, {}, "rollout.engine.kind")
    methods = [name for name, f in vars(InferenceEngine).items() if iscoroutinefunction(f)]
    missing = [name for name in methods if not iscoroutinefunction(getattr(engine, name, None))]
    require(
        not missing,
        f"rollout.engine.kind {kind} lacks the async methods {', '.join(missing)}; add them"
        " (docs/howto/own_engine.md)",
    )
    require(
        router_replay != "rollout" or getattr(engine, "reports_experts", False),
        f"algorithm.router_replay is 'rollout', but rollout.engine.kind {kind} does not report the"
        " experts of each token; set router_replay to 'trainer' or 'off', or report them"
        " (docs/howto/own_engine.md)",
    )


def check_engine_model(hf: transformers.PretrainedConfig) -> None:
    """Raise `ValueError` for a model that vLLM would refuse, or would not generate text with."""
    names = hf.architectures or []
    require(
        not names or any(name.endswith("ForCausalLM") for name in names),
        f"config.json of model.path has architectures {shortened(str(names))}, which generate no"
        " text; set model.path to a causal language model (...ForCausalLM)",
    )
    windows = set(getattr(hf, "layer_types", None) or ())
    differs = {
        "cohere2": "has sliding windows that are a token longer in vLLM than in transformers",
        **dict.fromkeys(
            ("qwen2", "qwen3") if len(windows) > 1 else (),
            "has a sliding window in some layers, and vLLM in all layers or in none",
        ),
    }
    require(
        hf.model_type not in differs,
        f"model type {hf.model_type} of model.path {differs.get(hf.model_type)}: engines would"
        " sample from another model; set model.path to another",
    )


def check_engine_tensor(hf: transformers.PretrainedConfig, tensor: int) -> None:
    """Raise `ValueError` if vLLM cannot split the attention over `tensor` ranks. What else does not
    fit is reported as the parameter table is recorded.
    """
    heads = hf.get_text_config().num_attention_heads
    require(
        heads % tensor == 0,
        f"rollout.engine.tensor is {tensor}, which does not divide the model's"
        f" num_attention_heads = {heads}; set it to a divisor",
    )


def head_width(hf: transformers.PretrainedConfig) -> int:
    """Elements of an attention head."""
    text = hf.get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def check_cache(
    engine: EngineConfig,
    hf: transformers.PretrainedConfig,
    longest: int,
    *,
    section: str,
    shorter: str,
    engines: int = 1,
    fewer: str = "",
) -> None:
    """Raise `ValueError` unless vLLM's CPU attention supports the model, and the key-value caches
    of `engines` engines fit in memory, each at least a request of `longest` tokens. `section`: of
    the engines. `shorter` and `fewer`: settings that lower `longest` and `engines`.
    """
    text = hf.get_text_config()
    width = head_width(hf)
    require(
        width in CPU_HEAD_WIDTHS,
        f"the model's attention heads are {width} wide, which vLLM does not have on CPU; choose a"
        f" model with one of {', '.join(map(str, CPU_HEAD_WIDTHS))}",
    )
    num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    values = 2 * text.num_hidden_layers * max(1, num_heads // engine.tensor) * width * longest
    need = values * (4 if engine.dtype == "float32" else 2) / 2**30
    require(
        need <= engine.kv_cache_gib,
        f"{section}.kv_cache_gib is {engine.kv_cache_gib:g}, but one request of {longest}"
        f" tokens needs {need:.2f} GiB; raise it or lower {shorter}",
    )
    total = engine.kv_cache_gib * engine.tensor * engines
    free = psutil.virtual_memory().available / 2**30
    require(
        total <= free,
        f"{engines} engine(s) x {engine.tensor} rank(s) x"
        f" {section}.kv_cache_gib = {total:g} GiB of cache, but this machine has {free:.1f}"
        f" GiB of memory available; lower {section}.kv_cache_gib{fewer and ' or '}{fewer}",
    )
