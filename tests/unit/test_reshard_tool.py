"""tools/reshard_plan.py: dry runs of large models by arithmetic, and each bad input refused with a
fix.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reshard_plan
import yaml

Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """What the tool prints as JSON."""

    def call(*arguments: object) -> dict[str, Any]:
        capsys.readouterr()  # transformers imports DeepSpeed, which talks, once a test makes a model
        assert reshard_plan.main([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Run:
    """What the tool says when it refuses."""

    def call(*arguments: object) -> str:
        capsys.readouterr()
        assert reshard_plan.main([*map(str, arguments)]) == 1
        said = capsys.readouterr()
        assert not said.out and said.err.count("\n") == 1
        return said.err

    return call


LARGE: dict[str, tuple[int, str]] = {
    "14B": (14_768_307_200, "model_type: qwen3, num_hidden_layers: 40, hidden_size: 5120,"
     " num_attention_heads: 40, num_key_value_heads: 8, head_dim: 128, intermediate_size: 17408,"
     " vocab_size: 151936, tie_word_embeddings: false"),
    "70B": (70_553_706_496, "model_type: llama, num_hidden_layers: 80, hidden_size: 8192,"
     " num_attention_heads: 64, num_key_value_heads: 8, intermediate_size: 28672,"
     " vocab_size: 128256, tie_word_embeddings: false"),
    "30B-A3B": (30_532_122_624, "model_type: qwen3_moe, num_hidden_layers: 48, hidden_size: 2048,"
     " num_attention_heads: 32, num_key_value_heads: 4, head_dim: 128, num_experts: 128,"
     " moe_intermediate_size: 768, intermediate_size: 6144, vocab_size: 151936,"
     " tie_word_embeddings: false"),
}  # fmt: skip
"""Parameters as their model cards count them, and config.json."""


def config_of(folder: Path, name: str) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(yaml.safe_load("{" + LARGE[name][1] + "}")))
    return path


@pytest.mark.parametrize(("name", "source", "engines", "tensor"), [
    ("14B", "data 2 tensor 4 zero 3", 2, 4),
    ("14B", "data 2 sequence 2 tensor 2", 4, 8),
    ("70B", "data 2 tensor 8 zero 3", 1, 8),
])  # fmt: skip
def test_a_dry_run_of_a_large_model(
    name: str, source: str, engines: int, tensor: int, tmp_path: Path, run: Run
) -> None:
    to = ["--engines", engines, "--engine-tensor", tensor, "--link-gb-s", 50]
    found = run(config_of(tmp_path, name), "--source", source, *to)
    parameters = LARGE[name][0]
    assert found["model"]["parameters"] == parameters
    cover = found["coverage"]
    assert cover["wanted_elements"] == cover["written_elements"] >= engines * parameters
    assert found["moved_bytes"] == found["minimum_bytes"] == 2 * cover["written_elements"]
    assert found["target"]["bytes"] == 2 * (cover["written_elements"] + cover["padding_elements"])
    # Norms, and key heads that are fewer than ranks, are all that more than one rank of an engine
    # has.
    assert cover["written_elements"] < engines * parameters * 1.02
    degrees = reshard_plan.parse_degrees(source)
    replicas = degrees.layout.size // degrees.layout.tensor
    copies = 1 if degrees.zero_stage == 3 else replicas
    assert math.isclose(found["source"]["bytes"], 2 * parameters * copies, rel_tol=0.01)
    ranks = engines * tensor
    assert found["target"]["ranks"] == ranks and found["naive_bytes"] > ranks * 2 * parameters
    assert found["most_received_bytes"] == 2 * cover["written_elements"] // ranks
    busiest = max(found["most_sent_bytes"], found["most_received_bytes"])
    assert found["predicted_s"] == busiest / 50e9
    assert found["most_sent_bytes"] >= found["moved_bytes"] / found["source"]["ranks"]


def test_colocated_ranks_copy_within_a_memory(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    path, to = config_of(tmp_path, "14B"), ["--engines", "1", "--engine-tensor", "2"]
    found = run(path, "--source", "data 2", *to, "--colocated")
    assert found["moved_bytes"] == found["predicted_s"] == 0
    assert found["local_copies"] == found["copies"] > 0
    assert reshard_plan.main([str(path), "--source", "data 2", *to]) == 0
    assert "14,768,307,200 parameters" in capsys.readouterr().out


BAD_FILES = {
    "config.json cannot be read": "{",
    "does not say model_type": "[]",
    "contradicts itself": json.dumps(
        {"model_type": "qwen2", "num_hidden_layers": 3, "layer_types": ["full_attention"] * 2}
    ),
}
"""{what is said: text of a config.json}"""


@pytest.mark.parametrize("says", BAD_FILES)
def test_what_is_no_model_is_refused(says: str, tmp_path: Path, refused: Run) -> None:
    (tmp_path / "config.json").write_text(BAD_FILES[says])
    assert says in refused(tmp_path)


def test_layouts_that_do_not_fit_are_refused(tmp_path: Path, refused: Run) -> None:
    path = config_of(tmp_path, "14B")
    for layouts, said in (
        ("--source|tensor 16", "tensor is 16"),
        ("--source|data 2|--engine-tensor|16", "tensor is 16"),
    ):
        assert said in refused(path, *layouts.split("|"))
    moe = config_of(tmp_path, "30B-A3B")
    assert "does not divide the 128" in refused(moe, "--source", "data 3 expert 3")


NO_LAYOUTS = ("", "data", "data two", "data 2 tensor", "width 2", "zero 4", "data 0")


@pytest.mark.parametrize("words", [*NO_LAYOUTS, "data 2 data 2", "data 2 tensor -1"])
def test_layouts_that_are_none_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reshard_plan.main(["config.json", "--source", words])
    assert "--source" in capsys.readouterr().err
