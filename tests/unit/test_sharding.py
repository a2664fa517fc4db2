"""What a model's own plan makes of a tensor axis, without ranks: which parameters are cut, and what
is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.parallel.mesh import Axis
from megarl.parallel.tensor import SharedColumnLinear, whole_shapes
from megarl.trainer.autotp import refuse_autotp
from megarl.trainer.sharding import refuse_tensor, shard_model

KINDS = {
    "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config,
    "llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig,
}  # fmt: skip


SMALL: dict[str, Any] = dict(
    vocab_size=41, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def small(kind: str = "qwen2", **changes: Any) -> transformers.PreTrainedConfig:
    return KINDS[kind](**SMALL | {"head_dim": 8} | changes)


def model(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def axis(size: int, rank: int) -> Axis:
    return Axis("tensor", size, rank, tuple(range(size)), None)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_all_ranks_are_the_whole_model(kind: str, tensor: int, tied: bool) -> None:
    config = small(kind, tie_word_embeddings=tied)
    whole = dict(model(config).named_parameters())
    parts, shards = [], {}
    for rank in range(tensor):
        mine = model(config)
        shards = shard_model(mine, axis(tensor, rank))
        parts.append(dict(mine.named_parameters()))
        shapes = {name: tuple(parameter.shape) for name, parameter in whole.items()}
        assert whole_shapes(mine, shards) == shapes
    for name, parameter in whole.items():
        owned = [part[name] for part in parts]
        if name in shards:
            assert torch.equal(torch.cat(owned, shards[name].dim), parameter)
            assert all(part.tensor_model_parallel for part in owned)
        else:
            assert all(torch.equal(part, parameter) for part in owned)
            assert not any(hasattr(part, "tensor_model_parallel") for part in owned)
    if tensor > 1:
        cut = {name.split(".")[-2] for name in shards}
        # With four ranks for two key heads, key and value projections stay whole.
        expected = {"embed_tokens", "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        expected |= (set() if tied else {"lm_head"}) | (
            {"k_proj", "v_proj"} if tensor == 2 else set()
        )
        assert cut == expected


def test_neighbours_share_a_key_head() -> None:
    config, found = small(num_attention_heads=8, num_key_value_heads=2), []
    for rank in range(8):
        mine = model(config)
        shard_model(mine, axis(8, rank))
        layer: Any = mine.get_submodule("model.layers.0.self_attn.k_proj")
        assert isinstance(layer, SharedColumnLinear)
        found.append(layer.first // 8)
    assert found == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_plan_that_leaves_out_a_layer_of_the_same_input_is_refused() -> None:
    """Its gradient would be summed over ranks that all have the whole of it."""
    whole = model(small())
    whole.get_submodule("model.layers.1.mlp").gate = torch.nn.Linear(32, 1)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.gate.*tensor to 1"):
        shard_model(whole, axis(2, 0))


@pytest.mark.parametrize(("changes", "tensor", "says"), [
    ({"num_attention_heads": 6}, 4, "num_attention_heads = 6"),
    ({"intermediate_size": 50}, 4, "intermediate_size = 50"),
    ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2,
     "num_key_value_heads 3: neither divides the other"),
    ({"vocab_size": 3}, 4, "has 3 words"),
])  # fmt: skip
def test_what_does_not_divide_is_refused(changes: dict[str, int], tensor: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        refuse_tensor(small(**changes), tensor)


def test_a_style_we_do_not_know_is_refused_by_name() -> None:
    config = small()
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.mlp": "moe_tp_experts"}
    config.base_model_tp_plan = plan
    with pytest.raises(ValueError, match="moe_tp_experts"):
        refuse_tensor(config, 2)


def test_a_killed_compilation_does_not_stop_later_runs(tmp_path: Path) -> None:
    """A lock without a process behind it goes once it is older than any compilation; a fresh one
    stays.
    """
    import os
    import time

    from megarl.trainer.compilation import drop_stale_locks

    names = ("deepspeed_shm_comm", "deepspeed_cpu_adam")
    old, fresh = (tmp_path / "py311_cpu" / name / "lock" for name in names)
    for lock in (old, fresh):
        lock.parent.mkdir(parents=True)
        lock.touch()
    os.utime(old, (time.time() - 600,) * 2)
    drop_stale_locks(tmp_path)
    assert fresh.exists() and not old.exists()


LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip

LATENT: dict[str, Any] = dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=8, bos_token_id=1, eos_token_id=2,
)  # fmt: skip

REFUSED: dict[str, tuple[transformers.PreTrainedConfig, int, str]] = {
    "scaled embedding": (
        transformers.VaultGemmaConfig(**SMALL, head_dim=8, final_logit_softcapping=None), 2,
        "VaultGemmaTextScaledWordEmbedding"),
    "parameters on a part of the activations": (
        transformers.ApertusConfig(**SMALL), 2, "mlp.act_fn.alpha"),
    "a soft cap of logits in a model that is not known to have one": (
        transformers.VaultGemmaConfig(**SMALL, head_dim=8), 1, "final_logit_softcapping = 30.0"),
    "a factor of logits in a model that is not known to have one": (
        transformers.LlamaConfig(**SMALL, logit_scale=0.5), 1, "logit_scale = 0.5"),
    "another attention": (
        transformers.BloomConfig(vocab_size=41, hidden_size=32, n_layer=2, n_head=4), 1,
        "bloom.* 0 of its 2"),
    "a bare error of the model's": (
        transformers.GPTJConfig(vocab_size=41, n_embd=32, n_layer=2, n_head=4), 1, "gptj"),
    "experts by another name": (
        transformers.AriaTextConfig(**SMALL, moe_num_experts=2), 1,
        "aria_text is a mixture of experts"),
    "values narrower than keys": (
        transformers.YoutuConfig(**SMALL | LATENT), 1,
        "youtu has values of width 8 and keys of width 16 .*latent"),
    "rotary embeddings of the longest document": (
        transformers.LlamaConfig(**SMALL, rope_parameters=LONG), 1, "longrope rotary"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_wrongly_is_refused_at_start_up(tmp_path: Path, name: str) -> None:
    """Found by comparing every causal language model of transformers with ours (see
    tests/distributed/test_families.py).
    """
    from megarl.settings.training import LayoutConfig, ModelConfig, TrainingConfig
    from megarl.trainer.attention import refuse_unsupported
    from megarl.trainer.plan import check_trainable

    config, tensor, says = REFUSED[name]
    config.save_pretrained(tmp_path)
    training = TrainingConfig(layout=LayoutConfig(tensor=tensor))

    def start_up() -> None:
        refuse_unsupported(config)
        check_trainable(training, ModelConfig(path=str(tmp_path)), config)

    with pytest.raises(ValueError, match=says):
        start_up()


def test_a_block_without_soft_caps_is_refused_for_a_model_that_has_one() -> None:
    from megarl.settings.training import SequenceConfig, TrainingConfig
    from megarl.trainer.plan import refuse_kernels

    training = TrainingConfig(sequence=SequenceConfig(block="flash"))
    with pytest.raises(ValueError, match=r"soft cap \(attn_logit_softcapping of gemma2 is 50.0\)"):
        refuse_kernels(training, transformers.Gemma2Config(**SMALL, head_dim=8), torch.nn.Module())


@pytest.mark.parametrize("config", [
    transformers.Gemma2Config(**SMALL, head_dim=8),
    transformers.GraniteConfig(**SMALL, logits_scaling=2.0),
], ids=["gemma2", "granite"])  # fmt: skip
def test_distillation_refuses_models_that_change_their_logits(
    config: transformers.PreTrainedConfig,
) -> None:
    from megarl.trainer.logits import refuse_transform

    with pytest.raises(ValueError, match=rf"teacher\.model\.path has .*{config.model_type}"):
        refuse_transform(config, "teacher.model.path")
    refuse_transform(transformers.LlamaConfig(**SMALL), "teacher.model.path")


def test_autotp_is_refused_where_heads_have_parameters_of_their_own() -> None:
    """Attention sinks: the plan of transformers cuts them with the heads, AutoTP does not."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 2}
    for name in ("qwen2", "granite_swa"):
        config = transformers.AutoConfig.for_model(name, **sizes, **heads)
        made = transformers.AutoModelForCausalLM.from_config(config)
        refuse_autotp(made, 1)
        if name == "qwen2":
            refuse_autotp(made, 2)
            continue
        with pytest.raises(ValueError, match=r"autotp, which leaves .*self_attn.sinks .* to plan"):
            refuse_autotp(made, 2)
