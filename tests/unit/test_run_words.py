"""`megarl run`: which command starts a recipe, with which words; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT, python, write_recipe

from megarl import cli
from megarl.apps.launch import run_words
from megarl.apps.launch.run_words import words_to_start
from megarl.errors import UserError
from megarl.parallel.devices import DriverGpu
from megarl.signals import SHUTDOWN

GPUS = [DriverGpu("NVIDIA H200", "580.65.06", is_cut=False)] * 2
SECTIONS: dict[str, dict[str, Any]] = {
    "train": {"prompts": {"source": "rows.jsonl"}},
    "distill": {"prompts": {"source": "rows.jsonl"}, "teacher": {"model": {"path": "big"}}},
    "sft": {"demonstrations": {"source": "rows.jsonl"}},
    "preference": {"preferences": {"source": "rows.jsonl"}, "loss": {"method": "ipo"}},
    "reward-model": {"preferences": {"source": "rows.jsonl", "margin_column": "margin"}},
}
Write = Callable[..., str]


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs, outside of Slurm and torchrun."""
    for name in ("RANK", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "MEGARL_DEVICE", SHUTDOWN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run_words, "driver_gpus", list)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A recipe of a command, with further settings."""

    def write(command: str = "sft", **more: Any) -> str:
        tree = {"folder": "runs/mine", "model": {"path": "small"}, **SECTIONS[command], **more}
        return write_recipe(tmp_path / "r.yaml", tree)

    return write


def layout(**degrees: int) -> dict[str, Any]:
    return {"training": {"layout": degrees}}


@pytest.mark.parametrize("command", SECTIONS)
def test_sections_say_which_command_it_is(command: str, write: Write) -> None:
    path, settings = write(command), ["--steps", "3", "--seed=4"]
    assert words_to_start([path, *settings]) == [command, path, *settings]
    assert words_to_start([path, "--", *settings]) == [command, path, *settings]
    ranks = ["torchrun", "--nproc-per-node", "2", command, path, *settings]
    assert words_to_start([path, *settings[:2], "--ranks", "2", settings[2]]) == ranks
    placed = ["launch", path, "--cpu", "--gpus-train", "1", "--", *settings]
    assert words_to_start([path, "--cpu", *settings]) == placed
    both = [path, "--check", "--print-config"]
    assert words_to_start([*both, "--steps", "3"]) == [
        command, path, "--steps", "3", "--check", "--print-config"
    ]  # fmt: skip


def test_a_line_says_how_many_ranks_a_layout_needs(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(**layout(data=2, tensor=2))
    assert words_to_start([path])[:4] == ["torchrun", "--nproc-per-node", "4", "sft"]
    said = "megarl run: 4 trainer ranks, as the recipe's layout asks for\n"
    assert capsys.readouterr().err == said
    changed = [path, "--training.layout.data", "1"]
    assert words_to_start(changed)[:3] == ["torchrun", "--nproc-per-node", "2"]
    assert words_to_start([path, "--check"]) == ["sft", path, "--check", "--ranks", "4"]
    capsys.readouterr()
    assert words_to_start([path, "--check", "--ranks", "8"])[-2:] == ["--ranks", "8"]
    assert words_to_start([path, "--print-config"]) == ["sft", path, "--print-config"]
    assert words_to_start([path, "--ranks", "1"]) == ["sft", path]
    assert words_to_start([write()])[0] == "sft"
    assert capsys.readouterr().err == "", "of one rank, or of what was asked for, nothing is said"
    teacher = {"model": {"path": "big"}, "ranks": [1]}
    assert words_to_start([write("distill", teacher=teacher)])[2] == "2"
    assert words_to_start([write(**layout(sequence=2))])[2] == "2"
    said = "2 trainer ranks, the fewest that the recipe's layout asks for; for more set --ranks\n"
    assert capsys.readouterr().err == f"megarl run: {said}" * 2


def test_an_open_layout_has_a_rank_for_each_gpu_of_colocated_engines(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write("train", rollout={"num_engines": 4, "engine": {"tensor": 2}, "max_staleness": 0})
    colocated = ["--rollout.placement", "colocated"]
    assert words_to_start([path])[0] == "train"
    assert words_to_start([path, *colocated])[2] == "8"
    said = "megarl run: 8 trainer ranks, as the recipe's colocated engines ask for\n"
    assert capsys.readouterr().err == said
    apart = [*colocated, "--reference.ranks", "[8]", "--algorithm.kl.coefficient", "0.1"]
    assert words_to_start([path, *apart])[2] == "9"
    fixed = [*colocated, "--training.layout.data", "4", "--training.layout.tensor", "2"]
    assert words_to_start([path, *fixed, "--rollout.num_engines", "2"])[2] == "8"


def test_torchrun_waits_for_a_checkpoint(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(training={"checkpoint": {"save_within_s": 59.5}})
    begin, rest = ["torchrun", "--nproc-per-node", "2"], ["sft", path]
    assert words_to_start([path, "--ranks", "2"]) == [*begin, "--shutdown-timeout", "65", *rest]
    assert words_to_start([path]) == rest, "torchrun does not start this one"
    monkeypatch.setenv(SHUTDOWN, "65")
    assert words_to_start([path, "--ranks", "2"]) == [*begin, *rest]


def test_gpus_and_slurm_are_for_launch(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fixed = write(), ["--training.layout.data", "2"]
    opened = ["launch", path, "--gpus-train", "1"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert words_to_start([path]) == opened
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setattr(run_words, "driver_gpus", lambda: GPUS)
    assert words_to_start([path]) == opened
    assert words_to_start([path, *fixed]) == ["launch", path, "--", *fixed]
    assert words_to_start([path, "--ranks", "2"]) == ["launch", path, "--gpus-train", "2"]
    assert words_to_start([path, "--gpus-train=2"]) == ["launch", path, "--gpus-train", "2"]
    assert words_to_start([path, "--check"]) == ["sft", path, "--check", "--ranks", "1"]
    assert words_to_start([path, "--check", *fixed])[-2:] == ["--ranks", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert words_to_start([path]) == ["sft", path], "hidden GPUs are none"
    planned = ["--nodes", "2", "--gpus-per-node", "8", "--dry-run"]
    assert words_to_start([path, *planned, *fixed]) == ["launch", path, *planned, "--", *fixed]


def test_a_rank_of_torchrun_starts_no_other(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    path = write(**layout(data=2))
    assert words_to_start([path, "--steps", "3"]) == ["sft", path, "--steps", "3"]
    assert words_to_start([path, "--check"]) == ["sft", path, "--check"]
    assert words_to_start([path, "--print-config"]) == ["sft", path, "--print-config"]
    for option in ("--dry-run", "--cpu", "--gpus-train 2", "--ranks 2"):
        with pytest.raises(ValueError, match=f"^{option} is for the process that starts the ranks"):
            words_to_start([path, *option.split()])


def test_preferences_alone_are_for_a_preference_loss(write: Write) -> None:
    path = write("preference", loss={"sft_coefficient": 0.1})
    assert words_to_start([path]) == ["preference", path]
    path = write("preference", loss={})
    assert words_to_start([path]) == ["preference", path]
    assert words_to_start([path, "--loss.method", "dpo"])[0] == "preference"
    assert words_to_start([path, "--loss.centering", "0.1"])[0] == "reward-model"
    with pytest.raises(ValueError, match=r"loss\.centring: unknown key"):
        words_to_start([path, "--loss.centring", "0.1"])


MISTAKES = {
    "": "megarl run needs a recipe first: megarl run RECIPE.yaml",
    "--ranks 2 R": "megarl run needs a recipe first",
    "R --ranks 0": "megarl run: --ranks is '0'; set it to a whole number of at least 1; see",
    "R --ranks": "megarl run: --ranks expected one argument",
    "R --ranks 2 --gpus-train 2": "--ranks and --gpus-train both say how many trainer ranks",
    "R --ranks 2 --print-config": "--print-config prints the same for any --ranks; leave one out",
    "R --check --cpu": "--check is not for a placement, which --cpu asks for",
    "R S": "'S' is no setting",
    "R --stepz 3": "stepz: unknown key; did you mean 'steps'?",
    "{root}/README.md": "README.md, line ",
    "{root}/launch/recipes": "launch/recipes is a folder; pass a .yaml file",
    "none.yaml": "none.yaml does not exist",
    "{root}/launch/recipes/serve_reward.yaml": "is for megarl serve-reward; megarl train has no",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line_before_anything_starts(line: str, write: Write) -> None:
    path = write()
    words = [path if word == "R" else word.format(root=ROOT) for word in line.split()]
    with pytest.raises(UserError) as refused:
        cli.words_of_command(["run", *words])
    assert MISTAKES[line] in str(refused.value) and "\n" not in str(refused.value)


def test_words_of_other_commands_stay(write: Write) -> None:
    for words in ([], ["doctor"], ["train", "r.yaml"], ["run", "--help"], ["run", write(), "-h"]):
        assert cli.words_of_command(words) == words


def test_the_words_are_found_without_torch_and_then_run(write: Write) -> None:
    path = write(**layout(data=2))
    code = (
        "import json, sys\nfrom megarl import cli\n"
        f"words = cli.words_of_command(['run', {path!r}])\n"
        "print(json.dumps([words, [m for m in ('torch', 'ray', 'transformers') if m in sys.modules]]))"
    )
    done = python("-c", code)
    words, heavy = json.loads(done.stdout)
    assert not heavy and words[:3] in (["torchrun", "--nproc-per-node", "2"], ["launch", path])
    printed = [python("-m", "megarl", one, path, "--print-config") for one in ("run", "sft")]
    assert printed[0].stdout == printed[1].stdout != "", printed[0].stderr
