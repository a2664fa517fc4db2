"""`megarl run`: what starts a recipe, with which words; what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT, python, write_recipe, write_rows

from megarl import cli
from megarl.apps.launch import run_words
from megarl.command_line.table import TASKS
from megarl.command_line.words import parse
from megarl.errors import UserError
from megarl.parallel.devices import DriverGpu
from megarl.settings import config, recipe_file
from megarl.system.console import Options
from megarl.system.signals import SHUTDOWN

GPUS = [DriverGpu("NVIDIA H200", "580.65.06", is_cut=False)] * 2
SECTIONS: dict[str, dict[str, Any]] = {
    "rl": {"prompts": {"source": "rows.jsonl"}},
    "distill": {"prompts": {"source": "rows.jsonl"}, "teacher": {"model": {"path": "big"}}},
    "sft": {"demonstrations": {"source": "rows.jsonl"}},
    "preference": {"preferences": {"source": "rows.jsonl"}, "loss": {"method": "ipo"}},
    "reward_model": {"preferences": {"source": "rows.jsonl", "margin_column": "margin"}},
}
Write = Callable[..., str]
Started = Callable[..., Any]
HERE = "this process"


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs, outside of Slurm and torchrun; files of recipes need not be there."""
    monkeypatch.setattr(run_words, "check_named_files", lambda config: None)
    for name in ("RANK", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "MEGARL_DEVICE", SHUTDOWN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run_words, "driver_gpus", list)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What `megarl run WORDS` starts: HERE, the words for torchrun, or the options of a launch."""
    calls: list[tuple[Any, ...]] = []
    record = lambda *given, **_: calls.append(given) or (lambda: 0)  # noqa: E731
    monkeypatch.setattr(run_words, "load", lambda _: record)

    def start(*words: str) -> Any:
        plan = cli.plan(["run", *words])
        if plan.owns_folder:
            return HERE
        plan.run()
        return calls.pop()[-1]

    return start


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A recipe of a task, with further settings."""

    def write(task: str = "sft", **more: Any) -> str:
        tree = {"task": task, "folder": "runs/mine", "model": {"path": "small"}, **SECTIONS[task]}
        return write_recipe(tmp_path / "r.yaml", tree | more)

    return write


def layout(**degrees: int) -> dict[str, Any]:
    return {"training": {"layout": degrees}}


def test_every_task_has_its_class_and_its_functions() -> None:
    assert {task: kind.model_fields["task"].default for task, kind in config.TASKS.items()} == {
        task: task for task in TASKS
    }


@pytest.mark.parametrize("task", SECTIONS)
def test_a_recipe_is_run_here_by_torchrun_or_by_a_launch(
    task: str, write: Write, started: Started
) -> None:
    path, settings = write(task), ["--steps", "3", "--seed=4"]
    assert started(path, *settings) == started(path, "--", *settings) == HERE
    assert started(path, *settings[:2], "--ranks", "2", settings[2]) == [
        "--nproc-per-node", "2", "-m", "megarl", "run", path, *settings
    ]  # fmt: skip
    launched = started(path, "--cpu", *settings)
    assert (launched.cpu, launched.ranks, launched.overrides) == (True, 1, settings)
    printed = python("-m", "megarl", "run", path, "--print-config", "--steps", "3")
    assert f"task: {task}\n" in printed.stdout and "steps: 3\n" in printed.stdout


def test_a_line_says_how_many_ranks_a_layout_needs(
    write: Write, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(**layout(data=2, tensor=2))
    assert started(path)[:2] == ["--nproc-per-node", "4"]
    said = "megarl run: 4 trainer ranks, as the recipe's layout asks for\n"
    assert capsys.readouterr().err == said
    assert started(path, "--training.layout.data", "1")[1] == "2"
    capsys.readouterr()
    assert started(path, "--check", "--ranks", "8") == HERE
    assert started(path, "--ranks", "1") == HERE
    assert started(write()) == HERE
    assert capsys.readouterr().err == "", "of one rank, or of what was asked for, nothing is said"
    teacher = {"model": {"path": "big"}, "ranks": [1]}
    assert started(write("distill", teacher=teacher))[1] == "2"
    assert started(write(**layout(sequence=2)))[1] == "2"
    said = "2 trainer ranks, the fewest that the recipe's layout asks for; for more set --ranks\n"
    assert capsys.readouterr().err == f"megarl run: {said}" * 2


def test_a_check_is_for_as_many_ranks(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(path: str, *words: str) -> int | None:
        options = parse("run", [path, "--check", *words])
        recipe = cli.read_recipe("run", options)
        assert isinstance(recipe, config.SftConfig)
        assert run_words.other_processes("run", options, recipe) is None
        return options.ranks

    assert ranks(write(**layout(data=2, tensor=2))) == 4
    assert ranks(write(), "--ranks", "8") == 8 and ranks(write()) is None
    monkeypatch.setattr(run_words, "driver_gpus", lambda: GPUS)
    assert ranks(write()) == 1, "of a launch"


def test_an_open_layout_has_a_rank_for_each_gpu_of_colocated_engines(
    write: Write, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write("rl", rollout={"num_engines": 4, "engine": {"tensor": 2}, "max_staleness": 0})
    colocated = ["--rollout.placement", "colocated"]
    assert started(path) == HERE
    assert started(path, *colocated)[1] == "8"
    said = "megarl run: 8 trainer ranks, as the recipe's colocated engines ask for\n"
    assert capsys.readouterr().err == said
    apart = [*colocated, "--reference.ranks", "[8]", "--algorithm.kl.coefficient", "0.1"]
    assert started(path, *apart)[1] == "9"
    fixed = [*colocated, "--training.layout.data", "4", "--training.layout.tensor", "2"]
    assert started(path, *fixed, "--rollout.num_engines", "2")[1] == "8"


def test_torchrun_waits_for_a_checkpoint(
    write: Write, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(training={"checkpoint": {"save_within_s": 59.5}})
    assert started(path, "--ranks", "2")[2:4] == ["--shutdown-timeout", "65"]
    monkeypatch.setenv(SHUTDOWN, "65")
    assert started(path, "--ranks", "2")[2:4] == ["-m", "megarl"]


def test_gpus_and_slurm_are_for_a_launch(
    write: Write, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fixed = write(), ["--training.layout.data", "2"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert started(path).ranks == 1
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setattr(run_words, "driver_gpus", lambda: GPUS)
    assert started(path).ranks == 1 and started(path, "--ranks", "2").ranks == 2
    assert started(path, *fixed).overrides == fixed
    assert started(path, "--check") == HERE
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert started(path) == HERE, "hidden GPUs are none"
    planned: Options = started(path, "--nodes", "2", "--gpus-per-node", "8", "--dry-run", *fixed)
    assert (planned.nodes, planned.gpus_per_node, planned.dry_run) == (2, 8, True)


def test_a_rank_of_torchrun_starts_no_other(
    write: Write, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    path = write(**layout(data=2))
    assert started(path) == started(path, "--check") == HERE
    for option in ("--dry-run", "--cpu", "--ranks 2"):
        with pytest.raises(UserError, match=f"^{option} is for the process that starts the ranks"):
            started(path, *option.split())


def test_a_replay_runs_on_ranks_too(write: Write, started: Started, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    Path(write("rl")).rename(tmp_path / "run" / "recipe.yaml")
    run = str(tmp_path / "run")
    assert cli.plan(["replay", run]).owns_folder
    words: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_words, "load", lambda _: lambda given, **_: words.append(given))
        cli.plan(["replay", run, "--ranks", "2"]).run()
    assert words[0][:6] == ["--nproc-per-node", "2", "-m", "megarl", "replay", run]


MISTAKES = {
    "": "megarl run needs a recipe first: megarl run RECIPE.yaml",
    "--ranks 2 R": "megarl run needs a recipe first",
    "R --ranks 0": "megarl run: --ranks is '0'; set it to a whole number of at least 1; see",
    "R --ranks": "megarl run: --ranks expected one argument",
    "R --ranks 2 --print-config": "--print-config prints the same for any --ranks; leave one out",
    "R --check --cpu": "--check is not for a placement, which --cpu asks for",
    "R S --ranks 2": "'S' is no setting",
    "R --stepz 3 --ranks 2": "stepz: unknown key; did you mean 'steps'?",
    "{root}/README.md": "README.md, line ",
    "{root}/launch/recipes": "launch/recipes is a folder; pass a .yaml file",
    "none.yaml": "none.yaml does not exist",
    "{root}/launch/recipes/serve_reward.yaml": "add a line such as `task: rl` at its top",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line_before_anything_starts(line: str, write: Write) -> None:
    path = write()
    words = [path if word == "R" else word.format(root=ROOT) for word in line.split()]
    with pytest.raises(UserError) as refused:
        cli.plan(["run", *words])
    assert MISTAKES[line] in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("task", ["train", 3, ["rl"], ""])
def test_a_task_that_there_is_not(task: object, tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", {"task": task})
    with pytest.raises(UserError, match=r"task is .*; set it to one of rl, sft, preference, "):
        cli.plan(["run", path])


def test_a_command_takes_recipes_of_its_tasks(write: Write, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="has task: sft, and megarl eval needs a recipe with task: rl"
    ):
        cli.plan(["eval", write()])
    Path(write()).rename(tmp_path / "recipe.yaml")
    with pytest.raises(UserError, match="megarl replay needs a recipe with task: rl or distill"):
        cli.plan(["replay", str(tmp_path)])


def test_a_recipe_is_read_once_for_all_processes(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reads, read = write(), list[Path](), recipe_file.read_tree

    def read_tree(path: Path, *rest: Any) -> dict[str, Any]:
        reads.append(path)
        return read(path, *rest)

    monkeypatch.setattr(recipe_file, "read_tree", read_tree)
    monkeypatch.setattr(run_words, "load", lambda _: lambda _, environment: environment)
    options = parse("run", [path, "--ranks", "2", "--steps", "7"])
    launched = cli.read_recipe("run", options)
    assert isinstance(launched, config.SftConfig)
    start = run_words.other_processes("run", options, launched)
    assert start is not None and len(reads) == 1
    for name, value in {**start(), "RANK": "1"}.items():  # type: ignore[dict-item]
        monkeypatch.setenv(name, value)
    assert cli.read_recipe("run", options) == launched and len(reads) == 1
    assert launched.steps == 7 and config.HANDED not in os.environ, "only the rank itself"


def test_it_is_decided_without_torch(write: Write, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1", "response": "2"}])
    path = write(**layout(data=2), demonstrations={"source": rows})
    code = (
        f"import json, sys\nfrom megarl import cli\ncli.plan(['run', {path!r}])\n"
        "print(json.dumps([m for m in ('torch', 'ray', 'transformers') if m in sys.modules]))"
    )
    assert json.loads(python("-c", code).stdout) == []
