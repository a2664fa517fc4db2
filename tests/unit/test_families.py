"""A model's parameter table, from its config.json alone: against checkpoints, against the trainer's
cut, and what is refused.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.family_cases import CASES, EXPERTS, SMALL, small

from megarl.parallel.mesh import Axis
from megarl.parallel.tensor import whole_shapes
from megarl.trainer.autotp import refuse_cut_parameters
from megarl.trainer.sharding import shard_model
from megarl.weight_sync import families
from megarl.weight_sync.families import FAMILIES, parameter_table, refuse_engine_tensor
from megarl.weight_sync.parameters import training_shards


def written(config: transformers.PreTrainedConfig, folder: Path) -> dict[str, Any]:
    """What transformers makes of a configuration on disk."""
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def test_autotp_is_refused_where_heads_have_parameters_of_their_own() -> None:
    """Attention sinks: the plan of transformers cuts them with the heads, AutoTP does not."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 2}
    for name in ("qwen2", "granite_swa"):
        config = transformers.AutoConfig.for_model(name, **sizes, **heads)
        model = transformers.AutoModelForCausalLM.from_config(config)
        refuse_cut_parameters(model, 1)
        if name == "qwen2":
            refuse_cut_parameters(model, 2)
            continue
        with pytest.raises(ValueError, match=r"autotp, which leaves .*self_attn.sinks .* to plan"):
            refuse_cut_parameters(model, 2)


def test_every_family_is_among_the_cases() -> None:
    assert {kind for kind, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_a_table_names_what_a_checkpoint_holds(tmp_path: Path, case: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(small(case), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    owned = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    table = parameter_table(json.loads((tmp_path / "config.json").read_text()))
    assert {row.name: row.shape for row in table} == owned
    assert len(table) == len(owned)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_silent_configuration_means_what_transformers_takes_it_for(kind: str) -> None:
    config, family = transformers.CONFIG_MAPPING[kind], FAMILIES[kind]
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    defaults = families._UNSAID | dict(family.defaults)
    assert {name: defaults[name] for name in defaults.keys() & fields.keys()} == {
        name: fields[name] for name in defaults.keys() & fields.keys()
    }
    few = SMALL | (EXPERTS if family.experts else {}) | {"pad_token_id": 0}
    if "num_key_value_heads" in defaults:
        del few["num_key_value_heads"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(**few))
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if ".experts." not in name
    }
    table = parameter_table({"model_type": kind, **few})
    assert {row.name: row.shape for row in table if ".experts." not in row.name} == shapes


def test_old_and_new_names_of_a_setting_mean_the_same(tmp_path: Path) -> None:
    """Published checkpoints say num_experts; transformers 5 writes num_local_experts."""
    new = written(small("qwen3_moe"), tmp_path)
    assert "num_local_experts" in new
    old = {name.replace("num_local_experts", "num_experts"): new[name] for name in new}
    assert parameter_table(old) == parameter_table(new)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("case", [
    case for case, (kind, _) in CASES.items()
    if not (FAMILIES[kind].experts or FAMILIES[kind].stacked)
])  # fmt: skip
def test_a_table_is_cut_as_the_trainer_cuts(tmp_path: Path, case: str, tensor: int) -> None:
    config = small(case)
    table = parameter_table(written(config, tmp_path))
    for rank in range(tensor):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        shards = shard_model(model, Axis("tensor", tensor, rank, tuple(range(tensor)), None))
        assert training_shards(table, tensor) == shards
        assert {row.name: row.shape for row in table} == whole_shapes(model, shards)


@pytest.mark.parametrize(("config", "says"), [
    ({"model_type": "gpt2"},
     r"gpt2 has no parameter table.*FAMILIES in megarl/weight_sync/families.py \(known: qwen2, "),
    ({"model_type": "cohere2"}, r"cohere2 has no parameter table \(vLLM's sliding window is a token"),
    ({}, "model type None has no parameter table"),
    ({"model_type": "llama", "num_hidden_layers": None}, "lacks num_hidden_layers; set model.path"),
    ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}},
     "mistral3 has no parameter table"),
    ({"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}},
     "quantization_config.*set model.path"),
    ({"model_type": "qwen3", "attention_bias": True},
     "vLLM has no bias on o_proj and drops the model's"),
    ({"model_type": "qwen3_moe", "attention_bias": True}, "vLLM has no bias on o_proj"),
    ({"model_type": "qwen2", "head_dim": 64},
     "head_dim is 64, but vLLM takes hidden_size / num_attention_heads"),
    *(({"model_type": kind, "layer_types": ["sliding_attention", "full_attention"]},
       "sliding window in part") for kind in ("qwen2", "qwen3")),
])  # fmt: skip
def test_what_engines_would_compute_wrongly_is_refused(config: dict[str, Any], says: str) -> None:
    tree = SMALL | EXPERTS | {"num_hidden_layers": 32} | config
    with pytest.raises(ValueError, match=says):
        parameter_table({name: value for name, value in tree.items() if value is not None})


@pytest.mark.parametrize("windows", [
    {"use_sliding_window": True, "max_window_layers": 0},
    {"use_sliding_window": True, "max_window_layers": 32},
    {"use_sliding_window": False, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
    {"use_sliding_window": True, "max_window_layers": 1},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_window_in_all_layers_or_in_none_is_published(kind: str, windows: dict[str, Any]) -> None:
    config = transformers.CONFIG_MAPPING[kind](**SMALL | {"head_dim": 8} | windows).to_dict()
    if windows == {"use_sliding_window": True, "max_window_layers": 1}:
        with pytest.raises(ValueError, match="sliding window in part"):
            parameter_table(config)
    else:
        assert parameter_table(config)


@pytest.mark.parametrize(("kind", "changes", "tensor", "says"), [
    ("llama", {"num_attention_heads": 6}, 4,
     "is 4, .*num_attention_heads = 6; set it to a divisor"),
    ("llama", {"intermediate_size": 50}, 4,
     "is 4, which does not divide the model's intermediate_size = 50"),
    ("qwen3_moe", {"intermediate_size": 50, "moe_intermediate_size": 6}, 4,
     "moe_intermediate_size = 6; set it to a divisor"),
    ("llama", {"num_attention_heads": 12, "num_key_value_heads": 3}, 2,
     "num_key_value_heads 3: neither divides the other"),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}, 3,
     "vocab_size padded to a multiple of 64 = 128"),
    ("qwen3_moe", {"num_experts": 3}, 4, "more than the model's num_experts = 3; lower it"),
])  # fmt: skip
def test_what_does_not_divide_is_refused(
    kind: str, changes: dict[str, Any], tensor: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        refuse_engine_tensor({"model_type": kind, **SMALL, **EXPERTS, **changes}, tensor)
