"""Exports: what older readers need beside the weights, and files that are carried over."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny import write_model
from transformers import AutoConfig

from megarl.checkpoints.export import with_older_keys, write_configs_and_tokenizer
from megarl.data.tokenizer import load_tokenizer
from megarl.settings.training import ModelConfig
from megarl.trainer.loading import empty_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
 "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "older"), [
    ("qwen2", {"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_scaling": None}),
    ("qwen2", {"rope_theta": 1e6, "rope_scaling": YARN}, {"rope_theta": 1e6, "rope_scaling": YARN}),
    ("llama", {"rope_scaling": LLAMA3}, {"rope_theta": 1e4, "rope_scaling": LLAMA3}),
    ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 7e3},
     {"rope_theta": 1e6, "rope_local_base_freq": 7e3}),
    ("stablelm", {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}),
    ("gpt_neox", {"rotary_emb_base": 5e3, "rotary_pct": 0.5},
     {"rotary_emb_base": 5e3, "rotary_pct": 0.5}),
])  # fmt: skip
def test_older_keys_stand_beside_the_newer(
    kind: str, settings: dict[str, Any], older: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    sizes |= {"max_position_embeddings": 256, "dtype": "bfloat16"}
    AutoConfig.for_model(kind, **sizes, **copy.deepcopy(settings)).save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    written = with_older_keys(json.loads((tmp_path / "config.json").read_text()))
    assert written.items() >= (older | {"torch_dtype": "bfloat16"}).items()
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == read.rope_parameters


def test_a_tokenizers_files_are_carried_over_as_they_were(tmp_path: Path) -> None:
    source, out = write_model(tmp_path / "source"), tmp_path / "out"
    described = json.loads((source / "tokenizer_config.json").read_text())
    described |= {"tokenizer_class": "LlamaTokenizerFast", "our_own": [1, {"x": "\u00e9"}]}
    (source / "tokenizer_config.json").write_text(json.dumps(described, indent=7))
    (source / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n\n")
    (source / "tokenizer.model").write_bytes(b"\0of SentencePiece")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_bytes(b"{{ documents }}")
    files = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    tokenizer, model = load_tokenizer(str(source)), empty_model(ModelConfig(path=str(source)))
    for path in files:
        path.unlink()
    write_configs_and_tokenizer(out, model, tokenizer)
    own = ("config.json", "generation_config.json", "model.safetensors")
    for path, content in files.items():
        assert path.name in own or (out / path.relative_to(source)).read_bytes() == content
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    write_configs_and_tokenizer(tmp_path / "changed", model, tokenizer)
    described = json.loads((tmp_path / "changed" / "tokenizer_config.json").read_text())
    assert described["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert load_tokenizer(str(tmp_path / "changed")).pad_token == "<|pad|>"


def test_what_only_transformers_5_can_read_is_named_for_older_ones(tmp_path: Path) -> None:
    source, file = write_model(tmp_path / "source"), "tokenizer_config.json"
    described = json.loads((source / file).read_text())
    assert described["tokenizer_class"] == "TokenizersBackend"
    (source / file).write_text(json.dumps(described | {"extra_special_tokens": ["<|new|>"]}))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": None}))
    model = empty_model(ModelConfig(path=str(source), from_scratch=True))
    tokenizer = load_tokenizer(str(source))
    write_configs_and_tokenizer(tmp_path / "out", model, tokenizer)
    described = json.loads((tmp_path / "out" / file).read_text())
    assert described["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert described["additional_special_tokens"] == ["<|new|>"]
    again = load_tokenizer(str(tmp_path / "out"))
    assert again.get_vocab() == tokenizer.get_vocab() and "<|new|>" in again.all_special_tokens
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Qwen2ForCausalLM"]
