"""Several runs on one page: which are one group, and what is said of each group."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.report_page import Page

from megarl.apps.runs.report import main, write_report
from megarl.apps.runs.report_compare import grouped, settings_of
from megarl.errors import UserError
from megarl.observe.observer import Observer
from megarl.settings.observe import ObserveConfig
from megarl.types import StepReport

QUIET = ObserveConfig(tensorboard=False, progress=False)


def make_run(folder: Path, rewards: list[float], accuracy: float, recipe: str) -> Path:
    """A run whose steps have these rewards and take 2 s, evaluated before and after."""
    with Observer(QUIET, folder, total_steps=len(rewards)) as observer:
        observer.evaluation(0, {"eval/accuracy": 0.25}, [])
        for step, reward in enumerate(rewards):
            observer.step(StepReport(step, {"reward/mean": reward, "time/step_s": 2.0}))
        observer.evaluation(len(rewards), {"eval/accuracy": accuracy}, [])
    (folder / "recipe.yaml").write_text(f"folder: {folder}\n{recipe}")
    return folder


def compared(runs: list[Path]) -> Page:
    """The page of several runs."""
    target = runs[0].parent / "x.html"
    return Page(write_report(*runs, title="x", target=target).read_text(encoding="utf-8"))


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two seeds of one recipe, the second of which ended early, and a run of another recipe."""
    recipe = "seed: {}\nmodel:\n  path: {}/sft/model\nlr: {}\n"
    given = (("a", [0.0, 1.0, 2.0], 0.5, "0.1"), ("b", [1.0, 2.0], 0.75, "0.1"))
    return [
        make_run(tmp_path / name, rewards, accuracy, recipe.format(seed, tmp_path / name, rate))
        for seed, (name, rewards, accuracy, rate) in enumerate(
            (*given, ("c", [3.0, 3.0, 3.0], 1.0, "0.2"))
        )
    ]


def test_runs_that_differ_in_the_seed_are_one_band(
    runs: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(run) for run in runs]) == 0
    assert capsys.readouterr().out == "compare.html\n"
    page = Page(Path("compare.html").read_text(encoding="utf-8"))
    seeds, other = page.charts["Reward: rollouts"]["series"]
    assert (seeds["label"], other["label"]) == ("lr 0.1 (2 runs)", "lr 0.2")
    assert seeds["steps"] == [1, 2], "up to the shortest run's end"
    assert seeds["rows"] == [[0.0, 1.0], [1.0, 2.0]] and seeds["smooth"]
    assert other["rows"] == [[3.0] * 3]
    held_out = page.charts["Accuracy: held out, greedy"]["series"][0]
    assert held_out["rows"] == [[0.25], [0.25]] and not held_out["smooth"]
    assert page.charts["Accuracy: held out, greedy"]["series"][0]["kind"] == "points"
    assert set(page.charts) == {
        "Reward: rollouts", "Accuracy: held out, greedy", "Time of a step: whole step"
    }  # fmt: skip
    shown = ("2.5 (2 to 3)", "62.5% (50.0% to 75.0%)", "100.0%", "0.500 (0.000 to 1.000)", "2.000")
    for text in shown:
        assert text in page.text, text
    loading = {"src", "href", "srcset"}
    assert not [attrs for _, attrs in page.seen if loading & set(attrs)]


def test_a_short_run_beside_a_long_one(runs: list[Path], tmp_path: Path) -> None:
    long = make_run(tmp_path / "long", [4.0] * 400, 0.5, "lr: 0.3\n")
    page = compared([*runs, long])
    (main,) = (attributes for tag, attributes in page.seen if tag == "main")
    assert main["data-steps"] == "[0, 400, 21]"
    reward = page.charts["Reward: rollouts"]
    assert [len(one["steps"]) for one in reward["series"]] == [2, 3, 400]
    assert reward["series"][1]["rows"] == [[3.0] * 3]


def test_other_code_is_told(runs: list[Path], tmp_path: Path) -> None:
    alike = compared(runs)
    assert "Made by" not in alike.text
    (runs[2] / "provenance.jsonl").write_text('{"step": 0, "torch": "0.1", "command": "x"}\n')
    page = compared(runs)
    made = page.text.partition("Made by")[2]
    assert "torch" in made and "0.1" in made and "command" not in made
    lines = '{"step": 0, "host": "x"}\n{"step": 1, "host": "y"}\n{"step": 2, "ho\n{"step": 3}\n'
    (runs[0] / "provenance.jsonl").write_text(lines)
    page = compared(runs[:2])
    made = page.text.partition("Made by")[2]
    assert "x, y" in made and "line 3 is not JSON" in made, "inside of one group"


def test_groups_are_told_by_the_settings_that_differ(runs: list[Path]) -> None:
    settings = {run: settings_of(run) for run in runs}
    assert settings[runs[0]]["model.path"] == "FOLDER/sft/model"
    groups, rows = grouped(settings)
    assert list(groups.values()) == [runs[:2], runs[2:]]
    assert rows == {"lr": ["0.1", "0.2"]}
    groups, rows = grouped({run: one | {"x": f"{run}"} for run, one in settings.items()})
    assert list(rows) == ["lr", "x"] and list(groups) == [str(run) for run in runs], "too long"
    spaces = {run: {"x": "a b" if run == runs[0] else "a  b"} for run in runs[:2]}
    assert list(grouped(spaces)[0].values()) == [runs[:1], runs[1:2]], "of one label"
    groups, rows = grouped({run: {"seed": "1"} for run in runs[:2]})
    assert (groups, rows) == ({f"{runs[0]} (2 runs)": runs[:2]}, {})


def test_paths_of_the_run_itself_make_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Trainer` writes absolute paths below a folder that may be as typed, and relative."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        folder = Path("runs") / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(
            f"folder: {folder}\nlist: [{folder.absolute()}/inputs/x.jsonl, {folder}/y]\n"
            f"keys: {{{folder.absolute()}/inputs/f: 1}}\n"
            f"other: /data/{folder}/model\n"
        )
    first, second = (settings_of(Path("runs") / name) for name in ("a", "b"))
    assert first["list"] == "['FOLDER/inputs/x.jsonl', 'FOLDER/y']"
    assert {key for key in first if first[key] != second.get(key)} == {"folder", "other"}


def test_a_loss_is_drawn_as_what_it_is(runs: list[Path], tmp_path: Path) -> None:
    supervised = tmp_path / "sft"
    supervised.mkdir()
    for folder in (runs[2], supervised):
        reward = ', "reward/mean": 1' if folder == runs[2] else ""
        lines = "".join(f'{{"step": {at}, "loss": 0.5{reward}}}\n' for at in (1, 2))
        (folder / "metrics.jsonl").write_text(lines)
    (supervised / "recipe.yaml").write_text("lr: 0.5\n")
    (supervised / "transcripts.jsonl").write_text("no JSON\n")  # which no comparison reads
    charts = compared([runs[2], supervised]).charts
    found = {
        name: [one["label"].partition(",")[0] for one in charts[name]["series"]]
        for name in ("Training loss: loss", "Loss")
    }
    assert found == {"Training loss: loss": ["lr 0.5"], "Loss": ["lr 0.2"]}


def test_what_cannot_be_compared_is_named(runs: list[Path], tmp_path: Path) -> None:
    def refused(match: str, *words: object) -> None:
        with pytest.raises(UserError, match=match):
            main([*map(str, words), f"--out={tmp_path}"])

    refused("a run folder is named twice", runs[0], f"{runs[0]}/../a")
    refused("none has no metrics.jsonl", runs[0], tmp_path / "none")
    (runs[1] / "recipe.yaml").unlink()
    refused(f"b/recipe.yaml does not exist.* leave {runs[1]} out", *runs)
    assert not (tmp_path / "compare.html").exists()
