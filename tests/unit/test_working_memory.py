"""The memory of a step and of the host that a dry run tells, against the calculation by hand in the
docs, and the sizes that it takes from DeepSpeed against DeepSpeed's own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.apps.launch.launch import main
from megarl.checks.engine_checks import check_gpu_share
from megarl.config import RunConfig, read
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import Axis
from megarl.trainer import memory, working_memory
from megarl.trainer.config import LoraConfig, TrainingConfig
from megarl.trainer.memory import power_of_two, sub_groups
from megarl.trainer.packing import pack_mini_batch
from megarl.trainer.places import role_training
from megarl.trainer.zero import deepspeed_config
from megarl.types import MicroBatch, Samples
from megarl.weight_sync.families import parameter_table

ROOT = Path(__file__).resolve().parents[2]
QWEN_14B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 5120,
    "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}  # fmt: skip


def by_hand() -> dict[str, float]:
    """{term: GiB} of the table in docs/reference_layouts.md, and `host` of the text below it."""
    text = (ROOT / "docs/reference_layouts.md").read_text()
    text = text[text.index("| term, of a GPU |") :]
    rows = re.findall(r"^\| ([^|]+) \|[^|]*\| ([0-9.]+) \|$", text, re.MULTILINE)
    prose = " ".join(text.split())
    host = re.search(r"Sum (\d+) GiB", prose)
    assert host is not None and len(rows) == 11
    other = re.search(r"micro_batch` .* (\d+) GiB, and ([0-9.]+) GiB a GPU", prose)
    assert other is not None
    found = {name: float(size) for name, size in rows} | {"host": float(host[1])}
    return found | {"host, micro_batch": float(other[1]), "sum, micro_batch": float(other[2])}


def needed(shown: str, on_host: str) -> tuple[float, float]:
    """(GiB a GPU, GiB of the host a rank) of the policy that a dry run tells, with `on_host` on the
    host.
    """
    words = " ".join(shown.split())
    whole = re.search(r"policy: a step needs at most ([0-9.]+) GiB a GPU", words)
    host = re.search(rf"policy: {on_host} are in .* memory, ([0-9.]+) GiB a rank", words)
    assert whole is not None and host is not None
    return float(whole[1]), float(host[1])


def test_what_a_colocated_policy_keeps_on_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """14,770,033,664 parameters on 8 ranks of ZeRO 3: their share, 1e9 elements and an embedding of
    152,064 x 5,120 gathered, two buckets of 64 MiB, digests, and CUDA with NCCL.
    """
    (tmp_path / "config.json").write_text(json.dumps(QWEN_14B))
    recipe = str(ROOT / "launch/recipes/dapo_14b.yaml")
    command = [recipe, "--dry-run", "--nodes", "1", "--gpus-per-node", "8", "--"]
    assert main([*command, "--model.path", str(tmp_path)]) == 0
    by_hand = 2 * 14_770_033_664 / 8 + 2 * (1e9 + 152_064 * 5_120) + 2 * 2**26 + 2**28 + 2**31
    shown = " ".join(capsys.readouterr().out.split())
    # 18 B a parameter over 8 ranks, and what docs/reference_layouts.md has below them for one row.
    assert "policy: a step needs at most 58.2 GiB a GPU" in shown
    most = 1 - by_hand / 80e9
    assert f"keeps {by_hand / 2**30:.1f} GiB a GPU; rollout.engine.gpu_memory" in shown
    assert "gpu_memory_utilization is at most 0.87 of a GPU of 80 GB" in shown
    table, layout = parameter_table(QWEN_14B), Layout(8, 1, 1)

    def check(share: float) -> None:
        words = ["--rollout.engine.gpu_memory_utilization", f"{share:.4f}"]
        check_gpu_share(read(RunConfig, recipe, words), table, layout, 80 * 10**9)

    check(most - 0.001)
    with pytest.raises(ValueError, match=r"keeps 9.1 GiB .* set it to at most 0\.87"):
        check(most + 0.001)


def test_the_dry_run_of_14b_on_8_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_14B))
    recipe = str(ROOT / "launch/recipes/dapo_14b_apart.yaml")
    command = [recipe, "--dry-run", "--nodes", "1", "--gpus-per-node", "8", "--"]
    command += ["--model.path", str(tmp_path)]
    assert main(command) == 0
    shown, wanted = capsys.readouterr().out, by_hand()
    whole, host = needed(shown, "optimizer states")
    assert whole == pytest.approx(wanted.pop("sum"), rel=0.02)
    assert 4 * host == pytest.approx(wanted.pop("host"), rel=0.02)
    assert main([*command, "--training.offload_gradients", "micro_batch"]) == 0
    other, host = needed(capsys.readouterr().out, "gradients and optimizer states")
    assert other == pytest.approx(wanted.pop("sum, micro_batch"), rel=0.02)
    assert 4 * host == pytest.approx(wanted.pop("host, micro_batch"), rel=0.02)
    row = next(line for line in shown.splitlines() if line.startswith("policy "))
    weights, gradients, optimizer, _ = row.split()[-4:]
    assert float(weights) == pytest.approx(wanted.pop("weights"), abs=0.01)
    assert float(gradients) == pytest.approx(wanted.pop("gradients"), abs=0.01)
    assert optimizer == "-"
    words = " ".join(shown.split())
    for name, size in wanted.items():
        told = re.search(rf"{name} ([0-9.]+)", words)
        assert told is not None, name
        assert float(told[1]) == pytest.approx(size, rel=0.05, abs=0.06), name
    terms = sum(wanted.values())
    assert whole == pytest.approx(terms + float(weights) + float(gradients), abs=0.1)


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


def test_a_token_of_the_packed_batch() -> None:
    samples = Samples.one(0, np.arange(1, 1001), mask=np.arange(1000) > 1)
    alone = Axis("sequence", 1, 0, (0,), None)
    (micro,) = pack_mini_batch(samples, [[0]], torch.device("cpu"), alone, "contiguous")
    assert isinstance(micro, MicroBatch)
    fields = [getattr(micro, name) for name in MicroBatch.__slots__]
    columns = [one for one in fields if isinstance(one, torch.Tensor) and len(one) == 1000]
    # Advantages and log-probs are columns of float32 beside it.
    assert sum(one.itemsize for one in columns) + 8 == working_memory.TOKEN_BYTES


def test_terms_follow_the_settings() -> None:
    """Tensor and sequence ranks divide, checkpointing leaves one layer, ZeRO 1 reduces in float32."""
    table = parameter_table(QWEN_14B)
    common: dict[str, Any] = {"longest": 8192, "samples": 64}

    def terms(layout: Layout, **settings: Any) -> dict[str, int]:
        settings = {"zero_stage": 3, "precision": "bfloat16", "micro_batch_tokens": 1024} | settings
        training = TrainingConfig(**settings)
        return working_memory.working_memory(table, QWEN_14B, layout, training, **common)

    one = terms(Layout(4, 1, 1))
    assert one["inputs of layers"] > 48 * 8192 * 13824 * 4 * 2
    assert "one layer recomputed" not in one
    kept = terms(Layout(4, 1, 1), gradient_checkpointing=True)
    assert one["inputs of layers"] == 48 * kept["one layer recomputed"]
    assert terms(Layout(4, 2, 1))["inputs of layers"] == one["inputs of layers"] // 2
    assert terms(Layout(4, 1, 8))["gradient of the head"] == one["gradient of the head"] // 8
    assert terms(Layout(4, 1, 1), zero_stage=1)["reduce bucket"] == 2 * one["reduce bucket"]
    wide = terms(Layout(4, 1, 1), reduce_dtype="float32")
    assert wide["reduce bucket"] == 2 * one["reduce bucket"]
    wide = terms(Layout(4, 1, 1), reduce_dtype="float32", zero_stage=2)
    assert wide["reduce bucket"] == 3 * one["reduce bucket"]
    # No larger than what is trained: 48 layers of q and v with rank 8.
    lora = LoraConfig(rank=8, targets=("q_proj", "v_proj"))
    adapters = 48 * 8 * ((5120 + 5120) + (5120 + 1024))
    assert terms(Layout(4, 1, 1), lora=lora)["reduce bucket"] == adapters * 2
    assert "gathered parameters" not in terms(Layout(4, 1, 1), zero_stage=2)
    assert "offload buffer" not in terms(Layout(4, 1, 1), zero_stage=2)
    assert "offload buffer" not in terms(Layout(4, 1, 1), offload_optimizer=True)
    for stage in (1, 2):  # the head's 152,064 x 5,120 weights, over two tensor ranks
        found = terms(Layout(4, 1, 2), zero_stage=stage, offload_optimizer=True)
        assert found["offload buffer"] == 152064 * 5120 * 2 // 2


def test_rounding_and_parts() -> None:
    assert [power_of_two(size) for size in (0, 1, 3, 4, 5)] == [0, 1, 4, 4, 8]
    assert sub_groups([600_000_000] * 3) == [1_200_000_000, 600_000_000]
    assert sub_groups([5]) == [5]
