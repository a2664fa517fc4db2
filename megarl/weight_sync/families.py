"""Parameter tables by model type: from `config.json` to every tensor's name, shape, and place in
inference engines.

To add a model type, add an entry to `FAMILIES`: what its configuration class in transformers
adds, which layers have biases, whether heads are normalised, whether it has experts. Then
add small models of it to tests/support/family_cases.py: tests/unit/test_families.py compares their
tables with checkpoints, and tests/system/test_engine_table.py every element of every engine rank
with what vLLM's own weight loaders put there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.weight_sync.parameters import VOCAB_PADDING, Cut, ParameterSpec, Section


def head_width_difference(settings: Mapping[str, Any]) -> str:
    """Check for a model type whose heads have the width hidden_size / num_attention_heads in vLLM,
    whatever `head_dim` says. `settings`: those of config.json. Returns a phrase for an error
    message if `head_dim` is another number, else "".
    """
    if settings["head_dim"] * settings["num_attention_heads"] == settings["hidden_size"]:
        return ""
    return (
        f"head_dim is {settings['head_dim']}, but vLLM takes hidden_size / num_attention_heads,"
        " whatever head_dim says"
    )


def output_bias_difference(settings: Mapping[str, Any]) -> str:
    """Check for a model type whose attention output projection has no bias in vLLM. `settings`:
    those of config.json. Returns a phrase for an error message if transformers has that bias, else
    "". vLLM's loader ignores surplus biases, so this is the only check.
    """
    return (
        "attention_bias is true, but vLLM has no bias on o_proj and drops the model's"
        if settings["attention_bias"]
        else ""
    )


def untied_difference(settings: Mapping[str, Any]) -> str:
    """Check for a model type for which vLLM ties the output head to the embedding. `settings`:
    those of config.json. Returns a phrase for an error message if the model's head is not tied,
    else "".
    """
    return "" if settings["tie_word_embeddings"] else "output head is not tied, but vLLM ties it"


def mixed_windows_difference(settings: Mapping[str, Any]) -> str:
    """Check for a model type for which vLLM has a sliding window in all layers or in none.
    `settings`: those of config.json, with transformers' `layer_types`. Returns a phrase for an
    error message if only some layers have a window, else "". With such a model vLLM's Qwen classes
    fail at the start, or ignore the window in every layer.
    """
    if len(set(settings.get("layer_types") or ())) < 2:
        return ""
    return "layers have a sliding window in part, but vLLM has it in all layers or in none"


Switch = bool | str
"""Whether a model type has a property: True, False, or the setting in config.json that says so."""


@dataclass(frozen=True)
class Family:
    """Describes how the tensors of one model type differ from the common decoder-only transformer
    (Llama's), so that `parameter_table` can list a model's tensors from its config.json, without
    loading it. `FAMILIES` has one for each known model type.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """{setting: value} of what transformers' configuration class adds where config.json lacks it,
    besides `_UNSAID`; `num_key_value_heads` None means num_attention_heads."""
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
    """(name of the setting with the MLP's activation function, the only value that vLLM has for it)
    """
    experts: bool = False
    """Whether layers may be mixtures of experts."""
    differs: tuple[Callable[[Mapping[str, Any]], str], ...] = ()
    """Functions that get the settings of config.json, and return what vLLM computes differently
    from transformers under them, as a phrase, or ""."""


_UNSAID: dict[str, Any] = {
    "head_dim": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
"""What settings mean that a config.json may lack; `head_dim` None means hidden_size /
num_attention_heads."""

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
"""Settings that every config.json has."""

_LLAMA = Family(
    {"num_key_value_heads": None},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
)
_GEMMA2 = Family(
    {"head_dim": 256, "tie_word_embeddings": True},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    layer_norms=(
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    differs=(untied_difference,),
)

FAMILIES: dict[str, Family] = {
    "qwen2": Family(qkv_bias=True, differs=(head_width_difference, mixed_windows_difference)),
    "qwen3": Family(
        {"head_dim": 128},
        head_norms=True,
        differs=(output_bias_difference, mixed_windows_difference),
    ),
    "llama": _LLAMA,
    "mistral": Family(),
    "gemma3_text": replace(_GEMMA2, head_norms=True),
    "gemma2": _GEMMA2,
    "granite": _LLAMA,
    "phi3": Family({"num_key_value_heads": None}, stacked=True),
    "qwen3_moe": Family(head_norms=True, experts=True, differs=(output_bias_difference,)),
}
"""{model_type of config.json: how its tensors differ from the common transformer}"""

WITHOUT_TABLE = {
    "cohere2": "vLLM's sliding window is a token longer than transformers'",
    "gpt_oss": "its layers are mixtures of experts, which are not trained here",
}
"""{model type that is known to have no table: why}"""

_OTHER_NAMES = {"num_local_experts": "num_experts"}
"""{name that newer versions of transformers write: name of the setting here}"""


def parameter_table(config: Mapping[str, Any]) -> list[ParameterSpec]:
    """Every tensor of a model's checkpoint, in the order of vLLM's model, with its name and shape,
    and how vLLM's tensor-parallel ranks split and store it.

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
    assert len({one.name for one in table}) == len(table), "the table names a tensor twice"
    return table


def needs_recording(config: Mapping[str, Any]) -> bool:
    """Whether a model is of a type that has no entry in `FAMILIES`, but whose parameter table
    (name, shape and split of each tensor) may be recorded from vLLM's loader
    (`megarl.cluster.recorded_table`). `config`: the content of its config.json. False for quantised
    weights, classifiers, and types known not to work.
    """
    known = {*FAMILIES, *WITHOUT_TABLE}
    odd = "text_config" in config or config.get("quantization_config") is not None
    return config.get("model_type") not in known and not odd and not classifies(config)


def classifies(config: Mapping[str, Any]) -> bool:
    """Whether a model is a sequence classifier, such as a reward model. `config`: the content of
    its config.json.
    """
    names = config.get("architectures") or []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def refuse_engine_tensor(config: Mapping[str, Any], tensor: int) -> None:
    """Raise `ValueError` if vLLM cannot split a model over `tensor` tensor-parallel ranks; the
    message says what to set. `config`: the content of the model's config.json. Raises `ValueError`
    for a model without a parameter table, too.
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
        **_UNSAID,
        **family.defaults,
        **{_OTHER_NAMES.get(name, name): value for name, value in config.items()},
    }
    sizes = (*_SIZES, *(("num_experts", "moe_intermediate_size") if family.experts else ()))
    for name in sizes:
        if name not in settings:
            raise ValueError(
                f"the model's config.json lacks {name}; set model.path to a checkpoint whose"
                " config.json says it"
            )
    if settings["head_dim"] is None:
        settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
    if settings["num_key_value_heads"] is None:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    for difference in filter(None, (differs(settings) for differs in family.differs)):
        raise ValueError(
            f"the model's {difference}: engines would sample from another {kind} model; set"
            " model.path to another"
        )
    return family, settings


def _is_sparse(layer: int, family: Family, settings: Mapping[str, Any]) -> bool:
    """Whether layer number `layer` is a mixture of experts."""
    return (
        family.experts
        and settings["num_experts"] > 0
        and layer not in (settings["mlp_only_layers"] or ())
        and (layer + 1) % settings["decoder_sparse_step"] == 0
    )


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
    leaves = {"weight": (inputs,), "bias": ()} if bias else {"weight": (inputs,)}
    return [
        ParameterSpec(
            f"{prefix}.{name}.{leaf}", (outputs, *rest), cut, f"{prefix}.{stack}.{leaf}", heads
        )
        for leaf, rest in leaves.items()
        for name, (outputs, cut, heads) in parts.items()
    ]


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
    hidden, inner = settings["hidden_size"], settings["intermediate_size"]
    bias = _is_on(family.mlp_bias, settings)
    part: tuple[int, Cut, int] = (inner, "outputs", 0)
    parts = {"gate_proj": part, "up_proj": part}
    make = _stacked if family.stacked else _column_parallel
    return make(prefix, "gate_up_proj", parts, hidden, bias=bias) + _row_parallel(
        f"{prefix}.down_proj", hidden, inner, bias=bias
    )


def _experts(prefix: str, family: Family, settings: Mapping[str, Any]) -> list[ParameterSpec]:
    """Parameter specs of a mixture of experts: router, then the weights of each expert.

    The engine stacks them expert by expert: gate and up in w13 [experts, 2 x inner, hidden], down
    in w2 [experts, hidden, inner].
    """
    hidden, inner = settings["hidden_size"], settings["moe_intermediate_size"]
    experts, engine = range(settings["num_experts"]), f"{prefix}.experts.routed_experts"

    def weight(name: str, shape: tuple[int, int], cut: Cut, stack: str) -> ParameterSpec:
        return ParameterSpec(f"{prefix}.experts.{name}.weight", shape, cut, f"{engine}.{stack}")

    wide = [f"{expert}.{name}" for expert in experts for name in ("gate_proj", "up_proj")]
    return [
        _unstacked(f"{prefix}.gate.weight", (len(experts), hidden)),
        *(weight(name, (inner, hidden), "outputs", "w13_weight") for name in wide),
        *(weight(f"{one}.down_proj", (hidden, inner), "inputs", "w2_weight") for one in experts),
    ]
