"""Parameter tables by model type: from `config.json` to every tensor's name, shape and use.

To add a model type, add an entry to `FAMILIES`: the defaults of its configuration class in
transformers, which layers have biases, whether heads are normalised, whether it has experts. Then
add a small model of it to tests/unit/test_families.py, which compares tables with checkpoints, and
to tests/system/test_engine_table.py, which compares every element of every engine rank with what
vLLM's own weight loaders put there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.weight_sync.parameters import VOCAB_PADDING, Cut, ParameterSpec, Section


def no_difference(settings: Mapping[str, Any]) -> str:
    """An empty string: no known difference between vLLM and transformers."""
    return ""


def head_width_difference(settings: Mapping[str, Any]) -> str:
    """How vLLM's head width differs from config.json's `head_dim`, or an empty string."""
    if settings["head_dim"] * settings["num_attention_heads"] == settings["hidden_size"]:
        return ""
    return (
        f"head_dim is {settings['head_dim']}, but vLLM takes hidden_size / num_attention_heads,"
        " whatever head_dim says"
    )


def output_bias_difference(settings: Mapping[str, Any]) -> str:
    """How vLLM treats an attention output bias differently from transformers, or an empty string.
    vLLM's loader ignores surplus biases, so this is the only check.
    """
    return (
        "attention_bias is true, but vLLM has no bias on o_proj and drops the model's"
        if settings["attention_bias"]
        else ""
    )


def untied_difference(settings: Mapping[str, Any]) -> str:
    """How vLLM treats an output head of its own differently from transformers, or an empty
    string."""
    return "" if settings["tie_word_embeddings"] else "output head is not tied, but vLLM ties it"


def qwen2_difference(settings: Mapping[str, Any]) -> str:
    """How vLLM's Qwen2 differs from this model, or an empty string."""
    return head_width_difference(settings) or mixed_windows_difference(settings)


def qwen3_difference(settings: Mapping[str, Any]) -> str:
    """How vLLM's Qwen3 differs from this model, or an empty string."""
    return output_bias_difference(settings) or mixed_windows_difference(settings)


def mixed_windows_difference(settings: Mapping[str, Any]) -> str:
    """An empty string unless some layers, but not all, have a sliding window. vLLM's Qwen models
    then end at the start, or attend to everything in every layer.
    """
    kinds = settings.get("layer_types")
    if kinds is None:
        if not settings.get("use_sliding_window") or settings.get("sliding_window", 0) is None:
            return ""
        # As transformers does: the first `max_window_layers` layers have no window.
        without = settings.get("max_window_layers", 28)
        kinds = [layer >= without for layer in range(settings["num_hidden_layers"])]
    if len(set(kinds)) < 2:
        return ""
    return "layers have a sliding window in part, but vLLM has it in all layers or in none"


Switch = bool | str
"""Whether a model type has a property: True, False, or the setting in config.json that says so."""


@dataclass(frozen=True)
class Family:
    """How a model type differs from the common decoder-only transformer."""

    defaults: Mapping[str, Any]
    """Settings that transformers' configuration class adds where config.json lacks them; `head_dim`
    None means hidden_size / num_attention_heads."""
    qkv_bias: Switch = False
    """Whether query, key and value projections have a bias."""
    output_bias: Switch = False
    """Whether the attention output projection has a bias."""
    mlp_bias: Switch = False
    """Whether the MLP's projections have a bias."""
    head_norms: bool = False
    """Whether queries and keys are normalised, head by head."""
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Names of the norms of a layer, besides those of heads."""
    stacked: bool = False
    """Whether the checkpoint has query, key and value projections as one tensor, and gate and up
    projections as another, as engines store them."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """(setting of the MLP's activation function, the only value that vLLM has for it)."""
    experts: bool = False
    """Whether layers may be mixtures of experts."""
    differs: Callable[[Mapping[str, Any]], str] = no_difference
    """Function of the settings: what vLLM computes differently from transformers, or an empty
    string."""


_COMMON = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": None,
    "tie_word_embeddings": False,
}
_QWEN = _COMMON | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_LLAMA = _COMMON | {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None}
_GEMMA = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
_SANDWICH = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_GELU = ("hidden_activation", "gelu_pytorch_tanh")
_SPARSE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}

FAMILIES: dict[str, Family] = {
    "qwen2": Family(_QWEN, qkv_bias=True, differs=qwen2_difference),
    "qwen3": Family(
        _QWEN | {"head_dim": 128, "attention_bias": False},
        head_norms=True,
        differs=qwen3_difference,
    ),
    "llama": Family(
        _LLAMA | {"attention_bias": False, "mlp_bias": False},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family(_LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8}),
    "gemma3_text": Family(
        _GEMMA,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_norms=True,
        layer_norms=_SANDWICH,
        activation=_GELU,
        differs=untied_difference,
    ),
    "gemma2": Family(
        _GEMMA | {"vocab_size": 256000},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        layer_norms=_SANDWICH,
        activation=_GELU,
        differs=untied_difference,
    ),
    "granite": Family(
        _LLAMA | {"attention_bias": False, "mlp_bias": False},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "phi3": Family(
        _LLAMA | {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192},
        stacked=True,
    ),
    "qwen3_moe": Family(
        _QWEN | _SPARSE, head_norms=True, experts=True, differs=output_bias_difference
    ),
}
"""{model_type of config.json: its family}"""

WITHOUT_TABLE = {
    **dict.fromkeys(
        ("olmo", "olmo2", "olmo3", "smollm3"),
        "vLLM has no implementation of its own for it, only its transformers backend",
    ),
    "gpt_oss": "its layers are mixtures of experts, which are not trained here",
}
"""{model type that is known to have no table: why}"""

_OTHER_NAMES = {"num_local_experts": "num_experts"}
"""{name that newer versions of transformers write: name in `Family.defaults`}"""


def parameter_table(config: Mapping[str, Any]) -> list[ParameterSpec]:
    """Every tensor of a model's checkpoint, in the order of vLLM's model.

    `config` is the content of config.json. Raises `ValueError` for an unknown model type, quantised
    weights, or settings under which vLLM computes something else than transformers.
    """
    family, settings = _read(config)
    hidden, embedding = settings["hidden_size"], (settings["vocab_size"], settings["hidden_size"])
    table = [_unstacked("model.embed_tokens.weight", embedding, "vocab")]
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        table += _attention(f"{prefix}.self_attn", family, settings)
        table += (_experts if _is_sparse(layer, family, settings) else _dense)(
            f"{prefix}.mlp", family, settings
        )
        table += [_unstacked(f"{prefix}.{name}.weight", (hidden,)) for name in family.layer_norms]
    table.append(_unstacked("model.norm.weight", (hidden,)))
    if classifies(config):
        table.append(_unstacked("score.weight", (1, hidden)))
    elif not settings["tie_word_embeddings"]:
        table.append(_unstacked("lm_head.weight", embedding, "vocab"))
    repeated = [
        name for name, count in Counter(parameter.name for parameter in table).items() if count > 1
    ]
    assert not repeated, f"the table names {repeated[0]} twice"
    return table


def classifies(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a sequence classifier, such as a reward model."""
    names = config.get("architectures") or []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def refuse_engine_tensor(config: Mapping[str, Any], tensor: int) -> None:
    """Raise `ValueError` where vLLM cannot split this model over `tensor` ranks.

    The message says what to set.
    """
    family, settings = _read(config)
    sparse = {_is_sparse(layer, family, settings) for layer in range(settings["num_hidden_layers"])}
    sizes = {"num_attention_heads": settings["num_attention_heads"]}
    if False in sparse:
        sizes["intermediate_size"] = settings["intermediate_size"]
    if True in sparse:
        sizes["moe_intermediate_size"] = settings["moe_intermediate_size"]
    sizes[f"vocab_size padded to a multiple of {VOCAB_PADDING}"] = (
        -(-settings["vocab_size"] // VOCAB_PADDING) * VOCAB_PADDING
    )
    for name, size in sizes.items():
        if size % tensor:
            raise ValueError(
                f"rollout.engine.tensor is {tensor}, which does not divide the model's {name} ="
                f" {size}; set it to a divisor"
            )
    heads = settings["num_key_value_heads"]
    if heads % tensor and tensor % heads:
        raise ValueError(
            f"rollout.engine.tensor is {tensor} and the model's num_key_value_heads {heads}:"
            " neither divides the other; set rollout.engine.tensor to a divisor or a multiple"
        )
    if True in sparse and tensor > settings["num_experts"]:
        raise ValueError(
            f"rollout.engine.tensor is {tensor}, more than the model's num_experts ="
            f" {settings['num_experts']}; lower it"
        )


def _read(config: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """(family, settings) of a config.json, with transformers' defaults for missing settings.

    Raises `ValueError` as `parameter_table` does.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None or "text_config" in config:
        why = f" ({WITHOUT_TABLE[str(kind)]})" if kind in WITHOUT_TABLE else ""
        raise ValueError(
            f"model type {kind} has no parameter table{why}, so its weights cannot be resharded to"
            " engines; add an entry to FAMILIES in megarl/weight_sync/families.py (known:"
            f" {', '.join(FAMILIES)}; text only)"
        )
    if config.get("quantization_config") is not None:
        raise ValueError(
            "the model's config.json has a quantization_config, and quantised weights have no"
            " parameter table; set model.path to a checkpoint that is not quantised"
        )
    settings = {
        **family.defaults,
        **{_OTHER_NAMES.get(name, name): value for name, value in config.items()},
    }
    if settings["head_dim"] is None:
        settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
    if settings["num_key_value_heads"] is None:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    difference = family.differs(settings)
    if difference:
        raise ValueError(
            f"the model's {difference}: engines would sample from another {kind} model; set"
            " model.path to another"
        )
    return family, settings


def _is_sparse(layer: int, family: Family, settings: Mapping[str, Any]) -> bool:
    """Whether layer number `layer` is a mixture of experts."""
    if (
        not family.experts
        or settings["num_experts"] == 0
        or layer in (settings["mlp_only_layers"] or ())
    ):
        return False
    return (layer + 1) % settings["decoder_sparse_step"] == 0


def _is_on(switch: Switch, settings: Mapping[str, Any]) -> bool:
    """Whether a model with these settings has the property that `switch` describes."""
    return switch if isinstance(switch, bool) else bool(settings[switch])


def _unstacked(name: str, shape: tuple[int, ...], cut: Cut = "whole") -> ParameterSpec:
    """Parameter spec of a tensor that the engine stores by itself under the same name."""
    return ParameterSpec(name, shape, cut, name)


def _column_parallel(
    prefix: str, stack: str, parts: Mapping[str, tuple[int, Cut, int]], inputs: int, *, bias: bool
) -> list[ParameterSpec]:
    """Parameter specs of linear layers that are split by outputs and stacked into one, `stack`.

    `parts`: {layer name: (outputs, cut, KV heads)} in stacking order; `inputs`: their number of
    inputs.
    """
    weights = [
        ParameterSpec(
            f"{prefix}.{name}.weight", (outputs, inputs), cut, f"{prefix}.{stack}.weight", heads
        )
        for name, (outputs, cut, heads) in parts.items()
    ]
    biases = [
        ParameterSpec(f"{prefix}.{name}.bias", (outputs,), cut, f"{prefix}.{stack}.bias", heads)
        for name, (outputs, cut, heads) in parts.items()
    ]
    return weights + (biases if bias else [])


def _stacked(
    prefix: str, stack: str, parts: Mapping[str, tuple[int, Cut, int]], inputs: int, *, bias: bool
) -> list[ParameterSpec]:
    """As `_column_parallel`, for a checkpoint in which the layers are one tensor called `stack`."""
    assert not bias, "no family has biases there"
    rows = sum(outputs for outputs, _, _ in parts.values())
    name, sections = f"{prefix}.{stack}.weight", tuple(Section(*part) for part in parts.values())
    return [ParameterSpec(name, (rows, inputs), "sections", name, sections=sections)]


def _row_parallel(name: str, outputs: int, inputs: int, *, bias: bool) -> list[ParameterSpec]:
    """Parameter specs of a linear layer that is split by inputs.

    Its bias is added once, so every rank has all of it.
    """
    return [_unstacked(f"{name}.weight", (outputs, inputs), "inputs")] + (
        [_unstacked(f"{name}.bias", (outputs,))] if bias else []
    )


def _attention(prefix: str, family: Family, settings: Mapping[str, Any]) -> list[ParameterSpec]:
    """Parameter specs of an attention layer's tensors."""
    hidden, width = settings["hidden_size"], settings["head_dim"]
    queries, heads = settings["num_attention_heads"] * width, settings["num_key_value_heads"]
    parts: dict[str, tuple[int, Cut, int]] = {
        "q_proj": (queries, "outputs", 0),
        "k_proj": (heads * width, "kv_heads", heads),
        "v_proj": (heads * width, "kv_heads", heads),
    }
    make = _stacked if family.stacked else _column_parallel
    made = make(prefix, "qkv_proj", parts, hidden, bias=_is_on(family.qkv_bias, settings))
    made += _row_parallel(
        f"{prefix}.o_proj", hidden, queries, bias=_is_on(family.output_bias, settings)
    )
    norms = ("q_norm", "k_norm") if family.head_norms else ()
    return made + [_unstacked(f"{prefix}.{name}.weight", (width,)) for name in norms]


def _dense(prefix: str, family: Family, settings: Mapping[str, Any]) -> list[ParameterSpec]:
    """Parameter specs of a gated MLP's tensors."""
    hidden, inner, bias = (
        settings["hidden_size"],
        settings["intermediate_size"],
        _is_on(family.mlp_bias, settings),
    )
    parts: dict[str, tuple[int, Cut, int]] = {
        "gate_proj": (inner, "outputs", 0),
        "up_proj": (inner, "outputs", 0),
    }
    make = _stacked if family.stacked else _column_parallel
    return make(prefix, "gate_up_proj", parts, hidden, bias=bias) + _row_parallel(
        f"{prefix}.down_proj", hidden, inner, bias=bias
    )


def _experts(prefix: str, family: Family, settings: Mapping[str, Any]) -> list[ParameterSpec]:
    """Parameter specs of a mixture of experts: router, then the weights of each expert.

    The engine stacks them expert by expert: gate and up in w13 [experts, 2 x inner, hidden], down
    in w2 [experts, hidden, inner].
    """
    hidden, inner, experts = (
        settings["hidden_size"],
        settings["moe_intermediate_size"],
        range(settings["num_experts"]),
    )
    engine = f"{prefix}.experts.routed_experts"
    made = [_unstacked(f"{prefix}.gate.weight", (len(experts), hidden))]
    for expert in experts:
        for name in ("gate_proj", "up_proj"):
            made.append(
                ParameterSpec(
                    f"{prefix}.experts.{expert}.{name}.weight",
                    (inner, hidden),
                    "outputs",
                    f"{engine}.w13_weight",
                )
            )
    for expert in experts:
        made.append(
            ParameterSpec(
                f"{prefix}.experts.{expert}.down_proj.weight",
                (hidden, inner),
                "inputs",
                f"{engine}.w2_weight",
            )
        )
    return made
