"""`training.checkpoint.best`: the best checkpoint stays beside the newest ones, also after a resume,
and is found by whoever asks for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny import sft_config

from megarl.api import Result
from megarl.apps.runs.chat import model_of
from megarl.checkpoints.checkpoint import Checkpoints
from megarl.checkpoints.progress import Progress, write_progress
from megarl.errors import UserError
from megarl.observe.observer import EVALUATIONS
from megarl.parallel.mesh import Axis
from megarl.settings.config import PreferenceConfig, RunConfig

NAN = float("nan")


def commit(saved: Checkpoints, step: int) -> None:
    """Put an empty checkpoint in its place, as the thread of rank 0 does."""
    aside = saved.folder / ".writing_x"
    aside.mkdir(parents=True)
    saved._commit(aside, saved.folder / f"step_{step:06d}", {})


def opened(run: Path, best: str, keep: int) -> Checkpoints:
    none: Any = None
    checkpoints = run / "checkpoints"
    return Checkpoints(
        checkpoints, keep=keep, best=best, engine=None, tokenizer=none, mesh=none, seed=0, data=""
    )


def train(
    run: Path, best: str, keep: int, values: dict[int, float | None], begun: bool = False
) -> list[int]:
    """Save and evaluate at each step of {step: value of the metric, None for no evaluation}; the
    steps whose checkpoints stay. `begun`: the run has started once more before each step.
    """
    saved = opened(run, best, keep)
    for step, value in values.items():
        if begun:
            saved = opened(run, best, keep)
        commit(saved, step)
        if value is not None:
            name = best.removeprefix("min:") or "eval/loss"
            with (run / EVALUATIONS).open("a") as file:
                known = value if value == value else None
                file.write(json.dumps({"step": step, name: known}) + "\n")
            saved.evaluated(step, {name: value})
    return sorted(int(path.name[5:]) for path in saved.folder.glob("step_*"))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("best", "keep", "values", "stay"), [
    ("", 2, {1: 0.9, 2: 0.1, 3: 0.2}, [2, 3]),
    ("eval/accuracy", 2, {1: 0.9, 2: 0.1, 3: 0.2, 4: 0.3, 5: 0.4}, [1, 4, 5]),
    ("eval/accuracy", 1, {1: 0.9, 2: 0.9, 3: 0.2, 4: 0.9, 5: 0.1}, [4, 5]),
    ("eval/accuracy", 1, {1: 0.5, 2: NAN, 3: NAN}, [1, 3]),
    ("eval/accuracy", 1, {1: NAN, 2: NAN, 3: 0.0, 4: NAN}, [3, 4]),
    ("eval_sampled/accuracy", 1, {1: -1.0, 2: float("inf"), 3: -2.0}, [1, 3]),
    ("min:eval/loss", 1, {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.5}, [2, 4]),
    ("min:eval/loss", 2, {1: -3.0, 2: -1.0, 3: NAN, 4: -2.0}, [1, 3, 4]),
    ("eval/accuracy", 1, {1: None, 2: 0.2, 3: None, 4: 0.1, 5: None}, [2, 5]),
    ("eval/accuracy", 1, {8: 0.1, 9: 0.3, 10: 0.2, 999_999: 0.1, 1_000_000: 0.1}, [9, 10**6]),
])  # fmt: skip
def test_the_best_stays(
    best: str, keep: int, values: dict[int, float | None], stay: list[int], begun: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    assert train(tmp_path, best, keep, values, begun) == stay


def test_evaluations_after_the_resumed_step_do_not_count(tmp_path: Path) -> None:
    """The run was killed between its best evaluation and the checkpoint of that step."""
    best, folder = "eval/accuracy", tmp_path / "checkpoints"
    assert train(tmp_path, best, 1, {1: 0.5}) == [1]
    with (tmp_path / EVALUATIONS).open("a") as file:
        file.write(json.dumps({"step": 2, best: 0.9}) + "\n")
    write_progress(folder / "step_000001", Progress(1, 0, 0, "", "", ""))
    resumed = opened(tmp_path, best, 1)
    resumed.everyone = Axis("world", 1, 0, (0,), None)
    resumed.load(folder / "step_000001")
    commit(resumed, 2)
    assert {path.name for path in folder.iterdir()} == {"step_000001", "step_000002"}


def test_an_evaluation_without_the_metric_ends_the_run(tmp_path: Path) -> None:
    saved = opened(tmp_path, "eval/environment/turns", 1)
    saved.evaluated(0, {"eval_sampled/accuracy": 1.0})
    with pytest.raises(UserError, match=r"checkpoint\.best.*set it to one of eval/accuracy"):
        saved.evaluated(0, {"eval/accuracy": 1.0})
    saved.evaluated(1, {"eval/environment/turns": 1.0})
    saved.evaluated(2, {"eval/accuracy": 1.0})


def test_the_best_of_a_run_is_found(tmp_path: Path) -> None:
    """By `megarl chat --best` and by the API."""
    best = "min:eval/loss"
    with pytest.raises(UserError, match="no checkpoint yet"):
        model_of(str(tmp_path), best=True)
    assert train(tmp_path, best, 1, {1: 2.0, 2: 1.0, 3: 3.0}) == [2, 3]
    recipe = tmp_path / "recipe.yaml"
    for text in ("", "training:\n", "training: {checkpoint: {best: ''}}\n"):
        recipe.write_text(text)
        with pytest.raises(UserError, match="does not set"):
            model_of(str(tmp_path), best=True)
    recipe.write_text(f"training: {{checkpoint: {{best: '{best}'}}}}\n")
    folder = tmp_path / "checkpoints"
    assert model_of(str(tmp_path)) == str(folder / "step_000003" / "model")
    assert model_of(str(tmp_path), best=True) == str(folder / "step_000002" / "model")
    assert Result(tmp_path, {}).best_model == folder / "step_000002" / "model"
    (tmp_path / EVALUATIONS).write_text('{"step": 3, "eval/loss": null}\n')
    with pytest.raises(UserError, match="finite eval/loss"):
        model_of(str(tmp_path), best=True)


def recipe(kind: str, best: str, **evaluation: Any) -> Any:
    """A recipe of `kind` whose held-out data are evaluated every 5 steps."""
    base: dict[str, Any] = {"folder": "run", "model": {"path": "model"}}
    base["training"] = {"checkpoint": {"best": best}}
    data = {"source": "rows.jsonl"}
    if kind == "sft":
        held_out = {"demonstrations": data, "every": 5} | evaluation
        return sft_config(training=base["training"], evaluation=held_out)
    if kind == "rl":
        held_out = {"prompts": data, "every": 5} | evaluation
        return RunConfig(**base, prompts=data, evaluation=held_out)
    held_out = {"preferences": data, "every": 5} | evaluation
    loss = {"method": kind}
    return PreferenceConfig(**base, preferences=data, evaluation=held_out, loss=loss)


@pytest.mark.parametrize(("kind", "best", "evaluation", "says"), [
    ("rl", "eval/acuracy", {}, "did you mean 'eval/accuracy'"),
    ("rl", "accuracy", {}, "did you mean 'eval/accuracy'"),
    ("rl", "max:reward", {}, r"no evaluation.*eval/accuracy, eval/reward/mean"),
    ("rl", "reward/mean", {}, "did you mean 'eval/reward/mean'"),
    ("rl", "min:eval/", {}, "no evaluation"),
    ("rl", "eval_sampled/accuracy", {}, "no evaluation"),
    ("rl", "eval_sampled/environment/turns", {}, "no evaluation"),
    ("rl", "eval/accuracy", {"every": 0}, r"evaluation\.every"),
    ("rl", "eval/accuracy", {"prompts": {}}, r"evaluation\.prompts\.source"),
    ("rl", "eval/length/truncated_share", {}, "set it to 'min:eval/length/truncated_share'"),
    ("sft", "eval/loss", {}, "less is better; set it to 'min:eval/loss'"),
    ("sft", "min:eval/accuracy", {}, "no evaluation.*eval/loss, eval/tokens"),
    ("sft", "min:eval/loss", {"demonstrations": {}}, r"evaluation\.demonstrations\.source"),
    ("dpo", "eval/kl", {}, "no evaluation"),
    ("kto", "eval/kl", {}, "set it to 'min:eval/kl'"),
    ("dpo", "min:eval/loss", {"every": 0}, r"evaluation\.every"),
])  # fmt: skip
def test_what_cannot_be_best(kind: str, best: str, evaluation: Any, says: str) -> None:
    with pytest.raises(ValueError, match=rf"training\.checkpoint\.best is.*{says}"):
        recipe(kind, best, **evaluation)


@pytest.mark.parametrize(("kind", "best", "evaluation"), [
    ("rl", "eval/environment/turns", {}),
    ("rl", "min:eval_sampled/environment/reward/b.py:f", {"sampled_too": True}),
    ("sft", "min:eval/loss", {}),
    ("dpo", "eval/reward/margin", {}),
    ("kto", "min:eval/kl", {}),
    ("rl", "", {"every": 0}),
])  # fmt: skip
def test_what_can_be_best(kind: str, best: str, evaluation: Any) -> None:
    assert recipe(kind, best, **evaluation).training.checkpoint.best == best
