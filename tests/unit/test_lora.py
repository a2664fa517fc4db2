"""Adapters without ranks: their formula, their files, and what is said of adapters that do not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.tiny import adapter_shapes, random_adapter, write_adapter, write_model

from megarl.checkpoints.adapter_files import CONFIG, PREFIX, SCORE, TENSORS, read_adapter
from megarl.settings.schema import replace
from megarl.settings.training import LoraConfig, ModelConfig, TrainingConfig
from megarl.trainer.loading import empty_model
from megarl.trainer.lora import A, Adapters, B, MergedWeights, chosen_layers, new_adapter
from megarl.trainer.plan import check_adapters

LORA = LoraConfig(rank=2, alpha=6.0, targets=("q_proj", "down_proj"))


@given(st.integers(1, 7), st.integers(1, 6), st.integers(1, 3), st.integers(1, 9))
def test_slices_of_a_merged_weight_are_those_of_the_whole(
    num_outputs: int, num_inputs: int, rank: int, slices: int
) -> None:
    """Also where the last slice is padded, or has nothing."""
    draw = torch.Generator().manual_seed(num_outputs * 100 + num_inputs)
    weight = torch.randn(num_outputs, num_inputs, generator=draw)
    a = torch.randn(rank, num_inputs, generator=draw)
    b = torch.randn(num_outputs, rank, generator=draw)
    local, adapters = {"x" + A: a, "x" + B: b}, Adapters(("x",), 1.5)
    whole = (weight.double() + 1.5 * b.double() @ a.double()).view(-1)
    found = MergedWeights({"x.weight": weight.view(-1)}, local, adapters, slice_number=None)
    assert list(found) == ["x.weight"]
    torch.testing.assert_close(found["x.weight"].double(), whole, rtol=1e-5, atol=1e-5)

    size = -(-weight.numel() // slices)
    padded = torch.cat([weight.view(-1), torch.zeros(size * slices - weight.numel())])
    parts = [
        MergedWeights({"x.weight": part}, local, adapters, slice_number=number)["x.weight"]
        for number, part in enumerate(padded.split(size))
    ]
    joined = torch.cat(parts)
    torch.testing.assert_close(joined[: len(whole)].double(), whole, rtol=1e-5, atol=1e-5)
    assert not joined[len(whole) :].any()


def test_new_adapters_are_drawn_by_name_and_change_nothing() -> None:
    shapes = {"x" + A: (2, 9), "x" + B: (5, 2), "y" + A: (2, 9)}

    def drawn(name: str, seed: int) -> torch.Tensor:
        found = new_adapter(name, shapes=shapes, seed=seed)
        assert found is not None and found.shape == shapes[name]
        return found

    first = drawn("x" + A, 1)
    assert first.abs().max() <= 9**-0.5 and first.std() > 0.05
    assert not drawn("x" + B, 1).any() and torch.equal(first, drawn("x" + A, 1))
    assert not torch.equal(first, drawn("y" + A, 1)) and not torch.equal(first, drawn("x" + A, 2))
    assert new_adapter("x.weight", shapes=shapes, seed=1) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def adapter(model: str, tmp_path: Path) -> LoraConfig:
    return random_adapter(tmp_path / "adapter", model, LORA)


def test_all_linear_layers_but_the_head_are_adapted(model: str) -> None:
    names = chosen_layers(empty_model(ModelConfig(path=model)), LoraConfig(rank=1))
    assert len(names) == 2 * 7 and not any("lm_head" in name for name in names)
    assert len(adapter_shapes(model, LORA)) == 2 * 2 * 2


def test_what_is_written_is_read(model: str, adapter: LoraConfig) -> None:
    found = read_adapter(adapter, adapter_shapes(model, LORA))
    stored = load_file(str(Path(adapter.adapter) / TENSORS))
    assert found.keys() == adapter_shapes(model, LORA).keys()
    assert all(torch.equal(stored[PREFIX + name], tensor) for name, tensor in found.items())
    check_adapters(adapter, ModelConfig(path=model))


def settings(folder: str, **changes: Any) -> None:
    path = Path(folder) / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(("change", "message"), [
    ({"r": 4}, "has r 4 where this run has 2; set training.lora.rank to 4"),
    ({"lora_alpha": 8}, "set training.lora.alpha to 8"),
    ({"use_dora": True}, "has use_dora True where this run has False; set another adapter"),
    ({"peft_type": "IA3"}, "has peft_type 'IA3' where this run has 'LORA'"),
    ({"rank_pattern": {"q_proj": 8}}, "has rank_pattern"),
    ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', with which PEFT changes the"),
    ({"init_lora_weights": "olora"}, "with which PEFT changes the base model"),
    ({"init_lora_weights": "corda"}, "with which PEFT changes the base model"),
    ({"alora_invocation_tokens": [3, 5]}, "has alora_invocation_tokens"),
    ({"use_qalora": True}, "has use_qalora"),
    ({"layers_to_transform": [0]}, "has layers_to_transform"),
    ({"r": None}, "has no rank"),
])  # fmt: skip
def test_an_adapter_of_another_kind_is_refused(
    model: str, adapter: LoraConfig, change: dict[str, Any], message: str
) -> None:
    settings(adapter.adapter, **change)
    with pytest.raises(ValueError, match=message):
        check_adapters(adapter, ModelConfig(path=model))


@pytest.mark.parametrize(("targets", "message"), [
    (["down_proj", "q_proj"], "set training.lora.targets to ['down_proj', 'q_proj'], or"),
    ("all-linear", "set training.lora.targets to [] (the adapter's target_modules is 'all-"),
    (".*(q|down)_proj", "target_modules '.*(q|down)_proj', a regular expression, matches"),
])  # fmt: skip
def test_other_layers_are_named_as_they_are_set(
    model: str, adapter: LoraConfig, targets: Any, message: str
) -> None:
    """PEFT takes a list of layers, a regular expression, or "all-linear"."""
    settings(adapter.adapter, target_modules=targets)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_adapters(replace(adapter, targets=("q_proj",)), ModelConfig(path=model))


def test_an_adapter_of_a_base_with_other_weights_is_refused(
    model: str, adapter: LoraConfig, tmp_path: Path
) -> None:
    """All shapes fit; only the weights say that the base is another one."""
    other = str(write_model(tmp_path / "other", seed=7))
    with pytest.raises(ValueError, match=r"trained on another base model than.*whose weights"):
        check_adapters(adapter, ModelConfig(path=other))


def test_an_adapter_without_a_digest_is_warned_about(
    model: str, adapter: LoraConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As PEFT writes it: only the name of the base model can be compared."""
    check_adapters(adapter, ModelConfig(path=model))
    assert not capsys.readouterr().err
    tensors = {name: torch.randn(shape) for name, shape in adapter_shapes(model, LORA).items()}
    write_adapter(tmp_path / "bare", tensors, LORA, base="org/Some-8B", base_digest="")
    bare = replace(LORA, adapter=str(tmp_path / "bare"))
    check_adapters(bare, ModelConfig(path=model))
    assert "was made for 'org/Some-8B'" in capsys.readouterr().err
    (tmp_path / "Some-8B").symlink_to(model)
    check_adapters(bare, ModelConfig(path=str(tmp_path / "Some-8B")))
    assert not capsys.readouterr().err


def test_a_score_head_is_read_where_the_model_has_one(model: str, tmp_path: Path) -> None:
    shapes = adapter_shapes(model, LORA)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    score = torch.randn(1, 64)
    write_adapter(tmp_path, tensors | {SCORE: score}, LORA, base=model, base_digest="")
    lora = replace(LORA, adapter=str(tmp_path))
    found = read_adapter(lora, shapes | {SCORE: (1, 64)})
    assert torch.equal(found[SCORE], score) and len(found) == len(shapes) + 1
    check_adapters(lora, ModelConfig(path=model), "scalar")
    with pytest.raises(ValueError, match=r"has a score\.weight, .* set an adapter of a language"):
        check_adapters(lora, ModelConfig(path=model))
    # The adapter of a language model leaves the score head of a reward model as it is.
    write_adapter(tmp_path, tensors, LORA, base=model, base_digest="")
    assert SCORE not in read_adapter(lora, shapes | {SCORE: (1, 64)})
    check_adapters(lora, ModelConfig(path=model), "scalar")
    write_adapter(tmp_path, tensors | {SCORE: torch.randn(2, 64)}, LORA, base=model, base_digest="")
    with pytest.raises(ValueError, match=r"its score\.weight has shape \[2, 64\], and that of"):
        check_adapters(lora, ModelConfig(path=model), "scalar")


def test_an_adapter_of_another_model_or_of_other_layers_is_refused(
    model: str, adapter: LoraConfig, tmp_path: Path
) -> None:
    wide = str(write_model(tmp_path / "wide", hidden_size=128, intermediate_size=64))
    with pytest.raises(ValueError, match=r"made for another base model: .*set model\.path to"):
        check_adapters(adapter, ModelConfig(path=wide))
    (Path(adapter.adapter) / CONFIG).write_text("[1")
    with pytest.raises(ValueError, match="fetch the adapter again"):
        check_adapters(adapter, ModelConfig(path=model))
    (Path(adapter.adapter) / TENSORS).unlink()
    with pytest.raises(ValueError, match=f"has no {TENSORS}"):
        check_adapters(adapter, ModelConfig(path=model))


def test_an_adapter_by_peft_is_read(model: str, tmp_path: Path) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    theirs = PeftConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    network = get_peft_model(AutoModelForCausalLM.from_pretrained(model), theirs)
    network.save_pretrained(str(tmp_path))
    found = read_adapter(replace(LORA, adapter=str(tmp_path)), adapter_shapes(model, LORA))
    written = load_file(str(tmp_path / TENSORS))
    assert len(found) == len(written) == 8
    assert all(torch.equal(written[PREFIX + name], tensor) for name, tensor in found.items())


def test_what_cannot_work_is_refused(model: str) -> None:
    with pytest.raises(
        ValueError, match=r"names c_attn, which the model has not; .* q_proj, k_proj"
    ):
        check_adapters(replace(LORA, targets=("c_attn",)), ModelConfig(path=model))
    with pytest.raises(ValueError, match=re.escape("set model.from_scratch to false")):
        check_adapters(LORA, ModelConfig(path=model, from_scratch=True))
    with pytest.raises(ValueError, match=r"LoraConfig.targets is .*, but LoraConfig.rank is 0"):
        LoraConfig(targets=("q_proj",))
    with pytest.raises(ValueError, match=r"set .*tensor_backend to 'plan'"):
        TrainingConfig(lora=LORA, tensor_backend="autotp")


def test_damaged_tensors_are_refused(model: str, adapter: LoraConfig) -> None:
    path = Path(adapter.adapter) / TENSORS
    tensors = load_file(str(path))
    first = next(iter(tensors))
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, str(path))
    with pytest.raises(ValueError, match="1 tensors are missing"):
        check_adapters(adapter, ModelConfig(path=model))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="truncated or not safetensors"):
        check_adapters(adapter, ModelConfig(path=model))
