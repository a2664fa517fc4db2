"""What vLLM's own loaders put where, element by element, against the parameter table.

Every element of a tiny checkpoint is a number of its own. A process builds vLLM's model class as
each tensor rank of an engine would, lets it load that checkpoint, and writes down its parameters:
they say which element came from where, or from nowhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import CASES, EXPERTS, SMALL

ROOT = Path(__file__).resolve().parents[2]

THREE: dict[str, Any] = {"num_key_value_heads": 3, "hidden_size": 96}
REFUSED: dict[str, tuple[str, dict[str, Any], int]] = {
    "heads": ("llama", {"num_attention_heads": 4}, 8),
    "key heads": ("llama", THREE | {"num_attention_heads": 12}, 2),
    "inner": ("qwen2", {"intermediate_size": 50}, 4),
    "inner of experts": ("qwen3_moe", EXPERTS | {"moe_intermediate_size": 18}, 4),
    "vocab": ("llama", THREE | {"num_attention_heads": 6}, 3),
    "experts": ("qwen3_moe", EXPERTS | {"num_experts": 4, "num_attention_heads": 8}, 8),
}
"""Name -> (model type, changes of SMALL, tensor) that neither vLLM nor we accept."""

OTHERS: dict[str, dict[str, Any]] = {
    "cohere": {},
    "exaone4": {},
    "glm4": {"head_dim": 8, "pad_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64},
    "gpt_neox": {},
    "nemotron": {},
    "olmo2": {},
    "seed_oss": {"head_dim": 8},
    "stablelm": {},
    "starcoder2": {},
}
"""Model types without a table -> changes of SMALL."""
COMPUTED = {"bloom": {"n_layer": 2, "n_head": 8}, "phi": {}}
"""The same, whose loaders compute."""

TENSORS = (1, 2, 4, 8)
DROPPED = {"qwen3": {}, "qwen3_moe": EXPERTS}
"""Model types whose bias on the attention's output vLLM drops."""


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """A checkpoint whose elements are 1, 2, 3, ..., exact in float32."""
    made, first = {}, 1
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        made[name] = torch.arange(first, first + count, dtype=torch.float32).reshape(shape)
        first += count
    assert first < 2**24
    return made


class Engine:
    """vLLM's model classes as one rank of an engine builds them, without the others."""

    def __init__(self, folder: Path) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import parallel_state

        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(
                1, 0, f"file://{folder}/rendezvous", 0, "gloo"
            )
            parallel_state.initialize_model_parallel()
        self.group = parallel_state.get_tp_group()

    def build(self, folder: Path, tensor: int, rank: int) -> torch.nn.Module:
        """Rank `rank` of `tensor`'s model of the config.json in `folder`, every element -1. Raises
        what vLLM raises.
        """
        from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor.models import ModelRegistry

        # Layers ask this group which rank they are; they do not speak to the others before they
        # compute.
        self.group.world_size, self.group.rank_in_group = tensor, rank
        model = ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True
        )
        kind, _ = ModelRegistry.resolve_model_cls(model.architectures, model)
        settings = VllmConfig(model_config=model)
        with set_current_vllm_config(settings):
            built: torch.nn.Module = kind(vllm_config=settings)  # pyright: ignore[reportCallIssue]
        for parameter in built.parameters():
            parameter.data.fill_(-1)
        return built


def recorded(model: Any, tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]] | str:
    """The table of one rank that is recorded from vLLM's loader, or why there is none."""
    from megarl.cluster.recorded_table import rank_table

    try:
        return rank_table(model, {name: tuple(one.shape) for name, one in tensors.items()})
    except ValueError as error:
        return str(error)


def write_what_engines_hold(folder: Path) -> None:
    """Beside every config.json with a checkpoint, what each rank holds of it; beside one without,
    what vLLM says to it.
    """
    engine = Engine(folder)
    for path in sorted(folder.glob("*/config.json")):
        case, checkpoint = path.parent, path.parent / "checkpoint.pt"
        for tensor in json.loads((case / "tensors.json").read_text()):
            if not checkpoint.exists():
                try:
                    engine.build(case, tensor, tensor - 1)
                except (ValueError, AssertionError) as error:
                    (case / "refused").write_text(repr(error))
                continue
            for rank in range(tensor):
                model: Any = engine.build(case, tensor, rank)
                tensors = torch.load(checkpoint)
                rows = recorded(model, tensors)
                (case / f"{tensor}-{rank}.json").write_text(json.dumps(rows))
                model.load_weights(tensors.items())
                owned = {name: parameter.data for name, parameter in model.named_parameters()}
                torch.save(owned, case / f"{tensor}-{rank}.pt")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what vLLM answered to every case, from a process of its own: vLLM changes torch
    where it is imported.
    """
    import transformers
    from support.commands import finish, start
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from megarl.cluster.process_env import engine_environment
    from megarl.weight_sync.families import parameter_table

    folder = tmp_path_factory.mktemp("asked")

    def ask(case: str, kind: str, changes: dict[str, Any], tensors: tuple[int, ...]) -> Any:
        config = transformers.CONFIG_MAPPING[kind](**SMALL | changes)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
        config.save_pretrained(folder / case)
        (folder / case / "tensors.json").write_text(json.dumps(tensors))
        return json.loads((folder / case / "config.json").read_text())

    for case, (kind, changes) in CASES.items():
        config = ask(case, kind, changes, TENSORS)
        shapes = {row.name: row.shape for row in parameter_table(config)}
        torch.save(numbered(shapes), folder / case / "checkpoint.pt")
    for kind, changes in {**OTHERS, **COMPUTED}.items():
        ask(kind, kind, changes, (1, 2))
        with torch.device("meta"):
            config = transformers.AutoConfig.from_pretrained(folder / kind)
            model: Any = transformers.AutoModelForCausalLM.from_config(config)
        shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        torch.save(numbered(shapes), folder / kind / "checkpoint.pt")
    for case, (kind, changes, tensor) in REFUSED.items():
        ask(f"refused {case}", kind, changes, (tensor,))
    for kind, changes in DROPPED.items():
        config = ask(f"dropped {kind}", kind, changes, (1,))
        shapes = {row.name: row.shape for row in parameter_table(config)}
        biased = json.dumps(config | {"attention_bias": True})
        (folder / f"dropped {kind}" / "config.json").write_text(biased)
        attention = {name: shape for name, shape in shapes.items() if "_proj" in name}
        attention = {name: shape for name, shape in attention.items() if "self_attn" in name}
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in attention.items()}
        torch.save(numbered(shapes), folder / f"dropped {kind}" / "checkpoint.pt")
    settings = engine_environment(
        on_cpu=not torch.cuda.is_available(), num_threads=1, kv_cache_gib=1
    )
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    started = start([sys.executable, __file__, str(folder)], PYTHONPATH=paths, **settings)
    done = finish(*started, timeout_s=200)
    assert done.code == 0 and not done.survivors, done.err[-4000:]
    return folder


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("case", CASES)
def test_the_table_puts_every_element_where_vllm_does(asked: Path, case: str, tensor: int) -> None:
    from megarl.parallel.reshard.boxes import fills
    from megarl.weight_sync.families import parameter_table, refuse_engine_tensor
    from megarl.weight_sync.parameters import engine_owned

    config = json.loads((asked / case / "config.json").read_text())
    refuse_engine_tensor(config, tensor)
    checkpoint = torch.load(asked / case / "checkpoint.pt")
    for rank, owned in enumerate(engine_owned(parameter_table(config), tensor)):
        vllm = torch.load(asked / case / f"{tensor}-{rank}.pt")
        assert fills(owned) == ""
        assert_same(owned, checkpoint, vllm)
        if not case.startswith("qwen3_moe"):  # whose experts vLLM changes after loading
            assert_same(recorded_owned(asked / case / f"{tensor}-{rank}.json"), checkpoint, vllm)


def recorded_owned(path: Path) -> Any:
    """What a rank stores, as recorded."""
    from megarl.parallel.reshard.boxes import ZEROS, Box, Owned

    owned = Owned()
    for row in json.loads(path.read_text()):
        for box in row["boxes"]:
            owned.add(row["name"], Box(*box), row["engine"])
        owned.add(ZEROS, Box(0, row["zeros"], 0, 1), row["engine"])
    return owned


def assert_same(owned: Any, checkpoint: dict[str, Any], vllm: dict[str, Any]) -> None:
    """What a rank stores of `checkpoint` is what vLLM stored, {parameter: tensor}."""
    from megarl.parallel.reshard.boxes import scatter

    sizes = [(name, parameter.numel()) for name, parameter in vllm.items()]
    assert list(owned.sizes.items()) == sizes
    for name, buffer in scatter(owned, checkpoint).items():
        # Padding rows are zero in both; vLLM's loader writes them so, or they would still be -1.
        differ = (vllm[name].flatten() != buffer).nonzero().flatten().tolist()
        assert not differ, f"{name}: {len(differ)} of {len(buffer)}, the first at {differ[0]}"


@pytest.mark.parametrize("kind", OTHERS)
def test_a_type_without_a_table_is_recorded(asked: Path, kind: str) -> None:
    checkpoint = torch.load(asked / kind / "checkpoint.pt")
    for tensor, rank in ((1, 0), (2, 0), (2, 1)):
        vllm = torch.load(asked / kind / f"{tensor}-{rank}.pt")
        assert_same(recorded_owned(asked / kind / f"{tensor}-{rank}.json"), checkpoint, vllm)


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_loader_that_computes_is_refused(asked: Path, kind: str) -> None:
    assert "vLLM's loader computes" in json.loads((asked / kind / "1-0.json").read_text())


@pytest.mark.parametrize("case", REFUSED)
def test_what_we_refuse_vllm_refuses(asked: Path, case: str) -> None:
    from megarl.weight_sync.families import refuse_engine_tensor

    assert (asked / f"refused {case}" / "refused").exists()
    config = json.loads((asked / f"refused {case}" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"rollout\.engine\.tensor is"):
        refuse_engine_tensor(config, REFUSED[case][2])


@pytest.mark.parametrize("kind", DROPPED)
def test_vllm_drops_a_bias_without_a_word(asked: Path, kind: str) -> None:
    """Why the table refuses these: the engine has q, k and v biases, and no place for that of
    o_proj.
    """
    owned = torch.load(asked / f"dropped {kind}" / "1-0.pt")
    attention = "model.layers.0.self_attn."
    assert f"{attention}qkv_proj.bias" in owned and f"{attention}o_proj.bias" not in owned
    assert all((parameter != -1).all() for parameter in owned.values())
    said = json.loads((asked / f"dropped {kind}" / "1-0.json").read_text())
    assert ("o_proj.bias out" if kind == "qwen3" else "after loading") in said


if __name__ == "__main__":
    write_what_engines_hold(Path(sys.argv[1]))


def test_vllm_takes_the_temperatures_of_the_range_and_no_others() -> None:
    """The recipe's range is vLLM's own: below it vLLM samples at another temperature in silence."""
    code = """
from vllm import SamplingParams
from megarl.config import EvaluationConfig
from megarl.rollout.config import RolloutConfig

for kind in (RolloutConfig, EvaluationConfig):
    (allowed,) = kind.model_fields["temperature"].metadata
    for value in (allowed.low, allowed.high):
        assert SamplingParams(temperature=value).temperature == value
    assert SamplingParams(temperature=allowed.low * 0.9).temperature != allowed.low * 0.9
    try:
        SamplingParams(temperature=allowed.high + 0.1)
    except Exception as error:
        assert "[0, 2]" in str(error), error
    else:
        raise AssertionError("a higher temperature is taken")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
