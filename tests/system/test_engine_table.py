"""What vLLM's own loaders put where, element by element, against the table that is recorded.

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

ROOT = Path(__file__).resolve().parents[2]

SMALL: dict[str, Any] = dict(
    vocab_size=70, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
TIED: dict[str, Any] = {"tie_word_embeddings": True}
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2, tied, 200 words, one key head": ("qwen2",
     TIED | {"vocab_size": 200, "num_key_value_heads": 1}),
    "qwen3, wide heads": ("qwen3", {"head_dim": 32}),
    "qwen3, tied, four key heads": ("qwen3", TIED | {"head_dim": 16, "num_key_value_heads": 4}),
    "llama, key heads unsaid, 64 words": ("llama", {"num_key_value_heads": None, "vocab_size": 64}),
    "llama, biases, tied": ("llama", TIED | BIASES),
    "llama, biases of attention, wide heads": ("llama",
     {"attention_bias": True, "head_dim": 32, "num_key_value_heads": 1}),
    "mistral, wide heads": ("mistral", {"head_dim": 32}),
    "mistral, tied, eight key heads": ("mistral", TIED | {"num_key_value_heads": 8}),
    "gemma3_text, windows": ("gemma3_text",
     {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma3_text, biases, 200 words": ("gemma3_text",
     {"head_dim": 8, "attention_bias": True, "vocab_size": 200}),
    "gemma2": ("gemma2", {"head_dim": 16}),
    "gemma2, biases, 200 words": ("gemma2",
     {"head_dim": 8, "attention_bias": True, "vocab_size": 200}),
    "granite": ("granite", {}),
    "granite, biases, tied, four key heads": ("granite",
     TIED | BIASES | {"num_key_value_heads": 4}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "phi3, 200 words, four key heads": ("phi3",
     {"pad_token_id": 0, "vocab_size": 200, "num_key_value_heads": 4}),
}  # fmt: skip
"""{name: (model type, changes of SMALL)}"""
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
"""More model types -> changes of SMALL."""
COMPUTED = {"bloom": {"n_layer": 2, "n_head": 8}, "phi": {}}
"""The same, whose loaders compute."""

TENSORS = (1, 2, 4, 8)
DROPPED = "qwen3 with a bias that vLLM drops"


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
    from megarl.weights.recorded_table import rank_table

    try:
        return rank_table(model, {name: tuple(one.shape) for name, one in tensors.items()})
    except ValueError as error:
        return str(error)


def write_what_engines_hold(folder: Path) -> None:
    """Beside every config.json and checkpoint, what each rank holds of it."""
    engine = Engine(folder)
    for path in sorted(folder.glob("*/config.json")):
        case = path.parent
        for tensor in json.loads((case / "tensors.json").read_text()):
            for rank in range(tensor):
                model: Any = engine.build(case, tensor, rank)
                tensors = torch.load(case / "checkpoint.pt")
                rows = recorded(model, tensors)
                (case / f"{tensor}-{rank}.json").write_text(json.dumps(rows))
                model.load_weights(tensors.items())
                owned = {name: parameter.data for name, parameter in model.named_parameters()}
                torch.save(owned, case / f"{tensor}-{rank}.pt")


def write_config(folder: Path, kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Write a small model's config.json; returns its content."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = transformers.CONFIG_MAPPING[kind](**SMALL | changes)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what vLLM answered to every case, from a process of its own: vLLM changes torch
    where it is imported.
    """
    import transformers
    from support.commands import finish, start

    from megarl.system.process_env import engine_environment

    folder = tmp_path_factory.mktemp("asked")

    def ask(case: str, kind: str, changes: dict[str, Any], tensors: tuple[int, ...]) -> None:
        write_config(folder / case, kind, changes)
        config = transformers.AutoConfig.from_pretrained(folder / case)
        (folder / case / "tensors.json").write_text(json.dumps(tensors))
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        torch.save(numbered(shapes), folder / case / "checkpoint.pt")

    for case, (kind, changes) in CASES.items():
        ask(case, kind, changes, TENSORS)
    for kind, changes in {**OTHERS, **COMPUTED}.items():
        ask(kind, kind, changes, (1, 2))
    ask(DROPPED, "qwen3", {"attention_bias": True}, (1,))
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
    checkpoint = torch.load(asked / case / "checkpoint.pt")
    for rank in range(tensor):
        vllm = torch.load(asked / case / f"{tensor}-{rank}.pt")
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
def test_other_types_are_recorded(asked: Path, kind: str) -> None:
    checkpoint = torch.load(asked / kind / "checkpoint.pt")
    for tensor, rank in ((1, 0), (2, 0), (2, 1)):
        vllm = torch.load(asked / kind / f"{tensor}-{rank}.pt")
        assert_same(recorded_owned(asked / kind / f"{tensor}-{rank}.json"), checkpoint, vllm)


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_loader_that_computes_is_refused(asked: Path, kind: str) -> None:
    assert "vLLM's loader computes" in json.loads((asked / kind / "1-0.json").read_text())


def test_a_bias_that_vllm_drops_is_refused(asked: Path) -> None:
    assert "o_proj.bias out" in json.loads((asked / DROPPED / "1-0.json").read_text())


def test_a_degree_that_vllm_refuses_is_told(tmp_path: Path) -> None:
    from megarl.weights.recorded_table import recorded_table

    config = write_config(tmp_path, "qwen2", {"intermediate_size": 50})
    says = r"engines of rollout.engine.tensor 4: .* == 0 .*; set .* to a divisor"
    with pytest.raises(ValueError, match=says):
        recorded_table(str(tmp_path), config, 4, on_cpu=not torch.cuda.is_available())


def test_a_table_is_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again for the same model elsewhere, but for another degree, or where a full disk has cut
    the file.
    """
    from megarl.weights import recorded_table as recorder
    from megarl.weights.parameters import plain_table, table_to_json

    calls, shapes = list[tuple[str, int]](), {"a": (3, 4), "b": (5,)}

    def recorded(path: str, tensor: int, on_cpu: bool) -> str:
        calls.append((path, tensor))
        return table_to_json(plain_table(shapes, tensor))

    monkeypatch.setattr(recorder, "_recorded", recorded)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def table(path: str, tensor: int, **changes: Any) -> Any:
        config = {"_name_or_path": path, **SMALL, **changes}
        return recorder.recorded_table(path, config, tensor, on_cpu=True)

    assert table("x", 1) == table("y", 1) == plain_table(shapes, 1)
    assert table("x", 2) == plain_table(shapes, 2)
    assert table("x", 2, hidden_size=32) == plain_table(shapes, 2)
    assert calls == [("x", 1), ("x", 2), ("x", 2)]
    for file in (tmp_path / "megarl/tables").iterdir():
        file.write_text(file.read_text()[:20])
    assert table("z", 1) == plain_table(shapes, 1) and calls[-1] == ("z", 1)


if __name__ == "__main__":
    write_what_engines_hold(Path(sys.argv[1]))


def test_vllm_takes_the_temperatures_of_the_range_and_no_others() -> None:
    """The recipe's range is vLLM's own: below it vLLM samples at another temperature in silence."""
    code = """
from vllm import SamplingParams
from megarl.settings.rl import EvaluationConfig
from megarl.settings.rollout import RolloutConfig

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
