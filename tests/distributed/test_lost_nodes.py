"""What the agents of `megarl run` on several nodes do where another node is gone, or its ranks
have failed. The ranks wait for files, so that no collective ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support.commands import until
from support.ranks import ROOT

from megarl.parallel import torchrun
from megarl.parallel.launcher import free_port
from megarl.parallel.node_watch import LOST_AFTER
from megarl.system.signals import SHUTDOWN

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
LOST_AFTER_S = 6.0
ENDS_WITHIN_S = 90.0
Nodes = list[subprocess.Popen[str]]
Outcome = tuple[int, str]
"""Exit code and output of the agent that is looked at."""


@contextlib.contextmanager
def nodes(
    folder: Path, *more: str, backend: str = "static", lost_after_s: float = LOST_AFTER_S
) -> Iterator[Nodes]:
    """Agents of two nodes with a rank each. A file endN-C in `folder` ends that of node N with exit
    code C; the rank leaves a file toldN on SIGTERM.
    """
    folder.mkdir()
    program, port = folder / "waits.py", str(free_port())
    program.write_text(WAITS)
    agents = Nodes()
    for node in range(2):
        options = ["--nnodes", "2", "--nproc-per-node", "1", *more]
        if backend == "static":
            options += ["--master-addr", "127.0.0.1", "--master-port", port, f"--node-rank={node}"]
        else:
            options += ["--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{port}"]
            options += ["--rdzv-id", "one", f"--rdzv-conf=is_host={1 - node}"]
            options += ["--local-addr", "127.0.0.1"]
        command = [sys.executable, "-m", "megarl.parallel.torchrun", *options, str(program)]
        agent = subprocess.Popen(
            [*command, str(folder), str(node)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | {LOST_AFTER: str(lost_after_s), SHUTDOWN: "5"},
            start_new_session=True,
        )
        agents.append(agent)
    try:
        until(lambda: all((folder / str(node)).exists() for node in range(2)), 120)
        time.sleep(LOST_AFTER_S / 4)  # signs of life come more often
        yield agents
    finally:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.communicate()


def end(agent: subprocess.Popen[str]) -> Outcome:
    said, _ = agent.communicate(timeout=ENDS_WITHIN_S)
    return agent.returncode, said


def lost(folder: Path, backend: str, node: int, number: signal.Signals) -> Outcome:
    with nodes(folder, backend=backend) as agents:
        os.killpg(agents[node].pid, number)
        found = end(agents[1 - node])
        assert (folder / f"told{1 - node}").exists(), "a rank may have a checkpoint to commit"
        return found


def lost_in_a_restart(folder: Path) -> Outcome:
    with nodes(folder, "--max-restarts=1") as agents:
        os.killpg(agents[0].pid, signal.SIGSTOP)
        (folder / "end1-3").touch()
        return end(agents[1])


def ended_in_order(folder: Path) -> Outcome:
    with nodes(folder) as agents:
        time.sleep(LOST_AFTER_S + 1)  # longer than a node may be silent
        (folder / "end1-0").touch()
        time.sleep(1.5)
        os.kill(agents[1].pid, signal.SIGKILL)  # it waits for the other, for five minutes at most
        time.sleep(LOST_AFTER_S + 2)
        assert agents[0].poll() is None
        (folder / "end0-0").touch()
        return end(agents[0])


def failed(folder: Path) -> Outcome:
    with nodes(folder, lost_after_s=600) as agents:
        (folder / "end0-3").touch()
        found = end(agents[1])
        assert agents[0].wait(30) == 3
        return found


CASES: Mapping[str, Callable[[Path], Outcome]] = {
    "node 1 dies": partial(lost, backend="static", node=1, number=signal.SIGKILL),
    "node 0 hangs": partial(lost, backend="c10d", node=0, number=signal.SIGSTOP),
    "node 0 hangs, a rank fails": lost_in_a_restart,
    "node 1 has ended": ended_in_order,
    "ranks fail": failed,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Outcome]]]:
    """All cases at once: they consist of waiting."""
    folder = tmp_path_factory.mktemp("nodes")
    with ThreadPoolExecutor(len(CASES)) as pool:
        yield {name: pool.submit(case, folder / name) for name, case in CASES.items()}


SILENT = f"has given no sign of life for 6 s ({LOST_AFTER})"


@pytest.mark.parametrize(("case", "code", "line"), [
    ("node 1 dies", 1, f"node 1 {SILENT}"),
    ("node 0 hangs", 1, f"node 0 {SILENT}"),
    ("node 0 hangs, a rank fails", 1, f"node 0 {SILENT}"),
    ("ranks fail", 1, "the ranks of node 0 have failed with exit code 3"),
    ("node 1 has ended", 0, ""),
])  # fmt: skip
def test_a_node_that_is_lost_or_fails_ends_the_ranks_of_the_others(
    outcomes: dict[str, Future[Outcome]], case: str, code: int, line: str
) -> None:
    """With c10d, and where a rank is started again, torch waits for the lost node's store in the
    agent's main thread. A failure is told long before that node, whose agent has ended, is missed.
    """
    found, said = outcomes[case].result()
    assert found == code and "Traceback" not in said, said
    told = f"megarl: {line}; the ranks of this node are ended"
    assert told in said if line else "megarl" not in said, said


def test_ranks_in_a_collective_of_nccl_do_not_get_the_time_of_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They hear of no failure, and would sit there for as long as a checkpoint may take."""
    running = SimpleNamespace(state=None, failures={})
    monkeypatch.setattr(torchrun.LocalElasticAgent, "_monitor_workers", lambda *_: running)
    agent: Any = torchrun.Agent.__new__(torchrun.Agent)
    agent._shutdown_timeout, agent._watch = 264, SimpleNamespace(problem=lambda: "node 1 is gone")
    with pytest.raises(torchrun.NodeLost):
        agent._monitor_workers(None)
    assert agent._shutdown_timeout == 30


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
    assert torchrun.run_agent(["--nproc-per-node", "1", "absent.py"]) == 2
    assert capsys.readouterr().err == (
        f"megarl: error: {LOST_AFTER} is {said!r}; set it to 2 seconds or more, or to 0 for never\n"
    )
