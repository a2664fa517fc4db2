"""Starts the processes of a launch, waits for the trainer ranks, and ends what it started.

Each process runs below `megarl.apps.launch.node_process` on its node: on this one as a child
process, on another node of a Slurm allocation as a step of `srun`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from megarl.apps.launch.launch_processes import Addresses, Process
from megarl.apps.launch.node_process import END, KILL
from megarl.apps.launch.slurm import srun
from megarl.cluster.process_env import RAY_SETTINGS
from megarl.private_folder import PrivateFolder, kill_marked, refuse_open
from megarl.signals import SIGNALS

READY_WITHIN_S = 240.0
"""Seconds within which Ray must answer, on all nodes, after it is started."""
RANKS_END_WITHIN_S = 45.0
"""Seconds that the ranks have to end after a signal."""
OTHERS_END_WITHIN_S = 15.0
"""Seconds that the ranks of other nodes have to end by themselves once those of one have failed."""
AGENTS_END_WITHIN_S = 10.0
"""Seconds until a node's processes have ended once nobody gives orders any more."""
POLL_S = 0.2


@dataclass(frozen=True)
class Launch:
    """What to start, and where."""

    processes: Sequence[Process]
    """See `megarl.apps.launch.launch_processes.processes`."""
    hosts: Sequence[str]
    """Name of each node, for srun; one name: processes are started on this machine, without it."""
    addresses: Addresses
    logs: Path
    """Folder of the logs: of a run on several nodes, and of Ray where a run has failed."""
    more_s: float = 0.0
    """Seconds that the ranks have for a checkpoint after a signal, beyond those of every run."""


@dataclass
class RunningProcess:
    """A started process."""

    process: Process
    popen: subprocess.Popen[bytes]
    log: Path | None
    """Where its output goes; None for the launcher's own."""
    code: int | None = None
    """Exit code, once known."""

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        found = self.popen.poll()
        if found is not None:
            self.code = found if found >= 0 else 128 - found
        return self.code

    def order(self, order: bytes) -> None:
        """Send an order of `node_process`, if the process's node still listens."""
        if self.popen.stdin is not None:
            with contextlib.suppress(OSError):
                self.popen.stdin.write(order)
                self.popen.stdin.flush()


@dataclass
class Launcher:
    """Runs a `Launch` once."""

    launch: Launch
    environment: dict[str, str] = field(default_factory=dict)
    running: list[RunningProcess] = field(default_factory=list)
    hurry: threading.Event = field(default_factory=threading.Event)
    """Set by a signal while everything is being ended, or once ranks have failed: nothing is waited
    for then."""
    silent: list[str] = field(default_factory=list)
    """Nodes on which processes did not end in time, after `run`: they do not answer."""

    def run(self) -> int:
        """Returns the exit code: that of the ranks that failed first, or 1 if Ray fails."""
        state = Path(self.launch.addresses.state)
        # DeepSpeed looks for ninja beside Python; ranks, Ray and its workers agree on the token.
        self.environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        folder = None
        code = 143  # a signal's, unless one of the lines below is reached
        try:
            folder = PrivateFolder(state)
            code = self._run()
            return code
        finally:
            for number in SIGNALS:
                signal.signal(number, lambda *_: self.hurry.set())
            self.end()
            if folder is not None:
                if code not in (0, 2) and code < 128:
                    self._keep_logs(state)
                folder.remove()

    def _keep_logs(self, state: Path) -> None:
        """Copy the logs of this node's Ray into the run folder, and say so."""
        kept, found = self.launch.logs / "ray", state / "0" / "session_latest" / "logs"
        if found.is_dir():
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(found, kept, dirs_exist_ok=True)
            announce(f"Ray's logs are in {kept}")

    def _run(self) -> int:
        rays = [one for one in self.launch.processes if one.kind == "ray"]
        ranks = [one for one in self.launch.processes if one.kind == "ranks"]
        for some, num_nodes in ((rays[:1], 1), (rays[1:], len(rays))):  # the head first
            for one in some:
                self.start(one)
            if some and not self.wait_for_ray(num_nodes):
                return 1
        refuse_open(Path(self.launch.addresses.state))
        for one in ranks:
            self.start(one)
        return self.wait_for_ranks()

    def start(self, process: Process) -> None:
        """Start a process on its node."""
        state = Path(self.launch.addresses.state)
        host = self.launch.hosts[process.node]
        log, words = None, list(process.command.words)
        agent = [sys.executable, "-m", "megarl.apps.launch.node_process", process.kind]
        environment = self.environment
        if len(self.launch.hosts) == 1:
            environment = environment | process.command.environment
            if process.kind == "ray":
                log = state / "ray.log"
            words = [*agent, *words]
        else:
            if process.kind == "ray" or process.node != 0:
                self.launch.logs.mkdir(parents=True, exist_ok=True)
                log = self.launch.logs / f"{host}-{process.kind}.log"
            # Slurm sets variables of its own in a step, CUDA_VISIBLE_DEVICES too.
            settings = [f"{name}={value}" for name, value in process.command.environment.items()]
            words = srun(host, ["env", *settings, *agent, *words])
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(log.open("ab")) if log is not None else None
            popen = start(words, environment, out)
        self.running.append(RunningProcess(process, popen, log))

    def wait_for_ray(self, num_nodes: int) -> bool:
        """Whether Ray runs on `num_nodes` nodes within `READY_WITHIN_S`; if not, says why."""
        at = self.launch.addresses
        ready = [sys.executable, "-m", "megarl.apps.launch.ray_nodes", f"{at.head}:{at.ray_port}"]
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline and all(one.poll() is None for one in self.running):
            with contextlib.suppress(subprocess.TimeoutExpired):
                asked = subprocess.run(
                    [*ready, str(num_nodes)],
                    env=self.environment | RAY_SETTINGS,
                    capture_output=True,
                    timeout=30,
                )
                if asked.returncode == 0:
                    return True
            time.sleep(POLL_S)
        failed = next((one for one in self.running if one.poll() is not None), self.running[-1])
        self._show_end(failed)
        where = f"on port {at.ray_port}"
        if num_nodes > 1:
            where = f"on all {num_nodes} nodes"
        announce(
            f"error: Ray was not ready {where} within {READY_WITHIN_S:g} s (the last lines of"
            f" {self._place(failed)} are above); is the port taken (--port), or /tmp full?"
        )
        return False

    def wait_for_ranks(self) -> int:
        """Wait until the ranks of all nodes have ended; returns the exit code of those that failed
        first, 0 if none did, or 1 if Ray ended before.
        """
        ranks = [one for one in self.running if one.process.kind == "ranks"]
        rays = [one for one in self.running if one.process.kind == "ray"]
        deadline, first = float("inf"), None
        while time.monotonic() < deadline:
            if first is None:
                first = next((one for one in ranks if one.poll()), None)
                if first is not None:  # the others notice it, and end
                    deadline = time.monotonic() + OTHERS_END_WITHIN_S + self.launch.more_s
            if all(one.poll() is not None for one in ranks):
                break
            lost = next((one for one in rays if one.poll() is not None), None)
            if lost is not None and first is None:
                self._show_end(lost)
                announce(
                    f"error: Ray{self._of_node(lost)} ended with exit code {lost.code} while the"
                    " trainers were running (its last lines are above); ending them"
                )
                return 1
            time.sleep(POLL_S)
        if first is None:
            return 0
        self.hurry.set()
        if first.log is not None:
            self._show_end(first)
            announce(f"the ranks{self._of_node(first)} failed first (their last lines are above)")
        return first.code or 1

    def _host(self, one: RunningProcess) -> str:
        return self.launch.hosts[one.process.node]

    def _of_node(self, one: RunningProcess) -> str:
        return f" on {self._host(one)}" if len(self.launch.hosts) > 1 else ""

    def _place(self, one: RunningProcess) -> str:
        return str(one.log) if len(self.launch.hosts) > 1 else "Ray"

    def _show_end(self, one: RunningProcess) -> None:
        """Print the last lines of a process's log on standard error."""
        if one.log is not None:
            lines = one.log.read_text(errors="replace").splitlines()[-20:]
            print("\n".join(lines), file=sys.stderr)

    def end(self) -> None:
        """Let the ranks save a checkpoint and end; then kill all that still runs, on every node.
        Once `hurry` is set, nothing is waited for.
        """
        ranks = [one for one in self.running if one.process.kind == "ranks"]
        self._end(ranks, END, RANKS_END_WITHIN_S + self.launch.more_s)
        self._end(self.running, KILL, AGENTS_END_WITHIN_S)
        self.silent = sorted({self._host(one) for one in self.running if one.poll() is None})
        leaders = {one.popen.pid for one in self.running}
        if left := kill_marked(self.launch.addresses.state, leaders):
            numbers = " ".join(map(str, left))
            announce(f"still running after SIGKILL (a driver holds them): {numbers}")

    def _end(self, which: Sequence[RunningProcess], order: bytes, patience_s: float) -> None:
        for one in which:
            one.order(order)
        deadline = time.monotonic() + patience_s
        while any(one.poll() is None for one in which) and time.monotonic() < deadline:
            if order == END and self.hurry.wait(POLL_S / 4):
                break
            time.sleep(POLL_S / 4)


def announce(text: str) -> None:
    """Print a line on standard error."""
    print(f"megarl launch: {text}", file=sys.stderr, flush=True)


def start(
    words: Sequence[str], environment: dict[str, str], log: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in a new session, with a pipe as its standard input, which ends with this
    process; standard output and standard error go to `log`.
    """
    return subprocess.Popen(
        list(words),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        start_new_session=True,
    )
