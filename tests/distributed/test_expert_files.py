"""Mixtures in files: each rank reads and writes its experts alone, by their published names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.mixtures import FAMILIES, write_mixture
from support.policy import joined, make_role
from support.ranks import run_ranks

from megarl.checkpoints.export import WeightExport
from megarl.checkpoints.rank_files import RankFiles
from megarl.parallel.collectives import barrier
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.reshard.owned import training_owned
from megarl.settings.training import ModelConfig
from megarl.weights.published import exported_names, fused_tensors

CASES = [
    ("qwen3_moe", (2, 1, 2, 2), 3), ("qwen3_moe", (4, 1, 1, 2), 3), ("qwen3_moe", (1, 4, 1, 4), 1),
    ("mixtral", (2, 1, 2, 1), 3), ("olmoe", (2, 2, 1, 4), 0), ("gpt_oss", (4, 1, 1, 4), 3),
    ("glm4_moe", (2, 1, 2, 2), 3),
]  # fmt: skip


def read_and_write(models: dict[str, str], folder: str) -> list[tuple[int, int, Any]]:
    """By case: elements of experts that this rank has, and of all; a random model's weights."""
    found = []
    with joined() as device:
        for number, (kind, degrees, stage) in enumerate(CASES):
            with ProcessMesh(Layout(*degrees), timeout_s=60) as mesh:
                role = make_role(models[kind], mesh, device, seed=3, zero_stage=stage)
                model, fused = role.engine.module.model, role.fused
                owned = training_owned(role.shapes, role.shards, mesh.layout, stage, fused)
                names = exported_names(model)
                for rank in owned:
                    rank.pieces = [
                        piece._replace(tensor=names.get(piece.tensor, piece.tensor))
                        for piece in rank.pieces
                    ]
                shapes = {names.get(name, name): shape for name, shape in role.shapes.items()}
                out = Path(folder) / str(number)
                out.mkdir(exist_ok=True)
                barrier(mesh.world)
                files = RankFiles(out)
                parts = role.owned()
                WeightExport(owned, shapes, torch.float32).write(out, parts, mesh.world, files)
                files.finish()
                barrier(mesh.world)
                experts = [name for name in role.shapes if ".experts." in name]
                own = sum(parts[name].numel() for name in experts if name in parts)
                total = sum(torch.Size(role.shapes[name]).numel() for name in experts)
                role.destroy()
                drawn = make_role(
                    ModelConfig(path=models[kind], from_scratch=True), mesh, device, seed=3,
                    zero_stage=stage,
                )  # fmt: skip
                random = {name: value.clone() for name, value in drawn.engine.weights()}
                drawn.destroy()
                found.append((own, total, random))
    return found


def test_each_rank_reads_and_writes_its_experts(tmp_path: Path) -> None:
    models = {kind: write_mixture(tmp_path / kind, kind) for kind in FAMILIES}
    found = run_ranks(4, __file__, "read_and_write", models, str(tmp_path), timeout_s=600)
    for number, (kind, (data, sequence, tensor, expert), stage) in enumerate(CASES):
        stored = load_file(Path(models[kind]) / "model.safetensors")
        written = load_file(tmp_path / str(number) / "model.safetensors")
        assert written.keys() == stored.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in stored.items())
        parts = expert * tensor * (data * sequence // expert if stage == 3 else 1)
        for own, total, random in (results[number] for results in found):
            assert own == total / parts
            alone = found[0][[case[0] for case in CASES].index(kind)][2]
            assert all(torch.equal(random[name], value) for name, value in alone.items())


def test_fused_tensors_are_what_transformers_joins(tmp_path: Path) -> None:
    """Each part is where transformers itself has it after loading the published file."""
    from transformers import AutoModelForCausalLM

    for kind in ("qwen3_moe", "mixtral", "olmoe", "glm4_moe"):
        folder = write_mixture(tmp_path / kind, kind)
        stored = load_file(Path(folder) / "model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(folder)
        names, fused = exported_names(model), fused_tensors(model)
        assert len(fused) == 2 * sum(".experts.0." in name for name in stored) // 3
        for name, parts in fused.items():
            flat = [stored[names.get(part, part)].flatten() for part, _ in parts]
            assert torch.equal(torch.cat(flat), model.get_parameter(name).flatten())
