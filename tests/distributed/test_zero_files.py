"""A run's checkpoint under another layout and ZeRO stage: DeepSpeed reads what was written, and
training goes on as if nothing had happened.

One launch a number of ranks: a start costs more than a case.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]

from support.commands import megarl, records, write_recipe
from support.ranks import run_ranks
from support.tiny import groups, write_model

from megarl.checkpoints import deepspeed_files as zero_files
from megarl.checkpoints import deepspeed_place
from megarl.checkpoints.manifest import damage, seal
from megarl.checkpoints.progress import choose, read_progress
from megarl.parallel.layout import Layout
from megarl.weight_sync.families import parameter_table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FIRST, MORE = 2, 2
"""Steps before the checkpoint, and after it."""

Where = tuple[tuple[int, int, int], int, str, bool]
"""Layout (data, sequence, tensor), ZeRO stage, precision, and whether the model's words are tied.
"""


def spell(where: Where) -> str:
    return f"{'x'.join(map(str, where[0]))}-{where[1]}-{where[2]}-{where[3]}"


def ranks_of(where: Where) -> int:
    return where[0][0] * where[0][1] * where[0][2]


def f32(layout: tuple[int, int, int], stage: int, *, tied: bool = False) -> Where:
    return layout, stage, "float32", tied


def bf16(layout: tuple[int, int, int], stage: int) -> Where:
    return layout, stage, "bfloat16", False


def fp16(layout: tuple[int, int, int], stage: int) -> Where:
    return layout, stage, "float16", False


PAIRS: list[tuple[Where, Where]] = [
    (f32((1, 1, 1), 0), f32((2, 1, 2), 3)),
    (f32((1, 1, 1), 0), f32((1, 1, 4), 0)),
    (f32((2, 1, 1), 1), f32((1, 1, 1), 0)),
    (f32((2, 1, 1), 3), f32((1, 1, 2), 1)),
    (f32((1, 2, 1), 2), f32((2, 2, 1), 3)),
    (f32((2, 1, 2), 2), f32((2, 1, 1), 3)),
    (f32((2, 1, 2), 3), f32((4, 1, 1), 2)),
    (f32((1, 1, 4), 0), f32((2, 1, 1), 1)),
    (bf16((2, 1, 1), 1), bf16((2, 1, 2), 3)),
    (bf16((2, 1, 2), 3), bf16((1, 1, 2), 2)),
    (bf16((1, 1, 2), 2), bf16((2, 1, 1), 1)),
    (bf16((2, 1, 1), 1), bf16((4, 1, 1), 1)),
    (fp16((2, 1, 1), 1), fp16((2, 1, 2), 3)),
    (fp16((2, 1, 2), 3), fp16((1, 1, 2), 2)),
    (f32((2, 1, 1), 3, tied=True), f32((1, 1, 2), 2, tied=True)),
    (f32((1, 1, 1), 0, tied=True), f32((2, 1, 1), 3, tied=True)),
]
"""Each stage as a source and as a target; words and key heads that tensor ranks share unevenly;
padding of every kind.
"""


def train(cases: list[dict[str, Any]]) -> list[Any]:
    """Per case: load a checkpoint if there is one, save again if asked, take steps; losses, norms,
    weights. On every rank.
    """
    from support.policy import Policy

    from megarl.checkpoints.checkpoint import Checkpoints
    from megarl.data.tokenizer import load_tokenizer
    from megarl.objectives.config import AlgorithmConfig
    from megarl.parallel import mesh as mesh_module
    from megarl.parallel.mesh import ProcessMesh
    from megarl.rollout.batch import shares
    from megarl.trainer.config import ModelConfig, OptimizerConfig, TrainingConfig

    torch.set_num_threads(1)
    device, found = mesh_module.initialise(timeout_s=60), []
    for case in cases:
        layout, stage, precision, _ = case["where"]
        with ProcessMesh(Layout(*layout), timeout_s=60) as mesh:
            policy = Policy(
                model=ModelConfig(path=case["model"]),
                training=TrainingConfig(
                    zero_stage=stage,
                    precision=precision,
                    optimizer=OptimizerConfig(
                        learning_rate=1e-3, clip_norm=0.5, eps=1e-6, weight_decay=0.01
                    ),
                ),
                algorithm=AlgorithmConfig(),
                temperature=0.8,
                mesh=mesh,
                device=device,
                total_steps=FIRST + MORE,
                seed=1,
            )
            settings: dict[str, Any] = dict(
                keep=9,
                engine=policy.engine,
                tokenizer=load_tokenizer(case["model"]),
                mesh=mesh,
                seed=1,
                data="data",
            )
            first, reports = 0, []
            if scale := policy.engine.loss_scale:
                scale.value = 2.0 if case["load"] else 2.0**9
            if case["load"]:
                progress = Checkpoints(Path(case["load"]).parent, **settings).load(
                    Path(case["load"])
                )
                first = progress.step
                assert progress.next_ordinal == 4 * first
                Checkpoints(Path(case["again"]), **settings).save(
                    step=first, next_ordinal=4 * first
                )
            for step in range(first, FIRST + MORE):
                if step == FIRST and not case["load"]:
                    Checkpoints(Path(case["save"]), **settings).save(
                        step=step, next_ordinal=4 * step
                    )
                made = groups(4, 3, seed=step)
                dealt = shares(
                    step=step,
                    drawn=made,
                    accepted=made,
                    seconds=1.0,
                    num_data_ranks=mesh.data.size,
                    num_mini_batches=2,
                    micro_batch_tokens=80,
                    transcripts=0,
                )
                metrics = policy.train(dealt.share(mesh.data.rank)).metrics
                names = ("loss", "grad_norm", "learning_rate")
                reports.append(
                    (step, *(metrics[one] for one in names), metrics.get("loss_scale", 0.0))
                )
            weights = {
                name: tensor.detach().float().clone() for name, tensor in policy.engine.weights()
            }
            found.append((reports, weights, policy.engine.steps_done))
            policy.engine.destroy()
    mesh_module.finalise()
    return found


def launch(cases: list[dict[str, Any]]) -> list[Any]:
    """Rank 0's answers, in the order of `cases`."""
    found: dict[int, Any] = {}
    for size in sorted({ranks_of(case["where"]) for case in cases}):
        mine = [number for number, case in enumerate(cases) if ranks_of(case["where"]) == size]
        answers = run_ranks(size, __file__, "train", [cases[number] for number in mine])[0]
        found |= dict(zip(mine, answers, strict=True))
    return [found[number] for number in range(len(cases))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Whether tied -> four heads, two key heads, an odd vocabulary."""
    sizes: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=41)
    return {
        tied: write_model(tmp_path_factory.mktemp("model"), tied=tied, biases=True, **sizes)
        for tied in (False, True)
    }


@pytest.fixture(scope="module")
def model(models: dict[bool, Path]) -> Path:
    return models[False]


@pytest.fixture(scope="module")
def sources(
    models: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[Where, tuple[Path, Any]]:
    """Where -> (a checkpoint written there, how training went on without a stop)."""
    folder = tmp_path_factory.mktemp("sources")
    places = list(dict.fromkeys(source for source, _ in PAIRS))
    cases = [
        dict(model=str(models[where[3]]), where=where, load="", save=str(folder / spell(where)))
        for where in places
    ]
    answers = launch(cases)
    return {
        where: (folder / spell(where) / f"step_{FIRST:06d}", found)
        for where, found in zip(places, answers, strict=True)
    }


def table_of(model: Path) -> list[Any]:
    return parameter_table(json.loads((model / "config.json").read_text()))


def convert(source: Path, target: Path, model: Path, where: Where) -> Path:
    target.mkdir(parents=True)
    zero_files.reshard_checkpoint(source, target, table_of(model), Layout(*where[0]), where[1])
    seal(target)
    return target


def content(folder: Path, model: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every whole tensor of a checkpoint, of each kind, and the weights that layers compute with:
    put together by hand.
    """
    place, _, _ = zero_files.read_place(folder, table_of(model))
    files, shapes = (
        folder / "state" / "state",
        {name: row.shape for name, row in place.table.items()},
    )
    found: dict[str, dict[str, torch.Tensor]] = {
        kind: {} for kind in (*zero_files.KINDS, "weights")
    }
    for kind, values in found.items():
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in shapes}
        for tensor in range(place.layout.tensor):
            owned = place.shapes(tensor)
            for name, flat in rank_tensors(place, files, tensor, kind).items():
                parts[name].append(flat.reshape(owned[name]))
        for name, of_ranks in parts.items():
            shard = place.shards.get(name)
            values[name] = of_ranks[0] if shard is None else torch.cat(of_ranks, shard.dim)
            assert not of_ranks or values[name].shape == shapes[name]
    return found


def rank_tensors(place: Any, files: Path, tensor: int, kind: str) -> dict[str, torch.Tensor]:
    """A tensor rank's parameters of a kind, from the files of all of its replicas."""
    owned = place.shapes(tensor)
    models = [torch.load(place.model_path(files, tensor, 0), weights_only=False)]
    if kind == "weights" and place.zero_stage == 3:
        kind = "master"
    if kind == "weights" or (kind == "master" and place.zero_stage == 0):
        return {name: models[0]["module"][f"model.{name}"].float() for name in owned}
    if place.zero_stage == 0:
        return {
            name: models[0]["optimizer"]["state"][number][kind] for number, name in enumerate(owned)
        }
    flats = []
    for replica in range(place.replicas):
        state = torch.load(place.optimizer_path(files, tensor, replica), weights_only=False)[
            "optimizer_state_dict"
        ]
        third = place.zero_stage == 3
        if kind == "master":
            flats.append(
                torch.cat(
                    list(state["fp32_flat_groups" if third else "single_partition_of_fp32_groups"])
                )
            )
        else:
            states = state["optimizer_state_dict" if third else "base_optimizer_state"]["state"]
            flats.append(torch.cat([states[number][kind] for number in sorted(states)]))
    made, filled = {}, 0
    row = None if place.zero_stage == 3 else torch.cat(flats)
    for name, shape in owned.items():
        size = torch.Size(shape).numel()
        length = -(-size // place.replicas) if row is None else size
        made[name] = (
            row[filled : filled + size]
            if row is not None
            else torch.cat([f[filled : filled + length] for f in flats])[:size]
        )
        filled += length
    return made


def assert_same(
    one: dict[str, dict[str, torch.Tensor]],
    other: dict[str, dict[str, torch.Tensor]],
    precision: str,
) -> None:
    for kind in zero_files.KINDS:
        assert list(one[kind]) == list(other[kind])
        for name, tensor in one[kind].items():
            assert torch.equal(tensor, other[kind][name]), (kind, name)
    for name, master in one["master"].items():
        for side in (one, other):
            assert torch.equal(
                side["weights"][name].to(getattr(torch, precision)),
                master.to(getattr(torch, precision)),
            )


def test_training_goes_on_elsewhere(
    models: dict[bool, Path], sources: dict[Where, tuple[Path, Any]], tmp_path: Path
) -> None:
    """Converted, read by DeepSpeed, saved again as it was read: the same bits. Then the same steps
    as without a stop.
    """
    cases = []
    for number, (source, target) in enumerate(PAIRS):
        model = models[source[3]]
        folder = convert(
            sources[source][0], tmp_path / str(number) / f"step_{FIRST:06d}", model, target
        )
        # It is a checkpoint that a run under the new layout chooses.
        progress = read_progress(folder)
        assert (
            damage(folder) == ""
            and progress.layout == f"{Layout(*target[0])}, ZeRO {target[1]}, {target[2]}"
        )
        assert (
            choose(folder.parent, layout=progress.layout, model=progress.model, seed=1, data="data")
            == folder
        )
        assert_same(content(sources[source][0], model), content(folder, model), source[2])
        cases.append(
            dict(
                model=str(model),
                where=target,
                load=str(folder),
                again=str(tmp_path / f"again{number}"),
            )
        )
    for (source, target), case, (reports, weights, steps) in zip(
        PAIRS, cases, launch(cases), strict=True
    ):
        model, again = models[source[3]], Path(case["again"]) / f"step_{FIRST:06d}"
        assert_same(content(sources[source][0], model), content(again, model), source[2])
        expected = sources[source][1]
        assert steps == expected[2] and len(reports) == MORE
        near = 1e-5 if source[2] == "float32" else 2e-2
        for mine, theirs in zip(reports, expected[0][FIRST:], strict=True):
            assert mine[0] == theirs[0] and mine[3:] == theirs[3:]
            assert abs(mine[1] - theirs[1]) < near and abs(mine[2] - theirs[2]) < near * abs(
                theirs[2]
            ), (source, target)
        worst = max(
            float((weights[name] - other).norm() / other.norm())
            for name, other in expected[1].items()
        )
        assert worst < near, (source, target, worst)
        assert (again / "model" / "model.safetensors").read_bytes() == (
            Path(case["load"]) / "model" / "model.safetensors"
        ).read_bytes()


def test_the_same_layout_is_bitwise(
    model: Path, sources: dict[Where, tuple[Path, Any]], tmp_path: Path
) -> None:
    """Converted to where it comes from, training goes on to the same bits."""
    places = [f32((2, 1, 1), 3), f32((2, 1, 1), 1), bf16((2, 1, 1), 1)]
    cases = []
    for where in places:
        folder = convert(
            sources[where][0], tmp_path / spell(where) / f"step_{FIRST:06d}", model, where
        )
        cases.append(
            dict(
                model=str(model),
                where=where,
                load=str(folder),
                again=str(tmp_path / f"again-{spell(where)}"),
            )
        )
    for where, (reports, weights, _) in zip(places, launch(cases), strict=True):
        expected = sources[where][1]
        assert reports == expected[0][FIRST:]
        assert all(torch.equal(weights[name], other) for name, other in expected[1].items()), where


def test_there_and_back(
    model: Path,
    sources: dict[Where, tuple[Path, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through layouts of more ranks than are started here, and in small groups of ZeRO 3: the same
    tensors at the end.
    """
    start = sources[f32((2, 1, 1), 3)][0]
    wanted = content(start, model)
    places = [
        f32((7, 1, 2), 2),
        f32((3, 1, 4), 3),
        f32((1, 5, 1), 3),
        f32((1, 1, 2), 0),
        f32((16, 1, 1), 1),
    ]
    at = start
    for number, where in enumerate(places):
        at = convert(at, tmp_path / f"{number}", model, where)
        assert_same(wanted, content(at, model), precision="float32")
    assert len(list((at / "random").iterdir())) == 16
    assert load_file(at / "random" / "rank_00015.safetensors").keys() == {"torch"}
    monkeypatch.setattr(deepspeed_place, "SUB_GROUP", 5000)
    small = convert(at, tmp_path / "small", model, f32((2, 1, 1), 3))
    state = torch.load(
        small / "state/state/zero_pp_rank_1_mp_rank_00_optim_states.pt", weights_only=False
    )["optimizer_state_dict"]
    sizes = [len(group) for group in state["fp32_flat_groups"]]
    assert len(sizes) > 3 and min(sizes[:-1]) >= 5000
    assert_same(
        wanted,
        content(convert(small, tmp_path / "back", model, f32((1, 1, 1), 0)), model),
        precision="float32",
    )


def full_disk(*arguments: Any) -> None:
    raise RuntimeError("full")  # as torch says it


def test_bad_input_is_refused(
    model: Path,
    sources: dict[Where, tuple[Path, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, table = tmp_path / "source", table_of(model)
    shutil.copytree(sources[bf16((2, 1, 1), 1)][0], source)
    with pytest.raises(ValueError, match=r"set training\.zero_stage to 1"):
        zero_files.reshard_checkpoint(source, tmp_path / "0", table, Layout(), 0)
    with pytest.raises(ValueError, match="other weights"):
        zero_files.reshard_checkpoint(source, tmp_path / "1", table[:-1], Layout(), 1)
    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match=r"mp_rank_00_model_states\.pt: full"):
        zero_files.reshard_checkpoint(source, tmp_path / "5", table, Layout(), 1)
    (source / "state/state/mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ValueError, match="is missing"):
        zero_files.reshard_checkpoint(source, tmp_path / "2", table, Layout(), 1)
    progress = json.loads((source / "run.json").read_text())
    (source / "run.json").write_text(
        json.dumps(
            progress | {"layout": "data 1 x sequence 1 x tensor 2 by autotp, ZeRO 1, bfloat16"}
        )
    )
    with pytest.raises(ValueError, match="autotp"):
        zero_files.reshard_checkpoint(source, tmp_path / "3", table, Layout(), 1)
    (source / "run.json").unlink()
    with pytest.raises(ValueError, match="no checkpoint of a run"):
        zero_files.reshard_checkpoint(source, tmp_path / "4", table, Layout(), 1)


def test_the_command_line(model: Path, tmp_path: Path) -> None:
    """`megarl sft` on two data ranks under ZeRO 3, its checkpoint to two tensor ranks under ZeRO 1,
    and `--resume True` there.
    """
    rows = [{"prompt": f"{a}+{b}=", "response": f"{a + b}"} for a in range(6) for b in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def go_on(name: str, *arguments: str, **training: Any) -> list[dict[str, Any]]:
        common = {
            "micro_batch_tokens": 16,
            "optimizer": {"learning_rate": 1e-3},
            "checkpoint": {"every": 2, "keep": 2},
        }
        tree = {
            "folder": str(tmp_path / name),
            "steps": 4,
            "samples_per_step": 7,
            "model": {"path": str(model)},
            "demonstrations": {"source": str(tmp_path / "rows.jsonl")},
            "training": common | training,
        }
        done = megarl("sft", write_recipe(tmp_path / f"{name}.yaml", tree), *arguments, ranks=2)
        assert done.code == 0, done.err[-4000:]
        return records(tmp_path / name / "metrics.jsonl")

    def convert_by_tool(target: Path, layout: str) -> subprocess.CompletedProcess[str]:
        step = tmp_path / "data" / "checkpoints" / "step_000002"
        tool = [
            sys.executable,
            str(ROOT / "tools" / "reshard.py"),
            "checkpoint",
            str(step),
            str(target),
            "--layout",
            layout,
        ]
        return subprocess.run([*tool, "--json"], capture_output=True, text=True, timeout=120)

    whole = go_on("data", layout={"data": 2}, zero_stage=3)
    new = tmp_path / "tensor" / "checkpoints"
    new.mkdir(parents=True)
    done = convert_by_tool(new / "step_000002", "tensor 2 zero 1")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["step"] == 2 and said["layout"] == "data 1 x sequence 1 x tensor 2, ZeRO 1, float32"
    later = go_on("tensor", "--resume", "True", layout={"tensor": 2}, zero_stage=1)
    assert [row["step"] for row in later] == [3, 4]
    for mine, theirs in zip(later, whole[2:], strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert abs(mine[name] - theirs[name]) < 1e-5 * theirs[name]
    done = convert_by_tool(new / "step_000002", "tensor 2")
    assert done.returncode == 1 and "is there already" in done.stderr and not done.stdout
    done = convert_by_tool(new / "other", "tensor 3")
    assert (
        done.returncode == 1
        and "num_attention_heads" in done.stderr
        and not (new / "other").exists()
    )
