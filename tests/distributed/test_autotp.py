"""DeepSpeed AutoTP as the tensor backend, held to what test_layouts.py holds ours to: every layout
trains as one rank does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import training_cases
from support.ranks import run_ranks

AUTOTP = {"tensor_backend": "autotp"}
RECOMPUTED = AUTOTP | {"gradient_checkpointing": True}


def matrix(size: int, model: str) -> list[training_cases.Case]:
    """Every layout of `size` ranks with a tensor axis, under every ZeRO stage."""
    found = [layout for layout in training_cases.layouts(size) if layout[2] > 1]
    return [
        {"layout": layout, "stage": stage, "model": model, "training": AUTOTP}
        for layout in found
        for stage in range(4)
    ]


def variants(folder: Path, wide: str) -> list[training_cases.Case]:
    """Models and settings where AutoTP could go wrong."""
    qwen3 = {"model": training_cases.write(folder / "qwen3", kind="qwen3")}
    tied = {"model": training_cases.write(folder / "tied", tied=True)}
    llama = {
        "model": training_cases.write(
            folder / "llama", kind="llama", attention_bias=True, mlp_bias=True
        )
    }
    gspo = {"loss": "gspo", "aggregation": "sequence"}
    return [
        qwen3 | {"layout": (1, 2, 2), "stage": 3, "training": AUTOTP},
        qwen3 | {"layout": (2, 1, 2), "stage": 1, "training": RECOMPUTED},
        tied | {"layout": (2, 1, 2), "stage": 3, "training": RECOMPUTED},
        llama | {"layout": (1, 2, 2), "stage": 2, "training": AUTOTP, "algorithm": gspo},
        {
            "model": wide,
            "layout": (1, 2, 2),
            "stage": 1,
            "training": AUTOTP,
            "sequence": {"ulysses": 2, "cut": "contiguous"},
        },
        # Fewer samples than data ranks: some have nothing at all.
        llama | {"layout": (2, 1, 2), "stage": 3, "training": AUTOTP, "groups": (1, 1)},
    ]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four key heads, the fewest that four ranks can have; 41 words."""
    return training_cases.write(
        tmp_path_factory.mktemp("wide"), num_attention_heads=8, num_key_value_heads=4
    )


@pytest.mark.parametrize("size", [2, 4])
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
    import torch

    from megarl.checkpoints.rank_files import RankFiles
    from megarl.parallel import mesh as mesh_module
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh
    from megarl.parallel.tensor import whole_shapes
    from megarl.trainer.config import ModelConfig, TrainingConfig
    from megarl.trainer.loading import load_model
    from megarl.trainer.model import RoleModel
    from megarl.trainer.zero import TrainEngine

    device, config = mesh_module.initialise(timeout_s=60), ModelConfig(path=path)
    training = TrainingConfig(zero_stage=stage, tensor_backend="autotp")
    with ProcessMesh(Layout(data=1, tensor=2), timeout_s=60) as mesh:
        network = RoleModel(load_model(config, dtype=torch.float32, seed=0), mesh, training)
        kinds = {
            name.split(".")[-1]: type(layer).__name__
            for name, layer in network.model.named_modules()
        }
        engine = TrainEngine(network, training, mesh, device, total_steps=9)
        shapes = whole_shapes(network.model, network.shards)
        start = {name: weight.clone() for name, weight in engine.weights()}
        files = RankFiles(Path(folder))
        engine.save(Path(folder), files)
        files.finish()
        engine.destroy()
        other = RoleModel(load_model(config, dtype=torch.float32, seed=0), mesh, training)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        engine = TrainEngine(other, training, mesh, device, total_steps=9)
        engine.load(Path(folder))
        loaded = {name: weight.clone() for name, weight in engine.weights()}
        engine.destroy()
    training = TrainingConfig(zero_stage=stage)
    with ProcessMesh(Layout(data=2), timeout_s=60) as mesh:
        network = RoleModel(load_model(config, dtype=torch.float32, seed=1), mesh, training)
        engine = TrainEngine(network, training, mesh, device, total_steps=9)
        engine.load(Path(folder))
        elsewhere = {name: weight.clone() for name, weight in engine.weights()}
        engine.destroy()
    mesh_module.finalise()
    return dict(kinds=kinds, shapes=shapes, start=start, loaded=loaded, elsewhere=elsewhere)


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_weights_and_checkpoints(tmp_path: Path, wide: str, stage: int) -> None:
    import torch
    import transformers

    whole = dict(
        transformers.AutoModelForCausalLM.from_pretrained(
            wide, dtype=torch.float32
        ).named_parameters()
    )
    for found in run_ranks(2, __file__, "round_trip", wide, str(tmp_path / "state"), stage):
        assert (
            found["kinds"]["q_proj"] == "LinearLayer"
            and found["kinds"]["down_proj"] == "LinearAllreduce"
        )
        assert (
            found["kinds"]["lm_head"] == "LogProbHead"
            and found["kinds"]["embed_tokens"] == "Embedding"
        )
        assert found["shapes"] == {
            name: tuple(parameter.shape) for name, parameter in whole.items()
        }
        for weights in (found["start"], found["loaded"], found["elsewhere"]):
            assert weights.keys() == whole.keys()
            assert all(torch.equal(weights[name], whole[name]) for name in whole)
