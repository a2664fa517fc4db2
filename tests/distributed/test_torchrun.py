"""The launcher of ranks: the ranks' one line of error stands alone, with its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import Done, finish, start
from support.ranks import ROOT

from megarl.parallel import torchrun


def launched(*words: str, **environment: str) -> Done:
    """The launcher with its options, and the recipe as the last of `words`."""
    module = [sys.executable, "-m", "megarl.parallel.torchrun", *words[:-1]]
    done = finish(*start([*module, "-m", "megarl", "run", words[-1]], **environment), 120)
    assert done.survivors == [], done.survivors
    return done


def test_a_mistake_is_one_line_whatever_restarts_are_allowed(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("task: rl\nfolder: run\nstepz: 3\n")
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    (temporary := tmp_path / "temporary").mkdir()
    done = launched(*options, str(recipe), TMPDIR=str(temporary))
    assert done.code == 2 and done.out == "", done.err
    assert list(temporary.iterdir()) == [], "torchrun's folders are in the run's, and go with it"
    lines = done.err.strip().splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith(f"megarl: error: recipe {recipe}: line 3: stepz: unknown key")


FAILS = """import os, sys
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
print(os.environ.get("OMP_NUM_THREADS", "open"), flush=True)
sys.exit(3)
"""


def test_other_failures_are_tried_again(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(FAILS)
    options = ["--standalone", "--nproc-per-node", "1", "--max-restarts", "1"]
    command = [sys.executable, "-m", "megarl.parallel.torchrun", *options, str(program)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, cwd=ROOT, env=environment
    )
    assert done.stdout.split() == ["attempt", "0", "open", "attempt", "1", "open"], done.stderr
    assert done.returncode == 3


@pytest.mark.parametrize(("options", "says"), [
    ("--nproc-per-node two", "two"),
    ("--nnodes many", "many"),
    ("--nprocesses 2", "--nprocesses"),
    ("--max-restarts often", "--max-restarts"),
    ("--nproc-per-node", "nproc"),
    ("--numa-binding node", "cores beside its GPU"),
])  # fmt: skip
def test_torchruns_own_options_are_refused_in_one_line(
    options: str, says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torchrun, "start", lambda options: pytest.fail("it was started"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert torchrun.run_agent([*options.split(), "-m", "megarl", "run", "recipe.yaml"]) == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("megarl: error: torchrun refuses its options: ")
    assert says in said[0] and "--help" in said[0]


def test_ranks_that_would_be_killed_before_they_have_saved_are_refused(tmp_path: Path) -> None:
    """torchrun's own patience is 30 s; a longer one is known to the ranks."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"task: sft\nfolder: {tmp_path}/run\nmodel: {{path: absent}}\ndemonstrations: {{source: absent}}\n"
        "training: {checkpoint: {save_within_s: 60}}\n"
    )
    errors = []
    for more in ([], ["--shutdown-timeout=65"]):
        options = ["--standalone", "--nproc-per-node", "1", *more]
        done = launched(*options, str(recipe))
        assert done.code == 2 and done.out == "", done.err
        errors.append(done.err.strip())
    assert errors[0].endswith(
        "training.checkpoint.save_within_s is 60, but torchrun kills its ranks 30 s after a signal;"
        " give it --shutdown-timeout 65"
    )
    assert "save_within_s" not in errors[1] and "absent" in errors[1]
