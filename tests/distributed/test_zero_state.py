"""A run's checkpoint under another layout and ZeRO stage: training goes on as if nothing had
happened.

One launch a number of ranks: a start costs more than a case.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.ranks import run_ranks
from support.tiny import groups, write_model

from megarl.checkpoints.progress import choose, read_progress
from megarl.parallel.layout import Layout

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


Pairs = list[tuple[Where, Where]]
PAIRS: Pairs = [
    (f32((1, 1, 1), 0), f32((1, 1, 4), 0)),
    (f32((1, 2, 1), 2), f32((2, 2, 1), 3)),
    (f32((2, 1, 2), 3), f32((4, 1, 1), 2)),
    (f32((1, 1, 4), 0), f32((2, 1, 1), 1)),
    (bf16((2, 1, 1), 1), bf16((2, 1, 2), 3)),
    (fp16((2, 1, 2), 3), fp16((1, 1, 2), 2)),
    (f32((2, 1, 1), 3, tied=True), f32((1, 1, 2), 2, tied=True)),
    (bf16((2, 1, 1), 1), bf16((2, 1, 1), 1)),
    (fp16((2, 1, 2), 3), fp16((2, 1, 2), 3)),
]
"""Each stage as a source and as a target; words and key heads that tensor ranks share unevenly;
padding of every kind; and the same layout again.
"""
OTHERS: Pairs = [
    (f32((1, 1, 1), 0), f32((2, 1, 2), 3)),
    (f32((2, 1, 1), 1), f32((1, 1, 1), 0)),
    (f32((2, 1, 1), 3), f32((1, 1, 2), 1)),
    (f32((2, 1, 2), 2), f32((2, 1, 1), 3)),
    (bf16((2, 1, 2), 3), bf16((1, 1, 2), 2)),
    (bf16((1, 1, 2), 2), bf16((2, 1, 1), 1)),
    (bf16((2, 1, 1), 1), bf16((4, 1, 1), 1)),
    (fp16((2, 1, 1), 1), fp16((2, 1, 2), 3)),
    (f32((1, 1, 1), 0, tied=True), f32((2, 1, 1), 3, tied=True)),
    (f32((2, 1, 1), 3), f32((2, 1, 1), 3)),
    (f32((2, 1, 1), 1), f32((2, 1, 1), 1)),
]
"""The same, of others."""


def train(cases: list[dict[str, Any]]) -> list[Any]:
    """Per case: load a checkpoint if there is one, save again if asked, take steps; losses, norms,
    weights. On every rank.
    """
    from support.policy import Policy

    from megarl.checkpoints.checkpoint import Checkpoints
    from megarl.data.tokenizer import load_tokenizer
    from megarl.parallel import mesh as mesh_module
    from megarl.parallel.mesh import ProcessMesh
    from megarl.rollout.batch import shares
    from megarl.settings.objectives import AlgorithmConfig
    from megarl.settings.training import ModelConfig, OptimizerConfig, TrainingConfig

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
                    **case.get("training", {}),
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
            if load := case["load"]:
                progress = Checkpoints(Path(load).parent, **settings).load(Path(load))
                first = progress.step
                assert progress.next_ordinal == 4 * first
            for step in range(first, FIRST + MORE):
                if step == FIRST:
                    saved = Checkpoints(Path(case["save"]), **settings)
                    saved.save(step=step, next_ordinal=4 * step)
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


@pytest.fixture(scope="module", params=[PAIRS, pytest.param(OTHERS, marks=pytest.mark.nightly)])
def pairs(request: pytest.FixtureRequest) -> Pairs:
    return request.param


@pytest.fixture(scope="module")
def sources(
    models: dict[bool, Path], pairs: Pairs, tmp_path_factory: pytest.TempPathFactory
) -> dict[Where, tuple[Path, Any]]:
    """Where -> (a checkpoint written there, how training went on without a stop)."""
    folder = tmp_path_factory.mktemp("sources")
    places = list(dict.fromkeys(source for source, _ in pairs))
    cases = [
        dict(model=str(models[where[3]]), where=where, load="", save=str(folder / spell(where)))
        for where in places
    ]
    answers = launch(cases)
    return {
        where: (folder / spell(where) / f"step_{FIRST:06d}", found)
        for where, found in zip(places, answers, strict=True)
    }


def content(checkpoint: Path, model: Path) -> dict[str, dict[str, torch.Tensor]]:
    """{kind: {parameter: whole tensor}} of a checkpoint's state, put together by hand; each element
    of each is in one file. And the optimizer's and the run's counts of steps.
    """
    shapes = {name: tensor.shape for name, tensor in load_file(model / "model.safetensors").items()}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted((checkpoint / "state").iterdir()):
        with safe_open(str(path), framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            boxes = about.pop("boxes")
            for name, number in about.pop("numbers").items():
                found.setdefault("numbers", {})[name] = torch.tensor(float(number))
            found.setdefault("about", {})["steps"] = torch.tensor(float(about["steps_done"]))
            for key in file.keys():  # noqa: SIM118  (it is no dict)
                kind, _, name = key.partition("/")
                flat, filled = file.get_tensor(key), 0
                whole = found.setdefault(kind, {}).setdefault(
                    name, torch.full(shapes[name], float("nan"))
                )
                matrix = whole.view(shapes[name][0], -1)
                for top, bottom, left, right in boxes[name]:
                    region = matrix[top:bottom, left:right]
                    assert region.isnan().all(), (path, name)
                    region.copy_(flat[filled : filled + region.numel()].view(region.shape))
                    filled += region.numel()
                assert filled == len(flat), (path, name)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert found[kind].keys() == shapes.keys()
        assert not any(tensor.isnan().any() for tensor in found[kind].values())
    assert found.keys() == {"master", "exp_avg", "exp_avg_sq", "numbers", "about"}
    assert set(found["numbers"]) == {"step"} and found["numbers"]["step"] > 0
    return found


def test_training_goes_on_elsewhere(
    models: dict[bool, Path], pairs: Pairs, sources: dict[Where, tuple[Path, Any]], tmp_path: Path
) -> None:
    """Read under another layout and saved again as it was read: the same bits. Then the same steps
    as without a stop; under the same layout the same bits.
    """
    cases = [
        dict(
            model=str(models[source[3]]),
            where=target,
            load=str(sources[source][0]),
            save=str(tmp_path / f"again{number}"),
        )
        for number, (source, target) in enumerate(pairs)
    ]
    for (source, target), case, (reports, weights, steps) in zip(
        pairs, cases, launch(cases), strict=True
    ):
        model, again = models[source[3]], Path(case["save"]) / f"step_{FIRST:06d}"
        # A checkpoint that a run under the new layout chooses.
        wanted = f"{Layout(*target[0])}, ZeRO {target[1]}, {target[2]}"
        for folder in (sources[source][0], again):
            progress = read_progress(folder)
            fits = dict(layout=wanted, model=progress.model, seed=1, data="data")
            assert choose(folder.parent, **fits) == folder
        assert read_progress(again).layout == wanted
        before, after = content(sources[source][0], model), content(again, model)
        saved = load_file(again / "model" / "model.safetensors")
        for kind, tensors in before.items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, after[kind][name]), (source, target, kind, name)
        for name, tensor in saved.items():
            assert torch.equal(tensor, after["master"][name].to(tensor.dtype)), name
        expected = sources[source][1]
        assert steps == expected[2] and len(reports) == MORE
        if source == target:
            assert reports == expected[0][FIRST:]
            for name, other in expected[1].items():
                assert torch.equal(weights[name], other), (source, name)
        near = 1e-5 if source[2] == "float32" else 2e-2
        for mine, theirs in zip(reports, expected[0][FIRST:], strict=True):
            assert mine[0] == theirs[0] and mine[3:] == theirs[3:]
            assert abs(mine[1] - theirs[1]) < near, (source, target)
            assert abs(mine[2] - theirs[2]) < near * abs(theirs[2]), (source, target)
        worst = max(
            float((weights[name] - other).norm() / other.norm())
            for name, other in expected[1].items()
        )
        assert worst < near, (source, target, worst)
        assert (again / "model" / "model.safetensors").read_bytes() == (
            Path(case["load"]) / "model" / "model.safetensors"
        ).read_bytes()


def test_the_state_of_another_model_is_refused(
    sources: dict[Where, tuple[Path, Any]], tmp_path: Path
) -> None:
    """One whose parameters have the same names, and would take the first rows of the larger ones."""
    smaller = write_model(tmp_path / "model", biases=True, vocab_size=41, hidden_size=32)
    where = f32((1, 1, 1), 0)
    case = dict(model=str(smaller), where=where, load=str(sources[where][0]), save=str(tmp_path))
    with pytest.raises(AssertionError, match=r"is the state of another model: .* there and"):
        launch([case])
