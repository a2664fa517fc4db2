"""`megarl torchrun`: the ranks' one line of error stands alone, with its exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import megarl
from support.ranks import ROOT

from megarl.parallel.node_watch import LOST_AFTER
from megarl.parallel.ports import free_port


def test_a_mistake_is_one_line_under_torchrun_too(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("folder: run\nstepz: 3\n")
    options = ["--standalone", "--nproc-per-node", "2"]
    done = megarl("torchrun", *options, "train", str(recipe), timeout_s=120)
    assert done.code == 2 and done.out == "", done.err
    lines = done.err.strip().splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith(f"megarl: error: {recipe}: stepz: unknown key")


def test_a_mistake_is_said_once_whatever_restarts_are_allowed(tmp_path: Path) -> None:
    options = ["--standalone", "--nproc-per-node", "1", "--max-restarts", "2"]
    missing = str(tmp_path / "absent.yaml")
    done = megarl("torchrun", *options, "train", missing, timeout_s=180)
    assert done.code == 2 and done.out == "", done.err
    assert len(done.err.strip().splitlines()) == 1 and missing in done.err


FAILS = """import os, sys
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
sys.exit(3)
"""


def test_other_failures_are_tried_again(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(FAILS)
    options = ["--standalone", "--nproc-per-node", "1", "--max-restarts", "1"]
    command = [sys.executable, "-m", "megarl.parallel.torchrun", *options, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT)
    assert done.stdout.split() == ["attempt", "0", "attempt", "1"] and done.returncode == 3


WAITS = """import os, sys, time
from pathlib import Path
folder, agent = Path(sys.argv[1]), os.getppid()
(folder / sys.argv[2]).touch()
while not (folder / f"end{sys.argv[2]}").exists() and os.getppid() == agent:
    time.sleep(0.05)
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Agents of two nodes, each with a rank that waits for a file and that no collective ends."""
    program = tmp_path / "waits.py"
    program.write_text(WAITS)
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    options += ["--master-port", str(free_port())]
    agents = []
    for node in range(2):
        words = [sys.executable, "-m", "megarl.parallel.torchrun", *options, f"--node-rank={node}"]
        agent = subprocess.Popen(
            [*words, str(program), str(tmp_path), str(node)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | {LOST_AFTER: "3"},
            start_new_session=True,
        )
        agents.append(agent)
    deadline = time.monotonic() + 120
    while not all((tmp_path / str(node)).exists() for node in range(2)):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    yield agents
    for agent in agents:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.communicate()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_ends_the_ranks_of_the_others(
    nodes: list[subprocess.Popen[str]], lost: int
) -> None:
    time.sleep(1)  # a sign of life comes every 0.2 s
    os.killpg(nodes[lost].pid, signal.SIGKILL)
    said, _ = nodes[1 - lost].communicate(timeout=60)
    assert nodes[1 - lost].returncode == 1
    assert said.splitlines()[-1] == (
        f"megarl: node {lost} has given no sign of life for 3 s ({LOST_AFTER}); the ranks of this"
        " node are ended"
    )


def test_nodes_that_live_or_have_ended_in_order_are_not_lost(
    nodes: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    time.sleep(4)  # longer than a node may be silent
    (tmp_path / "end1").touch()
    time.sleep(1)
    os.kill(nodes[1].pid, signal.SIGKILL)  # while it waits for the other, as after five minutes
    time.sleep(4)
    assert nodes[0].poll() is None
    (tmp_path / "end0").touch()
    said, _ = nodes[0].communicate(timeout=60)
    assert nodes[0].returncode == 0 and "sign of life" not in said, said


def test_without_a_command_it_says_how_it_is_used() -> None:
    done = megarl("torchrun", "--nproc-per-node", "2", timeout_s=60)
    assert done.code == 2 and done.err.startswith("usage: megarl torchrun"), done.err


def test_ranks_that_would_be_killed_before_they_have_saved_are_refused(tmp_path: Path) -> None:
    """torchrun's own patience is 30 s; a longer one is known to the ranks."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"folder: {tmp_path}/run\nmodel: {{path: absent}}\ndemonstrations: {{source: absent}}\n"
        "training: {checkpoint: {save_within_s: 60}}\n"
    )
    errors = []
    for more in ([], ["--shutdown-timeout=65"]):
        options = ["--standalone", "--nproc-per-node", "1", *more]
        done = megarl("torchrun", *options, "sft", str(recipe), timeout_s=120)
        assert done.code == 2 and done.out == "", done.err
        errors.append(done.err.strip())
    assert errors[0].endswith(
        "training.checkpoint.save_within_s is 60, but torchrun kills its ranks 30 s after a signal;"
        " give it --shutdown-timeout 65"
    )
    assert "save_within_s" not in errors[1] and "absent" in errors[1]


def test_every_command_that_trains_runs_on_several_ranks() -> None:
    from megarl.cli import COMMANDS
    from megarl.parallel.torchrun import TRAINS

    assert set(TRAINS) == {name for name, one in COMMANDS.items() if one.owns_folder}
