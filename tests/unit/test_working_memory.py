"""The memory that a colocated policy keeps, and sizes of DeepSpeed's buffers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl import cli
from megarl.parallel.layout import Layout
from megarl.settings.config import RunConfig, read
from megarl.settings.training import ModelConfig, TrainingConfig
from megarl.trainer import memory, working_memory
from megarl.trainer.memory import power_of_two, sub_groups
from megarl.trainer.role_placement import role_training
from megarl.trainer.working_memory import check_gpu_share
from megarl.trainer.zero import deepspeed_config

ROOT = Path(__file__).resolve().parents[2]
QWEN_14B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 5120,
    "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}  # fmt: skip


def test_what_a_colocated_policy_keeps_on_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """14,770,033,664 parameters on 8 ranks of ZeRO 3: their share, 1e9 elements and an embedding of
    152,064 x 5,120 gathered, two buckets of 64 MiB, digests, and CUDA with NCCL.
    """
    (tmp_path / "config.json").write_text(json.dumps(QWEN_14B))
    recipe = str(ROOT / "launch/recipes/dapo_14b.yaml")
    command = ["run", recipe, "--dry-run", "--nodes", "1", "--gpus-per-node", "8"]
    assert cli.plan([*command, "--model.path", str(tmp_path)]).run() == 0
    by_hand = 2 * 14_770_033_664 / 8 + 2 * (1e9 + 152_064 * 5_120) + 2 * 2**26 + 2**28 + 2**31
    shown = " ".join(capsys.readouterr().out.split())
    most = 1 - by_hand / 80e9
    assert f"beside engines: {round(by_hand / 2**30, 2)}" in shown
    assert "gpu_memory_utilization: at most 0.87 of 80 GB" in shown
    parameters = memory.sized_parameters(ModelConfig(path=str(tmp_path)), 1)
    layout = Layout(8, 1, 1)

    def check(share: float) -> None:
        words = ["--rollout.engine.gpu_memory_utilization", f"{share:.4f}"]
        check_gpu_share(read(RunConfig, recipe, words), parameters, layout, 80 * 10**9)

    check(most - 0.001)
    with pytest.raises(ValueError, match=r"keeps 9.1 GiB .* set it to at most 0\.87"):
        check(most + 0.001)


def test_a_role_under_another_stage_moves_gradients_once_a_step() -> None:
    words = ["--training.offload_gradients", "micro_batch", "--algorithm.kl.coefficient", "0.1"]
    words.append("--reference.zero_stage")
    for stage, wanted in ((1, "step"), (3, "micro_batch")):
        config = read(RunConfig, ROOT / "launch/recipes/dapo_14b_apart.yaml", [*words, str(stage)])
        training = role_training(config, "reference")
        assert (training.zero_stage, training.offload_gradients) == (stage, wanted)


def test_sizes_of_deepspeed_are_its_own() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    training = TrainingConfig(zero_stage=3, precision="bfloat16", offload_optimizer=True)
    given: Any = deepspeed_config(training, 4)["zero_optimization"]
    zero = DeepSpeedZeroConfig(**given)
    assert zero.reduce_bucket_size == working_memory.BUCKET_ELEMENTS
    assert zero.max_live_parameters == working_memory.LIVE_ELEMENTS
    assert zero.sub_group_size == memory.SUB_GROUP_ELEMENTS
    assert zero.offload_optimizer is not None and zero.offload_optimizer.pin_memory


def test_rounding_and_parts() -> None:
    assert [power_of_two(size) for size in (0, 1, 3, 4, 5)] == [0, 1, 4, 4, 8]
    assert sub_groups([600_000_000] * 3) == [1_200_000_000, 600_000_000]
    assert sub_groups([5]) == [5]
