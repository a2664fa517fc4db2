"""Sharded loading, frozen models and the sharded export, on 4 gloo ranks in one launch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.policy import make_role, over_meshes
from support.ranks import run_ranks
from support.rollouts import dealt
from support.tiny import groups, write_model
from transformers import AutoModelForCausalLM

from megarl.checkpoints.export import WeightExport
from megarl.checkpoints.rank_files import RankFiles
from megarl.parallel.reshard.boxes import scatter
from megarl.parallel.reshard.owned import training_owned
from megarl.settings.training import ModelConfig
from megarl.trainer.loading import load_model
from megarl.trainer.packing import pack_shared

LAYOUTS = ((4, 1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4))
SIZES: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=41)
"""An odd vocabulary, and fewer KV heads than 4 tensor ranks."""


def split_into_files(folder: Path, count: int) -> None:
    """The single safetensors file of a model folder as `count` files with an index."""
    tensors = load_file(str(folder / "model.safetensors"))
    names, where = sorted(tensors), {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::count]}
        save_file(part, str(folder / file), metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Untied in several files, tied in one file."""
    untied = write_model(tmp_path_factory.mktemp("untied"), biases=True, **SIZES)
    split_into_files(untied, 3)
    tied = write_model(tmp_path_factory.mktemp("tied"), tied=True, biases=True, **SIZES)
    return {"untied": str(untied), "tied": str(tied)}


def whole_weights(model: str, *, from_scratch: bool) -> dict[str, torch.Tensor]:
    """The oracle: `from_pretrained`, or one rank's random weights."""
    if from_scratch:
        config = ModelConfig(path=model, from_scratch=True)
        found = load_model(config, dtype=torch.float32, seed=7)
    else:
        found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {name: value.detach() for name, value in found.named_parameters()}


def load_everywhere(models: dict[str, str], folder: str) -> list[str]:
    """What is wrong on this rank: nothing, it is hoped."""
    wrong = []
    cases = [(kind, scratch) for kind in models for scratch in (False, True)]
    oracle = {case: whole_weights(models[case[0]], from_scratch=case[1]) for case in cases}
    for degrees, mesh, device in over_meshes(LAYOUTS):
        for kind, scratch in cases:
            for stage in (0, 3):
                precision = "bfloat16" if stage and scratch else "float32"
                config = ModelConfig(path=models[kind], from_scratch=scratch)
                settings: Any = dict(zero_stage=stage, precision=precision)
                engine = make_role(config, mesh, device, seed=7, **settings).engine
                network, dtype = engine.module, getattr(torch, precision)
                where = f"{kind} {scratch} {degrees} ZeRO {stage}"
                whole = {n: x.to(dtype) for n, x in oracle[kind, scratch].items()}
                shapes = {name: tuple(value.shape) for name, value in whole.items()}
                owned = training_owned(shapes, network.shards, mesh.layout, stage)
                own, wanted = engine.owned(), scatter(owned[mesh.rank], whole)
                assert list(own) == list(wanted), where
                for name, part in wanted.items():
                    padded = own[name]
                    if not torch.equal(padded[: len(part)], part):
                        wrong.append(f"{where}: {name} is not this rank's part")
                    if padded[len(part) :].count_nonzero():
                        wrong.append(f"{where}: {name} has padding other than zeros")
                for name, buffer in network.named_buffers():
                    if buffer.is_meta or buffer.dtype != torch.float32:
                        wrong.append(f"{where}: buffer {name} is {buffer.dtype}, {buffer}")
                export = WeightExport(owned, shapes, dtype, file_bytes=60_000, band_bytes=5_000)
                out = Path(folder) / where.replace(" ", "-")
                if mesh.rank == 0:
                    out.mkdir()
                    network.model.config.save_pretrained(out)
                torch.distributed.barrier()
                files = RankFiles(out)
                export.write(out, own, mesh.world, files)
                files.finish()
                torch.distributed.barrier()
                wrong += [f"{where}: {text}" for text in differences(out, whole)]
                engine.destroy()
    return wrong


def differences(folder: Path, whole: dict[str, torch.Tensor]) -> list[str]:
    """What `from_pretrained` reads from an exported folder that is not `whole`."""
    read = AutoModelForCausalLM.from_pretrained(folder)
    found = dict(read.named_parameters())
    if found.keys() != whole.keys():
        return [f"names {sorted(found.keys() ^ whole.keys())}"]
    return [
        f"{name} was exported wrong" for name in whole if not torch.equal(found[name], whole[name])
    ]


def test_every_rank_has_its_own_part_in_every_layout(
    models: dict[str, str], tmp_path: Path
) -> None:
    """Parts are those of the whole model bit by bit, from a checkpoint and from a seed; exports of
    several files by several ranks load with `from_pretrained` to the same bits.
    """
    for rank, wrong in enumerate(
        run_ranks(4, __file__, "load_everywhere", models, str(tmp_path), timeout_s=600)
    ):
        assert not wrong, (rank, wrong[:5])
    assert len(list((tmp_path / "untied-False-(2,-1,-2)-ZeRO-3").glob("*.safetensors"))) > 2


def frozen_logprobs(models: dict[str, str]) -> list[tuple[str, float]]:
    """(case, largest difference of log-probs between a trained and a frozen engine)."""
    found, made = [], groups(4, 3)
    for degrees, mesh, device in over_meshes([(2, 1, 1), (1, 1, 2)]):
        plan = dealt(made, num_data_ranks=mesh.data.size, micro_batch_tokens=80)
        samples = plan.share(mesh.data.rank).samples[0]
        for stage, kind in ((0, "untied"), (3, "untied"), (3, "tied")):
            engines = [
                make_role(models[kind], mesh, device, steps=steps, zero_stage=stage).engine
                for steps in (1, None)
            ]
            micro = pack_shared(samples, device, mesh.sequence, "auto")
            for again in range(2):  # the second time over ZeRO 3's recorded order
                mine, theirs = (engine(micro, 0.7)[0] for engine in engines)
                assert mine.numel() > 3 and not theirs.requires_grad
                case = f"{degrees} {stage} {kind} {again}"
                found.append((case, float((mine - theirs).abs().max())))
            # A step of the one moves it away from the other, which stays.
            engines[0].backward(mine.sum(), last=True)
            engines[0].step()
            with torch.no_grad():
                moved, stayed = engines[0](micro, 0.7)[0], engines[1](micro, 0.7)[0]
            assert torch.equal(stayed, theirs) and not torch.equal(moved, mine)
            assert all(not p.requires_grad for p in engines[1].module.parameters())
            if stage == 3:
                whole = sum(p.ds_numel for p in engines[1].module.parameters())
                own = sum(part.numel() for part in engines[1].owned().values())
                assert own <= whole / mesh.gradient.size + 2 * len(engines[1].owned())
            for engine in engines:
                engine.destroy()
    return found


def test_a_frozen_model_gives_the_log_probs_of_a_trained_one(models: dict[str, str]) -> None:
    for found in run_ranks(2, __file__, "frozen_logprobs", models, timeout_s=400):
        assert len(found) == 12
        for case, difference in found:
            assert difference <= 1e-6, case
