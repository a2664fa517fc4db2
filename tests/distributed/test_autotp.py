"""DeepSpeed AutoTP as the tensor backend, held to what test_layouts.py holds ours to: every layout
trains as one rank does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import training_cases
from support.policy import make_role, over_meshes, save_state, whole_weights
from support.ranks import run_ranks
from transformers import AutoModelForCausalLM

from megarl.parallel.tensor import whole_shapes
from megarl.settings.training import ModelConfig

AUTOTP = {"tensor_backend": "autotp"}
RECOMPUTED = AUTOTP | {"gradient_checkpointing": True}


def matrix(size: int, model: str) -> list[training_cases.Case]:
    """Every layout of `size` ranks with a tensor axis, under every ZeRO stage."""
    return [
        {"layout": layout, "stage": stage, "model": model, "training": AUTOTP}
        for layout in training_cases.layouts(size)
        for stage in range(4)
        if layout[2] > 1
    ]


def variants(folder: Path, wide: str) -> list[training_cases.Case]:
    """Models and settings where AutoTP could go wrong."""
    write, biases = training_cases.write, dict(attention_bias=True, mlp_bias=True)
    qwen3 = {"model": write(folder / "qwen3", kind="qwen3")}
    tied = {"model": write(folder / "tied", tied=True)}
    llama = {"model": write(folder / "llama", kind="llama", **biases)}
    gspo = {"loss": "gspo", "aggregation": "sequence"}
    return [
        qwen3 | {"layout": (1, 2, 2), "stage": 3, "training": AUTOTP},
        qwen3 | {"layout": (2, 1, 2), "stage": 1, "training": RECOMPUTED},
        tied | {"layout": (2, 1, 2), "stage": 3, "training": RECOMPUTED},
        llama | {"layout": (1, 2, 2), "stage": 2, "training": AUTOTP, "algorithm": gspo},
        {"model": wide, "layout": (1, 2, 2), "stage": 1, "training": AUTOTP}
        | {"sequence": {"ulysses": 2, "cut": "contiguous"}},
        # Fewer samples than data ranks: some have nothing at all.
        llama | {"layout": (2, 1, 2), "stage": 3, "training": AUTOTP, "groups": (1, 1)},
    ]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four key heads, the fewest that four ranks can have; 41 words."""
    return training_cases.write(
        tmp_path_factory.mktemp("wide"), num_attention_heads=8, num_key_value_heads=4
    )


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_the_matrix(tmp_path: Path, wide: str, size: int) -> None:
    cases = matrix(size, wide)
    others = variants(tmp_path, wide) if size == 4 else []
    alone = [
        case | {"layout": (1, 1, 1), "stage": 0, "sequence": {}} for case in (cases[0], *others)
    ]
    first, *rest = run_ranks(1, training_cases.__file__, "run_cases", alone)[0]
    found = run_ranks(
        size, training_cases.__file__, "run_cases", [*cases, *others, cases[-1]], timeout_s=600
    )
    training_cases.assert_equal(
        [first] * len(cases) + rest, cases + others, [results[:-1] for results in found]
    )
    for results in found:
        training_cases.assert_bitwise(results[len(cases) - 1], results[-1])


def round_trip(path: str, folder: str, stage: int) -> dict[str, Any]:
    """What one rank holds, gives out as whole weights, and has again after a checkpoint."""
    made: dict[str, Any] = {"zero_stage": stage, "steps": 9}
    scratch = ModelConfig(path=path, from_scratch=True)
    found: dict[str, Any] = {"weights": []}
    for degrees, mesh, device in over_meshes([(1, 1, 2), (2, 1, 1)]):
        backend = AUTOTP if degrees[2] > 1 else {}
        if backend:
            role = make_role(path, mesh, device, **made, **backend)
            model = role.engine.module.model
            layers = model.named_modules()
            found["kinds"] = {name.split(".")[-1]: type(layer).__name__ for name, layer in layers}
            found["shapes"] = whole_shapes(model, role.shards)
            found["weights"].append(whole_weights(role.engine))
            save_state(role.engine, folder)
            role.destroy()
        role = make_role(scratch, mesh, device, seed=5, **made, **backend)
        role.engine.load(Path(folder))
        found["weights"].append(whole_weights(role.engine))
        role.destroy()
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_whole_weights_and_checkpoints(tmp_path: Path, wide: str, stage: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32)
    whole = {name: parameter.double() for name, parameter in model.named_parameters()}
    for found in run_ranks(2, __file__, "round_trip", wide, str(tmp_path / "state"), stage):
        names = ("q_proj", "down_proj", "lm_head", "embed_tokens")
        assert [found["kinds"][name] for name in names] == [
            "LinearLayer",
            "LinearAllreduce",
            "LogProbHead",
            "Embedding",
        ]
        assert found["shapes"] == {name: tuple(one.shape) for name, one in whole.items()}
        assert len(found["weights"]) == 3
        for weights in found["weights"]:
            assert weights.keys() == whole.keys()
            assert all(torch.equal(weights[name], whole[name]) for name in whole)
