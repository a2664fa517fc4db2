"""`megarl torchrun`: the ranks' one line of error stands alone, with its exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support.commands import megarl
from support.ranks import ROOT

from megarl.parallel import torchrun
from megarl.parallel.node_watch import LOST_AFTER
from megarl.parallel.ports import free_port
from megarl.signals import SHUTDOWN


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


WAITS = """import os, signal, sys, time
from pathlib import Path
folder, node, agent = Path(sys.argv[1]), sys.argv[2], os.getppid()
signal.signal(signal.SIGTERM, lambda *_: sys.exit((folder / f"told{node}").touch()))
(folder / node).touch()
while os.getppid() == agent:
    time.sleep(0.05)
    for path in folder.glob(f"end{node}-*"):
        sys.exit(int(path.name.partition("-")[2]))
"""
Nodes = list[subprocess.Popen[str]]


def start_nodes(folder: Path, backend: str, *more: str, lost_after: str = "3") -> Nodes:
    """Agents of two nodes, each with a rank that waits for a file and that no collective ends. A
    file endN-C in `folder` ends that of node N with exit code C; it leaves a file toldN on SIGTERM.
    """
    program, place = folder / "waits.py", f"127.0.0.1:{free_port()}"
    program.write_text(WAITS)
    command, agents = [sys.executable, "-m", "megarl.parallel.torchrun"], Nodes()
    for node in range(2):
        options = ["--nnodes", "2", "--nproc-per-node", "1", *more]
        if backend == "static":
            host, port = place.split(":")
            options += ["--master-addr", host, "--master-port", port, f"--node-rank={node}"]
        else:
            options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--rdzv-id", "one"]
            options += [f"--rdzv-conf=is_host={1 - node}", "--local-addr", "127.0.0.1"]
        agent = subprocess.Popen(
            [*command, *options, str(program), str(folder), str(node)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | {LOST_AFTER: lost_after, SHUTDOWN: "5"},
            start_new_session=True,
        )
        agents.append(agent)
    deadline = time.monotonic() + 120
    while not all((folder / str(node)).exists() for node in range(2)):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    time.sleep(1)  # a sign of life comes every 0.2 s
    return agents


def end_nodes(agents: Nodes) -> None:
    for agent in agents:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.communicate()


SILENT = (
    f"megarl: node {{}} has given no sign of life for 3 s ({LOST_AFTER}); the ranks of this node"
)


@pytest.mark.parametrize(
    ("backend", "lost", "number"),
    [
        ("static", 1, signal.SIGKILL),
        ("c10d", 0, signal.SIGSTOP),
    ],
)
def test_a_lost_node_ends_the_ranks_of_the_others(
    backend: str, lost: int, number: signal.Signals, tmp_path: Path
) -> None:
    nodes = start_nodes(tmp_path, backend)
    try:
        os.killpg(nodes[lost].pid, number)
        said, _ = nodes[1 - lost].communicate(timeout=60)
        assert nodes[1 - lost].returncode == 1
        assert f"{SILENT.format(lost)} are ended" in said, said
        assert "Traceback" not in said, said
        assert (tmp_path / f"told{1 - lost}").exists(), "a rank may have a checkpoint to commit"
    finally:
        end_nodes(nodes)


def test_a_node_that_is_lost_while_ranks_are_started_again_is_noticed(tmp_path: Path) -> None:
    """torch's own call, in the agent's main thread, then waits for the lost node's store."""
    nodes = start_nodes(tmp_path, "static", "--max-restarts=1")
    try:
        os.killpg(nodes[0].pid, signal.SIGSTOP)
        (tmp_path / "end1-3").touch()
        said, _ = nodes[1].communicate(timeout=60)
        assert nodes[1].returncode == 1 and SILENT.format(0) in said, said
    finally:
        end_nodes(nodes)


def test_nodes_that_live_or_have_ended_in_order_are_not_lost(tmp_path: Path) -> None:
    nodes = start_nodes(tmp_path, "static")
    try:
        time.sleep(4)  # longer than a node may be silent
        (tmp_path / "end1-0").touch()
        time.sleep(1)
        os.kill(nodes[1].pid, signal.SIGKILL)  # it waits for the other, for five minutes at most
        time.sleep(4)
        assert nodes[0].poll() is None
        (tmp_path / "end0-0").touch()
        said, _ = nodes[0].communicate(timeout=60)
        assert nodes[0].returncode == 0 and "megarl" not in said, said
    finally:
        end_nodes(nodes)


def test_ranks_that_fail_are_named_on_the_other_node(tmp_path: Path) -> None:
    """Long before that node, whose agent has ended, is missed."""
    nodes = start_nodes(tmp_path, "static", lost_after="90")
    try:
        (tmp_path / "end0-3").touch()
        said, _ = nodes[1].communicate(timeout=60)
        assert nodes[1].returncode == 1
        assert "megarl: the ranks of node 0 have failed with exit code 3; " in said, said
        assert nodes[0].wait(30) == 3
    finally:
        end_nodes(nodes)


def test_after_another_rendezvous_nobody_misses_those_who_have_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node that left a rendezvous by c10d is not among those that the agent watches then."""
    monkeypatch.setenv(LOST_AFTER, "2")
    monkeypatch.setattr(torchrun.LocalElasticAgent, "_rendezvous", lambda self, group: None)
    handler = SimpleNamespace(get_backend=lambda: "c10d")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = torchrun.Agent.__new__(torchrun.Agent)
    agent._shutdown_timeout = 0

    def meet(round: int, num_nodes: int) -> None:
        prefixed = dist.PrefixStore(str(round), store)
        group: Any = SimpleNamespace(
            spec=SimpleNamespace(rdzv_handler=handler),
            store=prefixed,
            group_rank=0,
            group_world_size=num_nodes,
        )
        agent._rendezvous(group)

    meet(0, 3)
    meet(1, 2)
    assert agent._watch is not None
    until = time.monotonic() + 3
    while time.monotonic() < until:
        store.add("1/megarl/signs of life of node 1", 1)
        time.sleep(0.1)
    assert agent._watch.problem() == "" and capsys.readouterr().err == ""
    agent._watch.close()


@pytest.mark.parametrize("said", ["1 min", "1", "inf", "nan", "-5"])
def test_a_wrong_time_of_silence_is_one_line(
    said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LOST_AFTER, said)
    assert torchrun.run(["--nproc-per-node", "1", "absent.py"]) == 2
    assert capsys.readouterr().err == (
        f"megarl: error: {LOST_AFTER} is {said!r}; set it to 2 seconds or more, or to 0 for never\n"
    )


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
