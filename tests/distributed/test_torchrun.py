"""`megarl torchrun`: the ranks' one line of error stands alone, with its exit code."""

from __future__ import annotations

from pathlib import Path

from support.commands import megarl


def test_a_mistake_is_one_line_under_torchrun_too(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("folder: run\nstepz: 3\n")
    options = ["--standalone", "--nproc-per-node", "2"]
    done = megarl("torchrun", *options, "train", str(recipe), timeout_s=120)
    assert done.code == 2 and done.out == "", done.err
    lines = done.err.strip().splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith(f"megarl: error: {recipe}: stepz: unknown key")


def test_without_a_command_it_says_how_it_is_used() -> None:
    done = megarl("torchrun", "--nproc-per-node", "2", timeout_s=60)
    assert done.code == 2 and done.err.startswith("usage: megarl torchrun"), done.err


def test_every_command_that_trains_runs_on_several_ranks() -> None:
    from megarl.cli import COMMANDS
    from megarl.parallel.torchrun import TRAINS

    assert set(TRAINS) == {name for name, one in COMMANDS.items() if one.owns_folder}
